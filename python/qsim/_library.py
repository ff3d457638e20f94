"""Loads the compiled operators into `torch.ops.qsim`, and `qsim._C`, after checking that they were compiled for this torch and Python."""

from __future__ import annotations

import sys
import sysconfig
import zlib
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from types import ModuleType

import torch
import torch.compiler.config

_AGAIN = "pip install --force-reinstall --no-deps ."


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def _read_build_info() -> ModuleType:
    """What the build wrote: the versions of torch and Python that it was for."""
    try:
        return import_module("qsim._build_info")
    except ModuleNotFoundError:
        raise ImportError(
            f"qsim is not compiled in {Path(__file__).parent}: those are its sources alone, and its operators are C++. In the checkout run "
            "`pip install .` and start Python in another folder, or run `make build` and use PYTHONPATH=python (docs/install.md)"
        ) from None


def _break_caches(libraries: Iterable[Path]) -> None:
    """Have torch.compile not take from its caches on disk what it made with other operators: it knows them by name alone, and what they do
    to a graph (their gradients) is part of what it keeps."""
    build = 0
    for library in libraries:
        build = zlib.crc32(library.read_bytes(), build)
    torch.compiler.config.cache_key_tag += f" qsim-{build:08x}"


def load() -> None:
    """Register the operators and import `qsim._C`; raises ImportError with the command that repairs the installation."""
    build = _read_build_info()
    if _minor(torch.__version__) != _minor(build.TORCH_VERSION):
        raise ImportError(
            f"qsim was compiled for torch {build.TORCH_VERSION} but torch {torch.__version__} is installed: "
            f"reinstall qsim beside this torch ({_AGAIN}) or install torch {build.TORCH_VERSION}"
        )
    folder = Path(str(build.__file__)).parent  # in an editable install the libraries lie apart from the sources
    libraries = [folder / "libqsim_ops.so", *folder.glob("libqsim_ops_cuda.so")]  # the second where qsim was built for CUDA
    for library in libraries:
        try:
            torch.ops.load_library(library)  # type: ignore[no-untyped-call]
        except OSError as error:
            raise ImportError(
                f"qsim was compiled for torch {build.TORCH_VERSION}, and its {library.name} does not load beside torch "
                f"{torch.__version__}: {error}. Reinstall qsim beside this torch ({_AGAIN})"
            ) from error
    _break_caches(libraries)
    try:
        import_module("qsim._C")
    except ModuleNotFoundError:
        raise ImportError(
            f"qsim was compiled for Python {build.PYTHON_VERSION} but this is Python {sys.version.split()[0]}: there is no "
            f"_C{sysconfig.get_config_var('EXT_SUFFIX')} in {folder}. Reinstall qsim with this Python ({_AGAIN})"
        ) from None


def cpu_capability() -> str:
    """The instruction-set level of the CPU kernels in use: ``"default"``, ``"avx2"`` or ``"avx512"``.

    The environment variable ``QSIM_CPU_CAPABILITY`` forces one; a level this processor lacks is an error.

    Examples
    --------
    >>> cpu_capability() in ("default", "avx2", "avx512")
    True
    """
    return str(torch.ops.qsim.cpu_capability())


load()
cpu_capability()  # an impossible QSIM_CPU_CAPABILITY fails at import, not inside a training loop

from qsim import _C  # noqa: E402  # behind `load`, which says what is wrong where there is none

eager = _C  # operators for whom nobody traces: the functions of `torch.ops.qsim`, called directly
Direct = _C.Direct
KeptParameter = _C.KeptParameter
KnownCalls = _C.KnownCalls
LEFT_TO_PYTHON = _C.LEFT_TO_PYTHON
Settled = _C.Settled
SettledDynamic = _C.SettledDynamic
Stamp = _C.Stamp
Unchanged = _C.Unchanged
