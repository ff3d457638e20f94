import functools
import gc
import os
import sys
from collections.abc import Callable, Hashable, Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from ranks import Ranks

# Time is never asserted (first calls load kernels); CI draws the same examples on every run.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")
# That the compiler has the processor's instructions need not be found out by compiling a program for each: it compiled ours.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")


def torchvision_without_kernels() -> torch.library.Library | None:
    """timm and torchmetrics import torchvision, whose wheels on PyPI are built for a CUDA torch. Beside one without, its library does not
    load, and importing it stops at two operators that it names: here they get names. No test calls one."""
    if (found := find_spec("torchvision")) is None or found.origin is None:
        return None
    try:
        torch.ops.load_library(Path(found.origin).with_name("_C.so"))
    except OSError:
        named = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            named.define(f"{name}(Tensor boxes, Tensor scores, float threshold) -> Tensor")
        return named
    return None


TORCHVISION = torchvision_without_kernels()


# What takes longest begins first, so that no worker is left alone with it.
FIRST = ("program_fuzz", "torch_functions", "life_fuzz")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.parent.name not in FIRST)


def pytest_collection_finish() -> None:
    """What torch and the tests' modules hold stays: that the collector walks it again and again takes a sixth of a compilation's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True)
def _same_random_numbers_whatever_ran_before() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _as_many_threads_whatever_ran_before() -> Iterator[None]:
    """Threads that wait for each other on busy cores take ten times as long as one: none is left to the tests that follow."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _what_exporters_read_is_read_once() -> None:
    """torch's exporter has onnxscript parse its 500 translations anew in every export, and infers the signature of each, which takes longer
    than all else in most tests. Each of the four tables of decompositions in an export is made from a walk over all operators there are."""
    if len(sys.modules) == _modules[0]:
        return
    _modules[0] = len(sys.modules)
    for name, module in [*sys.modules.items()]:
        if name.startswith("onnxscript._framework_apis.torch_"):
            _cached(module, "get_torchlib_ops")
        elif name == "torch.onnx._internal.exporter._schemas":
            _cached(module, "op_signature_from_function")
        elif name in ("torch._export.utils", "torch.export.decomp_utils", "torch.export.exported_program"):
            _cached(module, "_collect_all_valid_cia_ops", _composite_operators)


_modules = [0]  # how many there were


def _composite_operators() -> tuple[str, ...]:
    """Those that tables of decompositions are made of; tests register others."""
    return tuple(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


def _cached(module: ModuleType, name: str, state: Callable[[], Hashable] = lambda: None) -> None:
    """Have a function of a module answer from memory, for as long as `state` is the same."""
    function = getattr(module, name, None)  # another torch may call it otherwise
    if function is None or hasattr(function, "__wrapped__"):
        return

    @functools.cache
    def found(state: Hashable, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    @functools.wraps(function)
    def from_memory(*args: Any, **kwargs: Any) -> Any:
        return found(state(), *args, **kwargs)

    setattr(module, name, from_memory)


@pytest.fixture(scope="module")
def _nothing_compiled_is_left():
    yield
    torch._dynamo.reset()


@pytest.fixture
def fresh_dynamo(_nothing_compiled_is_left) -> None:
    """Nothing compiled before the test, and nothing left behind its module."""
    torch._dynamo.reset()


@pytest.fixture(scope="session")
def ranks():
    """Two processes of torch.distributed with the gloo backend."""
    if not (dist.is_available() and dist.is_gloo_available()):
        pytest.skip("torch was built without gloo")
    started = Ranks()
    yield started
    started.close()
