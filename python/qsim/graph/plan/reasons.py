"""Why something stays in float, in the words of reports. What only one part of the plan says stands there."""

from __future__ import annotations

import torch

from qsim.graph.record.routes import Site
from qsim.operations.functions import visible

NOT_REACHED = "not reached by the example inputs"
BY_CONFIG = "left in float by the config"
BY_TARGET = "target {!r} computes {} in float"
RETURNED = "changed in place, and returned to the model's caller by its older name"
READ_IN_FLOAT = "read by what the config leaves in float: rounded where others read it"
TRAINING = "runs in training only"
METRIC = "a loss, metric, index or number that is compared, or read by one alone"
MASK = "a mask: holds -Inf or the lowest finite number, or 0 and what hides scores from a softmax"
COUNTED = "computed from integers or flags alone: quantized where data is computed with it"
MADE_MASK = "a mask: made of flags or integers, and added to what a softmax reads"
DIVISOR = "a divisor, or under a root or logarithm: a grid would round small values to zero"
COMPLEX = "complex numbers: neither they nor what they are made of and multiplied with has a grid"
# No reason, but what a quantizer at such a place does not do.
UNCLIPPED = (
    "what {!r} computes is quantized inside of an autograd.Function, since it leaves the model or is changed in place: what is clipped "
    "there keeps its gradient"
)


def unmet(site: Site) -> str:
    """Why no mode meets the calls of a site."""
    if any(step.hook for step in site.steps):
        return "runs in a hook, which is not of the model"
    met = getattr(torch, site.op, None)
    cure = f"; write torch.{site.op}" if met is not None and visible(met) else ""
    return f"Dynamo does not hand {site.op}, as it is called here, to function modes{cure}"
