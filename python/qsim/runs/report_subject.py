"""The model and the config that a report is about, in words."""

from __future__ import annotations

from torch import nn

from qsim.config.config import Config
from qsim.config.described import described
from qsim.pages.subject import Subject


def subject_of(model: nn.Module, config: Config | None = None) -> Subject:
    """Class, given name and size of a model, and its config.

    Examples
    --------
    >>> subject_of(torch.nn.Linear(3, 2)).model
    'Linear, 8 parameters'
    """
    name = _given_name(model)
    count = sum(parameter.numel() for parameter in model.parameters())
    return Subject(
        f"{type(model).__name__}{f' ({name})' if name else ''}, {count:,} parameters", "" if config is None else described(config)
    )


def _given_name(model: nn.Module) -> str:
    """What Hugging Face's models and timm's call themselves, beside their class; "" of others."""
    for owner, attribute in (("pretrained_cfg", "architecture"), ("config", "_name_or_path")):
        holder = getattr(model, owner, None)
        found = holder.get(attribute) if isinstance(holder, dict) else getattr(holder, attribute, None)
        if isinstance(found, str) and found:
            return found
    return ""
