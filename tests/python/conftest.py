import functools
import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from ranks import Ranks

# Time is never asserted (first calls load kernels); CI draws the same examples on every run.
settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


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
def _translations_are_read_once() -> None:
    """torch's exporter has onnxscript parse its 500 translations anew in every export, and infers the signature of each, which takes longer
    than all else in most tests."""
    for name, module in [*sys.modules.items()]:
        if name.startswith("onnxscript._framework_apis.torch_"):
            _cached(module, "get_torchlib_ops")
        elif name == "torch.onnx._internal.exporter._schemas":
            _cached(module, "op_signature_from_function")


def _cached(module: ModuleType, name: str) -> None:
    function = getattr(module, name, None)  # another torch may call it otherwise
    if function is not None and not hasattr(function, "cache_info"):
        setattr(module, name, functools.cache(function))


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
