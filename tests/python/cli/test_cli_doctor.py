"""qsim doctor."""

import json
import runpy
import sys

import numpy as np
import pytest
import torch
from command import refused, run

import qsim

SOURCE = """
import torch
from torch import nn


class Norm(nn.Module):
    def forward(self, x, factor=None):
        y = x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt()
        return y if factor is None else y * factor


def build():
    return Norm()


def with_example():
    return nn.Linear(4, 2), torch.randn(3, 4)


def number():
    return 3


def broken():
    return 1 / 0
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in the current folder, and data on which it fails in float16."""
    (tmp_path / "clinic_networks").mkdir()
    (tmp_path / "clinic_networks" / "__init__.py").touch()
    (tmp_path / "clinic_networks" / "norm.py").write_text(SOURCE)
    (tmp_path / "clinic_networks" / "stale.py").write_text("import nothing_of_this_name")
    np.savez(tmp_path / "large.npz", 400 * np.ones((4, 64), np.float32))
    np.savez(tmp_path / "named.npz", factor=np.ones((4, 1), np.float32), x=np.ones((4, 64), np.float32))
    monkeypatch.chdir(tmp_path)
    for name in [name for name in sys.modules if name.startswith("clinic_networks")]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
    return "clinic_networks.norm"


def test_findings_are_an_exit_code_and_files(package, capsys, tmp_path):
    arguments = [f"{package}:build", "--data", "large.npz", "--target", "tensorrt-fp16", "--quiet"]
    code, out, err = run(capsys, "doctor", *arguments, "--html", "page.html", "--json", "--plan", "plan")
    assert (code, err) == (1, "")
    found = json.loads(out)
    assert [(finding["code"], finding["op"]) for finding in found["findings"]] == [("QS010", "pow")]
    assert "QS010" in (tmp_path / "page.html").read_text()
    assert "pow" in qsim.Plan.from_json((tmp_path / "plan" / "plan.json").read_text()).keep
    code, out, _ = run(capsys, "doctor", *arguments)
    assert code == 1
    assert "norm.py:8: y = x / " in out  # the line of Python


@pytest.mark.filterwarnings("ignore")
def test_the_model_with_casts_is_run_on_the_data(package, capsys):
    torch.onnx.export(
        runpy.run_path("clinic_networks/norm.py")["build"](), (400 * torch.ones(4, 64),), "float.onnx", dynamo=True, verbose=False
    )
    arguments = [
        f"{package}:build",
        "--data",
        "large.npz",
        "--target",
        "tensorrt-fp16",
        "--quiet",
        "--plan",
        "plan",
        "--onnx",
        "float.onnx",
    ]
    code, out, _ = run(capsys, "doctor", *arguments)
    assert code == 1
    assert "float.fp16.onnx  ONNX Runtime" in out
    assert "CPU: right: all results are finite" in out
    assert json.loads(run(capsys, "doctor", *arguments, "--json")[1])["plan"]["keep"]


def test_in_float32_it_is_healthy(package, capsys):
    code, out, _ = run(capsys, "doctor", f"{package}:build", "--data", "large.npz", "--quiet")
    assert code == 0
    assert "nothing found" in out


def test_arrays_by_the_names_of_arguments_and_in_batches(package, capsys):
    code, out, _ = run(capsys, "doctor", f"{package}:build", "--data", "named.npz", "--batch-size", "2", "--quiet", "--json")
    assert code == 0
    assert json.loads(out)["batches"] == 2


def test_example_inputs_stand_for_data(package, capsys):
    code, out, _ = run(capsys, "doctor", f"{package}:with_example", "--quiet", "--json")
    assert code == 0
    assert json.loads(out)["batches"] == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("{}:build", "give --data"),
        ("{}:number", "returned int; expected a module"),
        ("{}:broken", "failed: ZeroDivisionError"),
        ("{}:nothing", "has no function 'nothing'"),
        ("{}", "expected package.module:function"),
        ("clinic_networks.stale:build", "importing 'clinic_networks.stale' failed: ModuleNotFoundError"),
    ],
)
def test_what_cannot_be_built(name, expected, package, capsys):
    assert expected in refused(capsys, "doctor", name.format(package))


def test_what_cannot_be_examined(package, capsys):
    assert "expected one of" in refused(capsys, "doctor", f"{package}:build", "--target", "abacus")
    assert "No such file" in refused(capsys, "doctor", f"{package}:build", "--data", "none.npz", "--quiet")
    assert "choose another --target" in refused(capsys, "doctor", f"{package}:build", "--data", "large.npz", "--plan", "plan", "--quiet")
    assert "expected --plan" in refused(capsys, "doctor", f"{package}:build", "--onnx", "m.onnx")
