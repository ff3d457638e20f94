"""Weights that half precision cannot hold: what engines that flush subnormals to zero make of them."""

from __future__ import annotations

import math

import torch

from qsim.clinic.examination import Examination
from qsim.clinic.finding import Finding
from qsim.ops.round_to_format import count_format_


def tiny_weights(exam: Examination) -> list[Finding]:
    """QS015: a weight most of whose energy is in numbers that become zero or subnormal. Small values beside large ones do no harm."""
    findings = []
    for name, weight in exam.subject.model.named_parameters():
        if weight.dim() < 2 or not weight.is_floating_point() or not weight.numel():
            continue
        flat = weight.detach().double()
        energy = flat.square().sum().item()
        lost = flat[flat.abs() < exam.numbers.smallest_normal].square().sum().item()
        if not math.isfinite(energy) or not lost or 10 * math.log10(energy / lost) >= exam.half.sqnr:
            continue
        counts = torch.zeros(6, dtype=torch.int64, device=weight.device)
        count_format_(weight.detach(), exam.half.format, counts)
        *_, zeros, subnormals = counts.tolist()
        evidence = {"zero": zeros, "subnormal": subnormals, "elements": weight.numel(), "largest": flat.abs().max().item()}
        readers = [site for site, s in exam.subject.sites.items() if name in s.steps[0].constants.values()]
        fix = f"Scale '{name}' up by a power of two and its result down again, or keep the operation in float32."
        findings.append(exam.finding("QS015", "warning", readers[0] if readers else name, {"weight": name, **evidence}, fix))
    return findings
