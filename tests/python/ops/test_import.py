"""`import qsim` where it was not compiled, or for something else: the message has the command that repairs it."""

import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

import qsim

PACKAGE = Path(qsim.__file__).parent
BUILD = {"TORCH_VERSION": torch.__version__, "PYTHON_VERSION": "3.99.0"}


@pytest.fixture
def sources(tmp_path):
    """What an import reads, without what a build makes."""
    (tmp_path / "qsim").mkdir()
    for name in ("__init__.py", "__init__.pyi", "_library.py", "version.py"):
        shutil.copy(PACKAGE / name, tmp_path / "qsim")
    return tmp_path / "qsim"


def said_by_import(sources):
    done = subprocess.run([sys.executable, "-c", "import qsim"], capture_output=True, text=True, env={"PYTHONPATH": str(sources.parent)})
    assert done.returncode == 1
    return done.stderr.strip().splitlines()[-1]


def build_info(sources, **changed):
    (sources / "_build_info.py").write_text("".join(f"{name} = {value!r}\n" for name, value in {**BUILD, **changed}.items()))


def test_sources_that_were_not_compiled(sources):
    said = said_by_import(sources)
    assert said.startswith(f"ImportError: qsim is not compiled in {sources}: ")
    assert "`pip install .`" in said


def test_another_torch(sources):
    build_info(sources, TORCH_VERSION="1.13.1+cu117")
    said = said_by_import(sources)
    assert f"qsim was compiled for torch 1.13.1+cu117 but torch {torch.__version__} is installed: reinstall" in said
    assert "pip install --force-reinstall --no-deps ." in said


def test_a_library_that_does_not_load(sources):
    build_info(sources)
    (sources / "libqsim_ops.so").write_bytes(b"cut off")
    said = said_by_import(sources)
    assert said.startswith("ImportError: qsim was compiled for torch")
    assert "its libqsim_ops.so does not load beside torch" in said
    assert "Reinstall qsim beside this torch (pip install --force-reinstall --no-deps .)" in said


def test_another_python(sources):
    build_info(sources)
    library = next(PACKAGE.glob("libqsim_ops.so"), None) or Path(next(iter(torch.ops.loaded_libraries)))
    shutil.copy(library, sources / "libqsim_ops.so")
    said = said_by_import(sources)
    assert f"qsim was compiled for Python 3.99.0 but this is Python {sys.version.split()[0]}" in said


def test_what_torch_compiled_with_another_build_is_not_taken_from_its_caches():
    """Beside what the user has put into the key."""
    code = "import torch.compiler.config, qsim; print(torch.compiler.config.cache_key_tag)"
    environment = {"PYTHONPATH": str(PACKAGE.parent), "TORCH_COMPILE_CACHE_KEY_TAG": "mine"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=True)
    build = zlib.crc32((PACKAGE / "libqsim_ops.so").read_bytes())
    for library in PACKAGE.glob("libqsim_ops_cuda.so"):
        build = zlib.crc32(library.read_bytes(), build)
    assert done.stdout.strip() == f"mine qsim-{build:08x}"
