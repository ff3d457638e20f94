"""torch.set_flush_denormal(True) changes nothing (docs/numerics.md): operators give the same bits, at every level and in every thread."""

import pytest
from levels import LEVELS, output_at

# Prints a digest of what every operator makes of subnormal arguments. A thread keeps the mode of the one that started it.
SCRIPT = """
import hashlib, random, torch
from operator_fuzz.outcome import call, tensors, written
from operator_fuzz.scene import Scene, operators
from operator_fuzz.spoil import permuted, with_gaps

TINY = {{torch.float32: 1e-41, torch.bfloat16: 1e-40, torch.float16: 1e-6, torch.float64: 1e-311}}
rng = random.Random(0)

def mode(flush, threads):
    torch.set_flush_denormal(flush)
    torch.set_num_threads(threads)

def subnormal(value):
    if isinstance(value, list):
        return [subnormal(item) for item in value]
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or rng.random() < 0.3:
        return value
    return (value.double() * TINY[value.dtype]).to(value.dtype)

mode({flush}, 2)
assert torch.ones(2**20).sum() == 2**20  # the second thread has started
assert (torch.tensor(1e-41) + 0 == 0) == {flush}
for operator in operators():
    digest = hashlib.sha256()
    for repetition in range(15):
        mode(False, 1)
        torch.manual_seed(repetition)
        scene = Scene(rng, operator)
        if repetition == 0:
            scene.sizes, scene.axis, scene.block_size = [200000, 2], None, None
        arguments = {{name: subnormal(value) for name, value in scene.arguments(operator).items()}}
        if "x" in arguments and rng.random() < 0.3:
            arguments["x"] = rng.choice([permuted, with_gaps])(rng, arguments["x"])
        mode({flush}, 2)
        found = tensors(call(operator, arguments)) + written(operator, arguments)
        mode(False, 1)
        for tensor in found:
            tensor = torch.where(tensor.isnan(), torch.nan, tensor) if tensor.is_floating_point() else tensor
            digest.update(tensor.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8).numpy())
    print(operator, digest.hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS)
def test_flushing_changes_no_bit_of_any_operator(level):
    kept, flushed = (output_at(level, SCRIPT.format(flush=flush)).splitlines() for flush in (False, True))
    assert len(kept) > 25
    assert flushed == kept
