"""Traced simulations, run operation by operation."""

import torch
from torch import Tensor
from torch.fx import Interpreter

import qsim
from qsim.graph.execute.marks import BIAS, QUANTIZED
from qsim.quantizers.bias import BiasQuantizer
from qsim.trace.capture import Program


class Evaluator(Interpreter):
    """Runs a graph with fake-quantize in the places of marks: brute force, one operation after the other."""

    def __init__(self, sim: qsim.QuantSim, module: torch.nn.Module) -> None:
        super().__init__(module)
        self.quantizers = sim.quantizers()

    def call_function(self, target, args, kwargs):
        if target is QUANTIZED:
            x, key = args
            return self.quantizers[key].quantize(x)
        if target is BIAS:
            b, input, weight = args
            return BiasQuantizer(self.quantizers[input], self.quantizers[weight])(b)
        return super().call_function(target, args, kwargs)


def evaluated(sim: qsim.QuantSim, program: Program, *inputs: Tensor) -> Tensor:
    held = {**program.exported.state_dict, **program.exported.constants}
    specs = program.exported.graph_signature.input_specs
    given = iter(inputs)
    with torch.no_grad():
        found = Evaluator(sim, program.exported.graph_module).run(*(held[s.target] if s.target is not None else next(given) for s in specs))
    return found if isinstance(found, Tensor) else found[0]
