"""What AIMET calls, by modules, the tensors that quantizers stand at: a tensor is the result of one module and the input of others."""

from __future__ import annotations

from collections import defaultdict

from qsim.operations.functions import WEIGHT
from qsim.simulation.simulation import Simulation


def module_names(sim: Simulation) -> dict[str, tuple[str, ...]]:
    """By quantizer, the names besides its own under which a file may have its encoding; what could mean two tensors is left out.

    The result of a chain (Conv, BatchNorm, ReLU) is that of its last module, not of its first, which names the quantizer. A tensor that
    is quantized where it is made is the input of a layer with a weight, which has one: so the model's input is that of its first layer.
    One that is quantized where it is read is the result of the module that makes it.
    """
    last = {operation.name: operation.members[-1] for operation in sim.decisions.operations.values()}
    posts = [post for post in sim.decisions.posts if post.key not in sim.weights()]
    layers = {name for name, operation in sim.decisions.operations.items() if operation.op.split(" + ")[0] in WEIGHT}
    found: defaultdict[str, dict[str, None]] = defaultdict(dict)
    for key, operation, _, neighbours in posts:
        others = [name for name in dict.fromkeys(neighbours) if name != operation]
        made = operation == "input" or key == f"{operation}.output"
        if key == f"{operation}.output":
            found[key][f"{last.get(operation, operation)}.output"] = None
        elif key.startswith(f"{operation}.input[") and len(others) == 1:
            found[key][f"{last.get(others[0], others[0])}.output"] = None
        readers = others if made else [operation] if key.partition("[")[0] == "input" else []
        found[key].update(dict.fromkeys(f"{name}.input[0]" for name in readers if name in layers))
    return {key: tuple(name for name in names if name != key) for key, names in found.items()}
