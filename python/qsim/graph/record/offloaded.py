"""Models whose parameters are elsewhere until a module runs: accelerate's hooks bring them."""

from __future__ import annotations

from torch import nn


def refuse_offloaded(model: nn.Module) -> None:
    """Raise a ValueError for such a model: its weights have no values that could be observed or put on a grid."""
    for path, module in model.named_modules():
        hook = vars(module).get("_hf_hook")
        if any(getattr(each, "offload", False) for each in (hook, *getattr(hook, "hooks", ()))):
            raise ValueError(
                f"qsim: '{path or type(module).__name__}' has its parameters elsewhere, and accelerate brings them when it runs: they have "
                "no values here. Load the model without offloading (device_map='cpu'), or take it back with "
                "accelerate.hooks.remove_hook_from_submodules(model); QuantSim(..., inplace=True) then needs little more memory than that"
            )
