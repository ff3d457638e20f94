"""The code that the documents show runs as shown."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch import nn

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "failures"  # whose blocks go on where the one before ended: test_failure_pages.py
DOCUMENTS = [ROOT / "README.md", *sorted(path for path in (ROOT / "docs").rglob("*.md") if path.parent != PAGES)]
BLOCKS = [(path, block) for path in DOCUMENTS for block in re.findall(r"```python\n(.*?)```", path.read_text(), re.S)]
OTHERS = {"accelerate", "lightning", "peft", "tensorboard", "timm", "transformers"}  # missing ones skip their recipes, but not in CI


def surroundings() -> dict:
    """What a reader has before the first line: a trained model, data, a metric, an optimizer."""
    torch.manual_seed(0)
    convolution = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    model = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4)).eval()
    batches = [(torch.randn(4, 3, 8, 8), torch.randint(4, (4,))) for _ in range(3)]

    @torch.no_grad()
    def accuracy(network: nn.Module) -> float:
        return sum((network(x).argmax(1) == y).sum().item() for x, y in batches) / 12

    return {
        "torch": torch,
        "nn": nn,
        "model": model,
        "example_inputs": batches[0][0],
        "other_inputs": torch.randn(2, 3, 16, 16),
        "loader": batches,
        "accuracy": accuracy,
        "loss_function": nn.CrossEntropyLoss(),
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }


@pytest.mark.parametrize(("path", "block"), BLOCKS, ids=[f"{p.name}-{i}" for i, (p, _) in enumerate(BLOCKS)])
def test_runs(path, block, tmp_path, monkeypatch):
    imported = re.findall(r"\w+", " ".join(re.findall(r"^from (\S+)", block, re.M))) + re.findall(
        r"\w+", " ".join(re.findall(r"^import (.*)", block, re.M))
    )
    for name in sorted(OTHERS & set(imported)) if "CI" not in os.environ else ():
        pytest.importorskip(name)
    monkeypatch.chdir(tmp_path)
    exec(compile(block, str(path), "exec"), surroundings())
