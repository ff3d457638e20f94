"""Where integers and the simulation part: ties, biases in float, and a runtime without optimisations."""

import pytest
from integer_networks import BARS, by_runtime, check_integers, differing, simulated, with_ties

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


@pytest.mark.parametrize("system", ["int8", "uint8", "weights of 4 bits"])
@pytest.mark.parametrize("network", ["attention", "rare"])
def test_no_integer_differs_where_sums_are_ties(network, system, tmp_path):
    sim, x = simulated(network, system)
    with_ties(sim)
    apart = check_integers(sim, x, tmp_path)
    assert apart > 100  # the plain simulation does differ there


@pytest.mark.parametrize("network", [*BARS, "rare"])
def test_bias_in_float_becomes_integers_in_the_runtime(network, tmp_path):
    check_integers(*simulated(network, "bias in float"), tmp_path)


@pytest.mark.parametrize("network", BARS)
@pytest.mark.parametrize("exact", [True, False], ids=["sums that float32 holds", "any scales"])
def test_without_optimisations_the_runtime_computes_the_plain_simulation(network, exact, tmp_path):
    sim, x = simulated(network, "bias in float")
    if exact:
        with_ties(sim)
        for name, bias in sim.model.named_parameters():
            if name.endswith("bias"):
                bias.data = (bias * 64).round() / 64
        sim.eval()  # writes through .data are not noticed
    expected, _ = by_runtime(sim, x, tmp_path, optimize=False)
    wrong, compared = differing(sim.evaluate(x), expected)
    assert compared >= 10_000
    assert wrong <= (0 if exact else compared // 2000)  # sums in float32 are rounded in an order that differs from CPU to CPU
