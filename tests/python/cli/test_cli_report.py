"""qsim report."""

import json
import re
from pathlib import Path

import pytest
import torch
from command import fine, refused
from html_reader import Reader
from torch import nn

import qsim

X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def sim():
    torch.manual_seed(0)
    sim = qsim.QuantSim(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval(), X, qsim.int8(target="onnxruntime"))
    sim.calibrate([X], progress=False)
    return sim


def written(capsys, *arguments):
    out = fine(capsys, "report", *arguments)
    path = re.fullmatch(r"wrote (.*)\n", out)[1]
    document = Path(path).read_text()
    return path, document, Reader(document).rows


@pytest.mark.parametrize("format", ["qsim", "aimet-1.0.0", "aimet-2.0.0"])
def test_encodings(capsys, sim, tmp_path, format):
    sim.save_encodings(tmp_path / "encodings.json", format)
    path, document, rows = written(capsys, tmp_path / "encodings.json")
    assert path == str(tmp_path / "encodings.json.html")
    assert f"<dd>{format}" in document
    for key, encoding in qsim.load_encodings(tmp_path / "encodings.json").encodings.items():
        (row,) = (row for row in rows if (row and row[0].startswith(key + "activation")) or (row and row[0].startswith(key + "parameter")))
        assert row[1].startswith(encoding.dtype)
        assert f"{encoding.scale.max().item():.4g}"[:5] in row[2]


def test_a_model_says_what_runs_in_float(capsys, sim, tmp_path):
    sim.disable("2.weight")
    sim.export(tmp_path / "model.onnx")
    _, document, rows = written(capsys, tmp_path / "model.onnx", "--output", tmp_path / "page.html")
    assert any(row and row[0].startswith("0.weight") for row in rows)
    assert "<h2>In float</h2>" in document
    assert any(row and row[0].startswith("2.") and len(row) == 2 for row in rows)


def test_two_files_side_by_side(capsys, sim, tmp_path):
    sim.save_encodings(tmp_path / "a.json", "qsim")
    sim.set_method("percentile", percentile=60.0)
    sim.save_encodings(tmp_path / "all.json", "qsim")
    qsim.save_encodings(qsim.load_encodings(tmp_path / "all.json").without("2.output"), tmp_path / "b.json", "qsim")
    files = [qsim.load_encodings(tmp_path / name).encodings for name in ("a.json", "b.json")]
    _, document, rows = written(capsys, tmp_path / "a.json", "--beside", tmp_path / "b.json", "--output", tmp_path / "page.html")
    shared = files[0].keys() & files[1].keys()
    differ = [
        k
        for k in shared
        if not torch.equal(files[0][k].scale, files[1][k].scale) or not torch.equal(files[0][k].zero_point, files[1][k].zero_point)
    ]
    assert differ
    assert f"<dt>that differ</dt><dd>{len(differ)}</dd>" in document
    (missing,) = (row for row in rows if row and row[0].startswith("2.output"))
    assert missing[-1] == "not in the other file"
    (chart,) = (json.loads(a["data-chart"]) for _, a in Reader(document).tags if "data-chart" in a)
    assert [one["name"] for one in chart["series"]] == ["this file", "the other file"]
    held = max(abs(files[0]["input"].min.item()), abs(files[0]["input"].max.item()))
    assert chart["series"][0]["values"][0] == pytest.approx(held, rel=1e-4)


def test_a_numeric_log(capsys, tmp_path):
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU())
    with qsim.numeric_log(model, tmp_path / "log"):
        for factor in (1.0, torch.inf):
            model(X * factor)
    _, document, rows = written(capsys, tmp_path / "log")
    names = [row[0] for row in rows]
    assert names == ["", "0", "1", "(the model)"]  # the head first
    assert rows[1][-1] == "1"  # the step in which it met NaN or Inf
    assert document.count('<tr class="error"') == 3


def test_what_cannot_be(capsys, sim, tmp_path):
    sim.save_encodings(tmp_path / "a.json", "qsim")
    assert "would replace what it is about" in refused(capsys, "report", tmp_path / "a.json", "--output", tmp_path / "a.json")
    with qsim.numeric_log(nn.Linear(8, 4), tmp_path / "log"):
        pass
    assert "--beside compares encodings" in refused(capsys, "report", tmp_path / "log", "--beside", tmp_path / "a.json")
    assert "there is no folder" in refused(capsys, "report", tmp_path / "a.json", "--output", tmp_path / "nowhere" / "page.html")
