"""The command line as a whole: help, exit codes, errors of one line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from command import fine, refused, run

import qsim
from qsim.clinic import TARGETS
from qsim.files import FORMATS
from qsim.trace.runtimes import ONNX_RUNTIMES

PYTHON = Path(qsim.__path__[0]).parent


@pytest.mark.parametrize("command", ["inspect", "convert", "verify", "doctor"])
def test_help(command, capsys):
    assert f"usage: qsim {command}" in fine(capsys, command, "--help")


@pytest.mark.parametrize("command", [[], ["inspect"], ["convert"], ["verify"], ["doctor"]])
def test_help_takes_no_torch(command):
    code = "import sys; sys.argv[0] = '/bin/qsim'; from qsim.cli import main; " + (
        f"main([*{command}, '--help']); assert not {{'torch', 'numpy'}} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(PYTHON)}, check=True, capture_output=True)


def test_help_has_the_names_that_options_take(capsys):
    assert all(name in fine(capsys, "doctor", "--help") for name in {target.removesuffix("-int8") for target in TARGETS})
    assert all(name in fine(capsys, "convert", "--help") for name in FORMATS)
    assert all(name in fine(capsys, "inspect", "--help") for name in ONNX_RUNTIMES)


def test_doctor_says_that_it_runs_code(capsys):
    assert "THIS RUNS CODE" in fine(capsys, "doctor", "--help")


def test_version(capsys):
    assert fine(capsys, "--version") == f"qsim {qsim.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["inspect"], ["inspect", "a", "--nothing"], ["convert", "a"], ["verify", "a"]])
def test_bad_usage(arguments, capsys):
    assert "--help" in refused(capsys, *arguments)


def test_files_that_are_not_there(capsys, tmp_path):
    assert "No such file" in refused(capsys, "inspect", tmp_path / "nothing")
    assert "directory" in refused(capsys, "inspect", tmp_path)


def test_packages_that_are_not_installed(capsys, tmp_path, monkeypatch):
    (tmp_path / "m.onnx").write_bytes(b"")
    (tmp_path / "old.cache").write_text("TRT-8501-EntropyCalibration2\ninput: 3c010204\n")
    for name in [name for name in sys.modules if name.startswith(("qsim.onnx", "onnx"))]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "onnx", None)
    assert "pip install qsim[onnx]" in refused(capsys, "inspect", tmp_path / "m.onnx")
    assert "input" in fine(capsys, "inspect", tmp_path / "old.cache")  # needs none of them


def test_a_traceback_on_request(capsys, tmp_path):
    with pytest.raises(FileNotFoundError):
        run(capsys, "--traceback", "inspect", tmp_path / "nothing")


def test_as_a_module(tmp_path):
    path = tmp_path / "old.cache"
    path.write_text("TRT-8501-EntropyCalibration2\ninput: 3c010204\nrelu: 7fc00000\n")
    environment = {**os.environ, "PYTHONPATH": str(PYTHON)}
    done = subprocess.run([sys.executable, "-m", "qsim", "inspect", path], env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, "")
    expected = "the value holds nan; expected a number that is positive and finite in float32"
    assert done.stderr == f"qsim: error: '{path}': entry 'relu': {expected}\n"


def test_a_reader_that_goes_away(tmp_path):
    path = tmp_path / "old.cache"
    path.write_text("TRT-8501-EntropyCalibration2\n" + "".join(f"tensor{i}: 3c010204\n" for i in range(20000)))
    environment = {**os.environ, "PYTHONPATH": str(PYTHON)}
    command = [sys.executable, "-m", "qsim", "inspect", "--json", str(path)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        process.stdout.readline()
        process.stdout.close()
        assert process.stderr.read() == b""
