"""The state in which the model was given."""

from __future__ import annotations

from torch.nn.modules.batchnorm import _BatchNorm

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding


def training_mode(exam: Examination) -> list[Finding]:
    """QS020: BatchNorms that would normalize with the batch's own statistics, and change the running ones. It is examined in eval mode."""
    found = [name for name, m in exam.model.named_modules() if isinstance(m, _BatchNorm) and m.training]
    if not found:
        return []
    evidence = {"modules": len(found), "first": found[0]}
    fix = "Call model.eval() before preparing, folding or exporting: in training mode outputs depend on the other samples of the batch."
    return [Finding("QS020", "warning", found[0], "", evidence, fix)]
