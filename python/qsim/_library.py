"""Loads the compiled operators into `torch.ops.qsim`, and `qsim._C`, after checking that they were compiled for this torch and Python."""

from __future__ import annotations

import sys
import sysconfig
from importlib import import_module
from pathlib import Path

import torch

from qsim import _build_info

_FOLDER = Path(_build_info.__file__).parent  # in an editable install the libraries lie apart from the sources


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def load() -> None:
    """Register the operators and import `qsim._C`; raises ImportError with the command that repairs the installation."""
    if _minor(torch.__version__) != _minor(_build_info.TORCH_VERSION):
        raise ImportError(
            f"qsim was compiled for torch {_build_info.TORCH_VERSION} but torch {torch.__version__} is installed: "
            f"reinstall qsim beside this torch (pip install --force-reinstall --no-deps .) or install torch {_build_info.TORCH_VERSION}"
        )
    libraries = [_FOLDER / "libqsim_ops.so", *_FOLDER.glob("libqsim_ops_cuda.so")]  # the second where qsim was built for CUDA
    for library in libraries:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]
    try:
        import_module("qsim._C")
    except ModuleNotFoundError:
        raise ImportError(
            f"qsim was compiled for Python {_build_info.PYTHON_VERSION} but this is Python {sys.version.split()[0]}: there is no "
            f"_C{sysconfig.get_config_var('EXT_SUFFIX')} in {_FOLDER}. Reinstall qsim with this Python "
            "(pip install --force-reinstall --no-deps .)"
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
KeptParameter = _C.KeptParameter
Settled = _C.Settled
Stamp = _C.Stamp
Unchanged = _C.Unchanged
