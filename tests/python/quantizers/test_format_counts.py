"""Quantizers of a float format count what rounding does to what they observe; reports name those that overflow."""

import pytest
import torch
from models import Perceptron, seeded

import qsim
from qsim import Quantizer, TensorSpec
from qsim.quantizers.format_counts import FormatCounts

X = torch.tensor([1.0, 70000.0, -65520.0, 65519.0, 1e-8, 6e-5, 0.0, torch.inf, torch.nan])
EXPECTED = FormatCounts(elements=9, nans=1, infs=1, overflows=2, underflows=1, subnormals=1)


def observing(dtype="float16"):
    quantizer = Quantizer(TensorSpec(dtype=dtype), name="fc.output")
    quantizer.observing, quantizer.enabled = True, False
    return quantizer


def test_counts_while_observing_only():
    quantizer = observing()
    quantizer(X)
    quantizer.observing, quantizer.enabled = False, True
    quantizer(X)
    assert quantizer.format_counts == EXPECTED
    assert str(EXPECTED) == "9 values, of which 2 overflow, 1 underflow to zero, 1 become subnormal"
    assert Quantizer(TensorSpec()).format_counts is Quantizer(TensorSpec(dtype="float8_e5m2")).format_counts is None


def test_merge_reset_state_dict_and_weights():
    quantizer, other = observing(), observing()
    quantizer(X[:4])
    other(X[4:])
    quantizer.merge(other)
    assert quantizer.format_counts == EXPECTED
    loaded = observing()
    loaded.load_state_dict(quantizer.half().state_dict())
    assert loaded.format_counts == EXPECTED
    loaded.compute_encoding_from(X[:2])  # forgets what was there
    assert loaded.format_counts == FormatCounts(elements=2, overflows=1)
    loaded.reset()
    assert loaded.format_counts == FormatCounts()
    with pytest.raises(ValueError, match="bfloat16 into counts of float16"):
        quantizer.merge(observing("bfloat16"))


def test_calibration_and_summary_name_what_overflows():
    x = torch.linspace(-1, 1, 60).reshape(10, 6)
    sim = qsim.QuantSim(seeded(Perceptron), x, qsim.fp16())
    assert sim.calibrate([x], progress=False).problems == []
    x[3, 2] = -70112
    report = sim.calibrate([x], progress=False)
    assert "'input': 1 of 120 values overflow float16 (largest magnitude 70112)" in report.problems
    assert {row.key: row.range for row in sim.summary().rows}["input"].startswith("1 overflow")
