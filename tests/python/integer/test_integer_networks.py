"""Whole networks: what `sim.integer()` computes is what ONNX Runtime computes with all optimisations."""

import pytest
from integer_networks import BARS, check_integers, simulated


@pytest.mark.parametrize("system", ["uint8", "int8", "int8 symmetric", "uint8, weights of 7 bits"])
@pytest.mark.parametrize("network", BARS)
def test_no_integer_differs(network, system, tmp_path):
    check_integers(*simulated(network, system), tmp_path)
