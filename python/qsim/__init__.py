"""qsim: what int8, int4, fp16 and fp8 will do to a PyTorch model, seen before it is deployed.

``import qsim`` registers the operators, ``torch.ops.qsim``. Names are imported when they are first asked for, from where ``__init__.pyi``
says, so that it takes hardly longer than ``import torch``.
"""

import ast
import gc
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from warnings import warn

from qsim.version import VERSION

__version__ = VERSION

_MOVED = {
    "Counts": "qsim.quantizers.observer",
    "Event": "qsim.training.watch",
    "FormatCounter": "qsim.quantizers.format_counts",
    "FormatCounts": "qsim.quantizers.format_counts",
}


def _read_stub() -> tuple[dict[str, str], list[str]]:
    """The module of each name, and ``__all__``."""
    tree = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    homes = {alias.name: str(node.module) for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    listed = next(node.value for node in tree.body if isinstance(node, ast.Assign))
    return homes, list(ast.literal_eval(listed))


_HOMES, __all__ = _read_stub()


def __getattr__(name: str) -> Any:
    """A public name, from its module; what no user makes is found under its old name until the next release."""
    if name in _MOVED:
        warn(f"qsim.{name} is now {_MOVED[name]}.{name}", DeprecationWarning, stacklevel=2)
        return getattr(import_module(_MOVED[name]), name)
    if name not in _HOMES and (Path(__file__).parent / name).is_dir() and name.isidentifier():  # a package, as `qsim.equalization`
        return import_module(f"qsim.{name}")
    if name not in _HOMES:
        from difflib import get_close_matches

        close = get_close_matches(name, _HOMES, n=1)
        raise AttributeError(f"module 'qsim' has no attribute {name!r}" + (f"; did you mean {close[0]!r}?" if close else ""))
    try:
        home = _imported(_HOMES[name])
    except ModuleNotFoundError as error:
        if (error.name or "qsim").partition(".")[0] in ("qsim", "torch"):
            raise
        raise ImportError(f"qsim.{name} needs {error.name}, which is not installed: pip install qsim[onnx]", name=error.name) from error
    found = import_module(f"qsim.{name}") if home is import_module("qsim") else getattr(home, name)
    globals()[name] = found
    return found


def _imported(module: str) -> ModuleType:
    """A module. The garbage collector rests meanwhile: a pass over all that torch has made takes a third of the time, and finds nothing."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        return import_module(module)
    finally:
        if collecting:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})


def _is_command() -> bool:
    """Whether this is the command line, which answers ``--help`` without torch."""
    return [Path(started).stem for started in sys.argv[:1]] == ["qsim"] or sys.orig_argv[1:3] == ["-m", "qsim"]


if not _is_command():
    import_module("qsim._library")
