"""Groups of parameters for an optimizer: weights, biases with normalizations, learned scales."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from qsim.options import check_number
from qsim.quantizers.quantizer import Quantizer

_NORMALIZATIONS = (
    nn.modules.batchnorm._NormBase,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


def param_groups(
    sim: nn.Module,
    quantizers: Iterable[Quantizer],
    lr: float | None = None,
    scale_lr: float | None = None,
    weight_decay: float | None = None,
    bias_decay: float | None = None,
) -> list[dict[str, Any]]:
    """What `QuantSim.param_groups` returns: every parameter of `sim` in one group."""
    given = {"lr": lr, "scale_lr": scale_lr, "weight_decay": weight_decay, "bias_decay": bias_decay}
    for name, value in given.items():
        if value is not None and not isinstance(value, Tensor):  # optimizers take a rate in a tensor
            check_number("QuantSim.param_groups", name, value, least=0, otherwise="None to leave it to the optimizer")
    scales = {id(quantizer.scale) for quantizer in quantizers if quantizer.spec.learnable}
    norms = {id(p) for module in sim.modules() if isinstance(module, _NORMALIZATIONS) for p in module.parameters(recurse=False)}
    members: dict[str, list[nn.Parameter]] = {"weights": [], "biases": [], "scales": []}
    for parameter in sim.parameters():  # one that is tied comes once
        flat = parameter.dim() <= 1 or id(parameter) in norms
        members["scales" if id(parameter) in scales else "biases" if flat else "weights"].append(parameter)
    options: dict[str, dict[str, float | None]] = {
        "weights": {"lr": lr, "weight_decay": weight_decay},
        "biases": {"lr": lr, "weight_decay": weight_decay if bias_decay is None else bias_decay},
        "scales": {"lr": lr if scale_lr is None else scale_lr, "weight_decay": 0.0},
    }
    return [
        {"name": name, "params": params, **{key: value for key, value in options[name].items() if value is not None}}
        for name, params in members.items()
        if params
    ]
