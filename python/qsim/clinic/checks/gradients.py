"""Gradients: the first operation of the backward pass that makes NaN or Inf."""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.graph.snapshot import unchanged
from qsim.training.watch import NonFiniteError, Watch


def gradients(exam: Examination) -> list[Finding]:
    """QS004: operations whose gradient is NaN or Inf while what it is computed from is finite; of the first batch that has any."""
    loss = exam.loss
    if loss is None:
        return []
    model = copy.deepcopy(exam.model)
    for i, batch in enumerate(exam.batches):
        try:
            with unchanged(model), torch.enable_grad(), Watch(model):
                given = tree_map_only(Tensor, torch.clone, batch)
                loss(exam.subject.call(model, given, exam.forward), given).backward()
        except NonFiniteError as error:
            first = error.events[0]
            if first.backward:
                fix = "Keep its operand away from where the derivative is infinite: a root or a norm at 0, a division by 0."
                evidence = {"operation": first.op, "makes": first.what, "batch": i}
                return [Finding("QS004", "error", "" if first.module == "outside the model" else first.module, "", evidence, fix)]
            if first.module == "outside the model":
                evidence = {"operation": first.op, "makes": first.what, "batch": i, "where": "the loss"}
                fix = "Use a loss that takes logits, or clamp what it takes the logarithm of."
                return [Finding("QS001", "error", "", "", evidence, fix)]
    return []
