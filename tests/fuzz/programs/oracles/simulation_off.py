"""With simulation off the model computes as it does in float, to the bit: results and gradients, in evaluation and in training. With all
quantizers off it does so too, in every format: figures in float are made that way."""

from __future__ import annotations

import qsim

from ..case import Case, Failure, Undecided, in_float, kept_batch_norms
from ..ir import Apply, all_statements
from ..operations import TABLE
from ..results import by_name, same_bits, sqnr
from ..running import Outcome

_LAST_BITS = 90.0  # dB: an activation is written out with its gate


def off_is_float(case: Case) -> Failure | None:
    sim = case.simulation(kept_batch_norms(qsim.int8()))
    for call in case.calls:
        for mode in case.modes(call):
            expected = case.float_outcome(call, mode)
            assert isinstance(expected, Outcome)
            with in_float(sim):
                found = case.run(sim, call, mode)
            if problem := same_bits(found.results, expected.results):
                return Failure("off", f"{mode}", f"{call.name}: {problem}")
            if problem := same_bits(*by_name(found.gradients, expected.gradients)):
                return Failure("off", f"gradients, {mode}", f"{call.name}: {problem}, of {list(expected.gradients)}")
    return None


def without_quantizers_is_float(case: Case) -> Failure | None:
    if any(isinstance(s, Apply) and TABLE[s.operation].rough for s in all_statements(case.program)):
        raise Undecided("a program that jumps")
    for config in (qsim.int8(), qsim.fp16()):
        sim = case.simulation(config if case.program.seed % 2 else kept_batch_norms(config))
        for quantizer in sim.quantizers().values():
            quantizer.enabled = False
        for call in case.calls:
            if "no_grad" in case.modes(call):
                expected = case.float_outcome(call, "no_grad")
                assert isinstance(expected, Outcome)
                found = case.run(sim, call, "no_grad")
                if any("' is folded into '" in text for text in case.warned):
                    continue  # a layer runs without the BatchNorm that is folded into it, as the simulation says
                for i, (a, b) in enumerate(zip(expected.results, found.results, strict=True)):
                    if a.shape != b.shape or sqnr(b, a) < _LAST_BITS:
                        return Failure("quantizers off", "another number", f"{call.name}: result {i} has {sqnr(b, a):.1f} dB")
    return None
