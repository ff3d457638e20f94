"""Loads the compiled operators into `torch.ops.qsim`, after checking that this torch is the one they were compiled for."""

from __future__ import annotations

from pathlib import Path

import torch

from qsim import _build_info

_FOLDER = Path(_build_info.__file__).parent  # in an editable install the libraries lie apart from the sources


def _minor(version: str) -> tuple[str, ...]:
    return tuple(version.split("+")[0].split(".")[:2])


def load() -> None:
    """Register the operators; raises ImportError with the command that repairs the installation."""
    if _minor(torch.__version__) != _minor(_build_info.TORCH_VERSION):
        raise ImportError(
            f"qsim was compiled for torch {_build_info.TORCH_VERSION} but torch {torch.__version__} is installed: "
            f"reinstall qsim beside this torch (pip install --force-reinstall --no-deps .) or install torch {_build_info.TORCH_VERSION}"
        )
    libraries = [_FOLDER / "libqsim_ops.so", *_FOLDER.glob("libqsim_ops_cuda.so")]  # the second where qsim was built for CUDA
    for library in libraries:
        torch.ops.load_library(library)  # type: ignore[no-untyped-call]


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
