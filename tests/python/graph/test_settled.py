"""`_C.Settled`: quantizes as the quantizer would, or says nothing where that may do anything else."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from qsim import Quantizer, TensorSpec
from qsim.graph.execute.shortcuts import DirectOperand, InPlace, Kept, _settled, _settled_operand

X = torch.linspace(-3, 3, 24).reshape(4, 6)


def calibrated(spec: TensorSpec) -> Quantizer:
    quantizer = Quantizer(spec, name="q")
    quantizer.compute_encoding_from(X)
    return quantizer


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(method="minmax"),
        TensorSpec(bits=4, symmetric=True, axis=1),
        TensorSpec(bits=4, axis=0, block_size=2),
        TensorSpec(rounding="reciprocal"),
    ],
    ids=["tensor", "channel", "block", "reciprocal"],
)
def test_quantizes_as_the_quantizer_does(spec: TensorSpec, dtype: torch.dtype) -> None:
    quantizer, x = calibrated(spec), X.to(dtype)
    settled = _settled(quantizer)
    assert settled is not None
    expected = quantizer(x)
    assert torch.equal(settled.quantize(x, False), expected)
    assert torch.equal(settled(x), expected)
    assert torch.equal(_settled(quantizer, x.numel() + 1)(x), expected)
    assert _settled(quantizer, x.numel())(x) is None
    mine = x.clone()
    assert settled.quantize(mine, True) is mine
    assert torch.equal(mine, expected)


def test_follows_the_encoding() -> None:
    quantizer = calibrated(TensorSpec(method="minmax"))
    settled = _settled(quantizer)
    quantizer.compute_encoding_from(X * 5)
    assert torch.equal(settled.quantize(X, False), quantizer(X))
    quantizer.scale = torch.tensor(0.25)
    assert torch.equal(settled.quantize(X, False), quantizer(X))


def test_another_spec_is_pythons_until_it_is_known() -> None:
    """As `search_bits` puts the state of another quantizer in the place of a quantizer's own."""
    quantizer, other = calibrated(TensorSpec()), calibrated(TensorSpec(bits=3))
    settled, in_place, kept = _settled(quantizer), InPlace(quantizer), Kept(quantizer)
    assert settled.quantize(X, False) is not None
    in_place(X.clone()), kept(X)
    vars(quantizer).clear()
    vars(quantizer).update(vars(other))
    assert settled.quantize(X, False) is None
    assert not settled.is_fixed()
    for _ in range(2):
        assert torch.equal(in_place(X.clone()), other(X))
        assert torch.equal(kept(X), other(X))
    assert in_place.direct.quantize(X, False) is not None


def test_gradients_are_those_of_the_quantizer() -> None:
    quantizer = calibrated(TensorSpec(bits=4))
    gradients = []
    for quantize in (quantizer, lambda x: _settled(quantizer).quantize(x, False)):
        x = (2 * X).requires_grad_()
        quantize(x).square().sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


def observing(quantizer: Quantizer) -> None:
    quantizer.observing = True


def disabled(quantizer: Quantizer) -> None:
    quantizer.enabled = False


def hooked(quantizer: Quantizer) -> None:
    quantizer.register_forward_hook(lambda module, args, y: y + 1)


def backward_hooked(quantizer: Quantizer) -> None:
    quantizer.register_full_backward_hook(lambda module, inputs, outputs: None)


def without_scale(quantizer: Quantizer) -> None:
    del quantizer._buffers["scale"]


@pytest.mark.parametrize("change", [observing, disabled, hooked, backward_hooked, without_scale])
def test_leaves_the_rest_to_python(change: Callable[[Quantizer], None]) -> None:
    quantizer = calibrated(TensorSpec(method="minmax"))
    settled = _settled(quantizer)
    assert settled.is_fixed()
    change(quantizer)
    assert settled.quantize(X, False) is None
    assert not settled.is_fixed()


@pytest.mark.parametrize("x", [X.double(), X.to(torch.int32), X.to_sparse(), X.as_subclass(type("Mine", (Tensor,), {})), 3, None])
def test_leaves_other_tensors_to_python(x: object) -> None:
    assert _settled(calibrated(TensorSpec(method="minmax"))).quantize(x, False) is None


def test_leaves_modes_to_python() -> None:
    settled = _settled(calibrated(TensorSpec(method="minmax")))
    with TorchFunctionMode():
        assert settled.quantize(X, False) is None


def test_not_before_there_is_an_encoding() -> None:
    quantizer = Quantizer(TensorSpec(), shape=())
    assert _settled(quantizer).quantize(X, False) is None


