"""PEP 517 backend: scikit-build-core, plus "bring a torch when the target environment has none".

qsim must be compiled against the torch it will run with. pip's isolated build cannot import that torch, but `sysconfig` still
names the target's site-packages, so the files are looked up there.
"""

from __future__ import annotations

import importlib.util
import os
import re
import sysconfig
from pathlib import Path
from typing import Any

from scikit_build_core import build as _backend
from scikit_build_core.build import (  # noqa: F401  (the hooks that need no change)
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_sdist,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

PINNED_TORCH = os.environ.get("QSIM_TORCH", "torch==2.13.0")  # what a fresh environment gets: the version CI tests


def _torch_folder() -> Path | None:
    spec = importlib.util.find_spec("torch")
    folders = list(spec.submodule_search_locations or []) if spec else []
    folders += [os.path.join(sysconfig.get_path(key), "torch") for key in ("purelib", "platlib")]
    return next((Path(f) for f in folders if (Path(f) / "version.py").exists()), None)


def _torch_requirement() -> list[str]:
    return [] if _torch_folder() else [PINNED_TORCH]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_backend.get_requires_for_build_wheel(config_settings), *_torch_requirement()]


def get_requires_for_build_editable(config_settings: dict[str, Any] | None = None) -> list[str]:
    return [*_backend.get_requires_for_build_editable(config_settings), *_torch_requirement()]


def dynamic_metadata(field: str, settings: dict[str, Any] | None = None, project: dict[str, Any] | None = None) -> list[str]:
    """The runtime requirement: the minor version compiled against (LibTorch's C++ ABI is per minor)."""
    folder = _torch_folder()
    if folder is None:
        return ["torch>=2.11"]
    version = re.search(r"__version__ = '(\d+)\.(\d+)", (folder / "version.py").read_text())
    if version is None:
        raise RuntimeError(f"{folder / 'version.py'} names no version: reinstall torch in this environment")
    return [f"torch=={version[1]}.{version[2]}.*"]
