"""Encodings of what was observed, chosen together: those that each quantizer chooses alone."""

import pytest
import torch

from qsim import CalibrationError, Encoding, Quantizer, TensorSpec, ops
from qsim.quantizers.observed import encode_observed
from qsim.quantizers.sketch import search_sketches

SPECS = [
    TensorSpec(method="mse"),
    TensorSpec(method="percentile"),
    TensorSpec(method="mse"),
    TensorSpec(method="minmax"),
    TensorSpec(bits=4, method="mse"),
    TensorSpec(method="entropy"),
    TensorSpec(dtype="float16"),
    TensorSpec(method="mse", nonfinite="saturate"),
    TensorSpec(method="percentile", percentile=99.0),
]


def observed() -> list[Quantizer]:
    quantizers = [Quantizer(spec, name=f"q{i}") for i, spec in enumerate(SPECS)]
    for i, quantizer in enumerate(quantizers):
        quantizer.observe(torch.randn(1000, generator=torch.Generator().manual_seed(i)) * (i + 1))
    return quantizers


def test_as_each_alone() -> None:
    together, alone = observed(), observed()
    found = encode_observed(together, SPECS)
    for quantizer, encoding, other in zip(together, found, alone, strict=True):
        assert encoding == other.compute_encoding()
        assert encoding == quantizer.encoding
        if quantizer.spec.has_scale:
            assert encoding == other.observer.encoding(other.spec)


def test_one_search_for_those_that_search_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    searched = []
    search = ops.search_range

    def counting(lowest: torch.Tensor, *args: object, **options: object) -> object:
        searched.append(lowest.numel())
        return search(lowest, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(ops, "search_range", counting)
    encode_observed(observed(), SPECS)
    assert sorted(searched) == [1, 1, 1, 1, 3]


def test_who_saw_nothing_keeps_the_encoding() -> None:
    quantizers = observed()[:3]
    kept = quantizers[1].compute_encoding()
    quantizers[1].reset()
    found = encode_observed(quantizers, SPECS[:3])
    assert isinstance(found[1], CalibrationError)
    assert "q1" in str(found[1])
    assert quantizers[1].encoding == kept
    assert isinstance(found[0], Encoding)
    assert isinstance(found[2], Encoding)


def test_a_search_of_many_is_that_of_each() -> None:
    seen = [quantizer.observer.seen(SPECS[0]) for quantizer in observed()[:3]]
    for one, (low, high) in zip(seen, search_sketches(seen, SPECS[0]), strict=True):
        assert (low, high) == search_sketches([one], SPECS[0])[0]