@pytest.mark.parametrize(
    "spec",
    [
        TensorSpec(learnable=True),
        TensorSpec(dtype="float16"),
        TensorSpec(method="ema"),
        TensorSpec(method="dynamic"),
        TensorSpec(axis=(0, 1), block_size=(2, 2), symmetric=True),
    ],
)
def test_not_what_does_more(spec: TensorSpec) -> None:
    assert _settled(Quantizer(spec)) is None


def test_not_a_subclass() -> None:
    class Noisy(Quantizer):
        def forward(self, x: Tensor, **options: object) -> Tensor:
            return x + 1

    assert _settled(Noisy(TensorSpec())) is None


DYNAMIC = {
    "token": TensorSpec(method="dynamic", axis=-1, symmetric=True),
    "tensor": TensorSpec(method="dynamic"),
    "4 bits in blocks": TensorSpec(bits=4, method="dynamic", axis=-1, block_size=3, rounding="reciprocal", min_scale=0.5),
    "fp8": TensorSpec(dtype="float8_e4m3fn", method="dynamic", axis=-1, saturate=False),
    "mxfp4": TensorSpec(
        dtype="float4_e2m1fn", method="dynamic", axis=-1, block_size=3, scale_format="float8_e8m0fnu", scale_rounding="even"
    ),
}


@pytest.mark.parametrize(
    "x", [X, X.half(), X.bfloat16(), X.double(), X.mT, X[:0], torch.full((2, 2), torch.nan)], ids=lambda x: str(x.dtype)[6:]
)
@pytest.mark.parametrize("spec", DYNAMIC.values(), ids=DYNAMIC)
def test_what_takes_its_scale_from_each_tensor(spec: TensorSpec, x: Tensor) -> None:
    quantizer = Quantizer(spec)
    settled = _settled_operand(quantizer)
    torch.testing.assert_close(settled(x), quantizer(x), rtol=0, atol=0, equal_nan=True)
    gradients = []
    for quantize in (quantizer, settled):
        leaf = (2 * x).requires_grad_()
        quantize(leaf).square().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("change", [observing, disabled, hooked, backward_hooked])
@pytest.mark.parametrize("spec", DYNAMIC.values(), ids=DYNAMIC)
def test_what_takes_its_scale_from_each_tensor_leaves_the_rest_to_python(spec: TensorSpec, change: Callable[[Quantizer], None]) -> None:
    quantizer = Quantizer(spec)
    settled, operand = _settled_operand(quantizer), DirectOperand(quantizer, True)
    plain = quantizer(X)
    assert torch.equal(operand(X), plain)
    change(quantizer)
    assert settled(X) is None
    assert torch.equal(operand(X), quantizer(X))
    for other in (X.to(torch.int32), X.to_sparse(), X[0, 0], X.as_subclass(type("Mine", (Tensor,), {})), None):
        assert settled(other) is None
    with TorchFunctionMode():
        assert settled(X) is None


@pytest.mark.parametrize("spec", [TensorSpec(method="minmax"), *DYNAMIC.values()], ids=["minmax", *DYNAMIC])
@pytest.mark.parametrize("observes", [True, False])
def test_an_operand_is_quantized_and_observed_as_its_quantizer_does(spec: TensorSpec, observes: bool) -> None:
    quantizer = Quantizer(spec)
    if not spec.is_dynamic:
        quantizer.compute_encoding_from(X)
    quantizer.reset()
    operand = DirectOperand(quantizer, observes)
    for copied in (operand, pickle.loads(pickle.dumps(operand)), copy.deepcopy(operand)):
        assert torch.equal(copied(X), quantizer(X))
    quantizer.observing = True
    assert torch.equal(operand(X), quantizer.quantize(X))
    assert quantizer.counts.elements == (X.numel() if observes else 0)
    other = Quantizer(TensorSpec(bits=3, method="dynamic"))
    vars(quantizer).clear()
    vars(quantizer).update(vars(other))
    for _ in range(2):
        assert torch.equal(operand(X), other(X))


@pytest.mark.parametrize("make", [InPlace, Kept, lambda quantizer: DirectOperand(quantizer, True)])
def test_a_hook_that_leads_back_is_collected(make: Callable[[Quantizer], object]) -> None:
    quantizer = calibrated(TensorSpec(method="minmax"))
    site = make(quantizer)
    quantizer.register_forward_hook(lambda module, args, y, site=site: y)
    gone = weakref.ref(quantizer)
    site(nn.Parameter(X))
    del quantizer, site
    gc.collect()
    assert gone() is None
