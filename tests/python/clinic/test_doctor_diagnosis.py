"""What a diagnosis shows: text, JSON, a page; findings in order; and what the doctor is called."""

from __future__ import annotations

import json
import math

import pytest
import torch
from torch import Tensor, nn

import qsim
from qsim.clinic.codes import CODES
from qsim.clinic.targets import TARGETS, target_named


class TwoFaults(nn.Module):
    """Squares that overflow, behind a mask that does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        scores = self.linear(x).masked_fill(x > 300, -1e9).softmax(-1)
        return scores + x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()


@pytest.fixture(scope="module")
def diagnosis():
    torch.manual_seed(0)
    return qsim.doctor(TwoFaults(), [torch.randn(4, 16) * 400], target="tensorrt-fp16", progress=False)


def test_findings_are_sorted_by_severity_then_by_place(diagnosis):
    assert [(f.code, f.severity) for f in diagnosis.findings] == [("QS010", "error"), ("QS012", "warning")]
    assert not diagnosis.healthy
    assert diagnosis.target == "tensorrt-fp16"


def test_text_names_everything(diagnosis):
    text = str(diagnosis)
    for finding in diagnosis.findings:
        for part in (finding.code, finding.op, finding.title, finding.source, finding.fix):
            assert part in text
    assert "chain: mean, add, sqrt" in text
    assert "1 error, 1 warning" in text.splitlines()[0]
    assert all(stage in text for stage in ("record", "survey", "checks"))


def test_json_is_standard_and_whole(diagnosis):
    def refuse(name):
        raise AssertionError(f"{name} is no JSON")

    read = json.loads(diagnosis.to_json(), parse_constant=refuse)
    assert [f["op"] for f in read["findings"]] == [f.op for f in diagnosis.findings]
    assert read["findings"][0]["evidence"]["chain"] == ["mean", "add", "sqrt"]
    assert read["findings"][1]["evidence"]["becomes"] == "-inf"
    assert read["sqnr"] == pytest.approx(diagnosis.sqnr)
    assert read["probes"] == diagnosis.probes


def test_page(diagnosis, tmp_path):
    path = tmp_path / "diagnosis.html"
    diagnosis.save(path)
    html = path.read_text(encoding="utf-8")
    assert html.startswith("<!doctype html>") or html.lower().startswith("<!doctype html>")
    assert all(finding.code in html and finding.op in html for finding in diagnosis.findings)
    assert "<script" in html
    assert [p.name for p in tmp_path.iterdir()] == ["diagnosis.html"]


def test_a_healthy_model_says_so():
    found = qsim.doctor(nn.Linear(4, 4), [torch.randn(2, 4)], target="bf16", progress=False)
    assert found.healthy
    assert "nothing found" in str(found)
    assert found.sqnr > 20


def test_an_output_of_zeros_is_said_to_be_equal():
    silent = nn.Linear(4, 4)
    nn.init.zeros_(silent.weight), nn.init.zeros_(silent.bias)
    found = qsim.doctor(silent, [torch.randn(2, 4)], target="bf16", progress=False)
    assert "output equal to float32's" in str(found)
    assert "inf dB" not in str(found)


def test_float32_has_no_half_precision():
    found = qsim.doctor(nn.Linear(4, 4), [torch.randn(2, 4)], progress=False)
    assert math.isnan(found.sqnr)
    assert found.probes == 0


def test_the_function_is_what_the_package_exports():
    import qsim.clinic

    assert callable(qsim.doctor)
    assert qsim.doctor is qsim.clinic.doctor


def test_targets():
    assert set(TARGETS) == {
        "float32",
        "bf16",
        "tensorrt-fp16",
        "onnxruntime-fp16",
        "coreml-fp16",
        *(name + precision for name in ("tensorrt", "onnxruntime", "openvino", "coreml", "executorch") for precision in ("", "-int8")),
    }
    assert target_named("coreml-fp16").accumulator == "float16"
    assert all(target.accumulator == "float32" for name, target in TARGETS.items() if name != "coreml-fp16")
    assert target_named(TARGETS["bf16"]) is TARGETS["bf16"]


def test_codes_and_severities_are_checked():
    assert all(code.startswith("QS") and len(code) == 5 for code in CODES)
    with pytest.raises(ValueError, match="code='QS999'"):
        qsim.Finding("QS999", "error", "", "", {}, "")
    with pytest.raises(ValueError, match="severity='fatal'"):
        qsim.Finding("QS001", "fatal", "", "", {}, "")  # type: ignore[arg-type]


def test_an_output_that_is_partly_nan_is_not_told_as_decibels():
    class Difference(nn.Module):
        def forward(self, x):
            return torch.cat([x[:, :3], x[:, 3:].square() - x[:, 3:].square()], 1)  # Inf - Inf in float16

    x = torch.tensor([[1.0, 2.0, 3.0, 300.0]])
    diagnosis = qsim.doctor(Difference(), [x], target="tensorrt-fp16", progress=False)
    assert diagnosis.nonfinite == 1
    assert "output NaN or Inf in 1 elements (" in str(diagnosis)
    assert json.loads(diagnosis.to_json())["nonfinite"] == 1
    healthy = qsim.doctor(Difference(), [x / 300], target="tensorrt-fp16", progress=False)
    assert healthy.nonfinite == 0
    assert "NaN or Inf in" not in str(healthy)
