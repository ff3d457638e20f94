"""Quantizers that take their scale from each tensor, and those whose scales are stored in few bits."""

import copy
import dataclasses

import pytest
import torch

from qsim import Encoding, Quantizer, TensorSpec, reference
from qsim.errors import NoEncodingError
from qsim.numbers.block_formats import BLOCK_FORMATS

X = torch.randn(3, 5, 48)


def test_it_needs_no_calibration_and_holds_nothing():
    quantizer = Quantizer(TensorSpec(method="dynamic", axis=-1, symmetric=True))
    assert torch.equal(quantizer(X), reference.fake_quantize_dynamic(X, -128, 127, axis=-1, symmetric=True))
    assert torch.equal(quantizer(X[0, :2] * 7), reference.fake_quantize_dynamic(X[0, :2] * 7, -128, 127, axis=-1, symmetric=True))
    assert quantizer.encoding is None
    assert not quantizer.lacks_encoding
    for choose in (
        quantizer.compute_encoding,
        lambda: quantizer.set_encoding(Encoding(torch.ones(()), torch.zeros((), dtype=torch.int32), -8, 7)),
    ):
        with pytest.raises(ValueError, match="method='dynamic'"):
            choose()


def test_switches():
    quantizer = Quantizer(TensorSpec(method="dynamic"))
    quantizer.enabled = False
    assert quantizer(X) is X
    quantizer.observing = True
    quantizer(X)
    assert quantizer.counts.elements == X.numel()
    quantizer.enabled = True
    assert quantizer(X, fallback="float32") is X


def test_state_dicts_and_copies():
    dynamic, static = (Quantizer(TensorSpec(method=method, dtype="float8_e4m3fn")) for method in ("dynamic", "minmax"))
    static.observing, static.enabled = True, False
    static(X)
    static.compute_encoding()
    other = Quantizer(dynamic.spec)
    other.load_state_dict(dynamic.state_dict())
    assert torch.equal(other(X), dynamic(X))
    assert torch.equal(copy.deepcopy(dynamic)(X), dynamic(X))
    other.load_state_dict(static.state_dict())  # whose scale has no say
    assert other.encoding is None
    assert torch.equal(other(X * 9), dynamic(X * 9))
    static.load_state_dict(dynamic.state_dict())
    static.enabled = True
    with pytest.raises(NoEncodingError):
        static(X)


@pytest.mark.parametrize("name", [name for name, fields in BLOCK_FORMATS.items() if fields["scale_format"] != "int"])
def test_weights_get_the_scales_that_each_tensor_would_give(name):
    weight = X.reshape(15, 48)
    static, dynamic = (Quantizer(TensorSpec(dtype=name, method=method), weight.shape) for method in ("minmax", "dynamic"))
    encoding = static.compute_encoding_from(weight)
    assert torch.equal(static(weight), dynamic(weight))
    assert encoding.scale.shape == (15, 3 if name == "nvfp4" else 2)
    if name != "nvfp4":
        assert torch.equal(encoding.scale.log2(), encoding.scale.log2().round())
        with pytest.raises(ValueError, match="powers of two"):
            static.set_encoding(dataclasses.replace(encoding, scale=encoding.scale * 1.5))
    again = Encoding.from_dict(encoding.to_dict())
    assert again == encoding
    if name == "mxfp6_e2m3":
        assert torch.equal(encoding.max, 7.5 * encoding.scale)


def test_a_rounding_of_scales_is_the_specs():
    x = torch.full((32,), 7.0)
    floor, even = (Quantizer(TensorSpec(dtype="mxfp4", method="dynamic", scale_rounding=how)) for how in ("floor", "even"))
    assert floor(x).unique().tolist() == [6]
    assert even(x).unique().tolist() == [8]


def test_compiled():
    quantizer = Quantizer(TensorSpec(method="dynamic", axis=-1))
    assert torch.equal(torch.compile(quantizer, fullgraph=True)(X), quantizer(X))
