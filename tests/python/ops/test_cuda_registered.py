"""Where libqsim_ops_cuda.so was built it loads without a GPU, and every operator with a CPU kernel has a CUDA kernel in it."""

from pathlib import Path

import pytest
import torch
from operator_fuzz.scene import operators

from qsim import _build_info

LIBRARY = Path(_build_info.__file__).parent / "libqsim_ops_cuda.so"


@pytest.mark.skipif(not LIBRARY.exists(), reason="qsim was built without CUDA kernels")
@pytest.mark.parametrize("operator", operators(), ids=str)
def test_every_operator_has_its_cuda_kernel(operator):
    name = operator.name()
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CPU")
    assert torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
