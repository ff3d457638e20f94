"""Where libqsim_ops_cuda.so was built it loads without a GPU, and has a kernel of every operator that is not made of others."""

from pathlib import Path

import pytest
import torch
from operator_fuzz.scene import operators

from qsim import _build_info

LIBRARY = Path(_build_info.__file__).parent / "libqsim_ops_cuda.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason="qsim was built without CUDA kernels")
@pytest.mark.parametrize("operator", [*operators(), *operators("qsim_restoration")], ids=str)
def test_every_operator_has_its_cuda_kernel(operator):
    name = operator.name()
    kernels = {key: torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in ("CPU", "CUDA", "CompositeExplicitAutograd")}
    assert kernels["CUDA"] or (kernels["CompositeExplicitAutograd"] and not kernels["CPU"])
