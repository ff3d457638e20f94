"""Making a simulation changes nothing but the simulation: not the model, nor its example, nor the random numbers that come next."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import qsim

from ..case import Case, Failure, Raised, kept_batch_norms
from ..loaded import device
from ..results import same_bits, tensors_of
from ..running import quietly


def making_changes_nothing(case: Case) -> Failure | None:
    model = case.loaded.model()
    given, (args, kwargs) = case.loaded.example(torch.float32), case.loaded.arguments(case.loaded.calls()[0], torch.float32)
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    before, flags = _of(model), [m.training for m in model.modules()]
    torch.manual_seed(7)
    with quietly():
        try:
            sim = qsim.QuantSim(model, given, kept_batch_norms(qsim.int8()))
        except Exception as error:
            raise Raised("QuantSim", error) from error
    drawn = torch.rand(1), torch.rand(1, device=device())
    torch.manual_seed(7)
    if drawn != (torch.rand(1), torch.rand(1, device=device())):
        return Failure("left alone", "random numbers", "QuantSim drew some")
    if problem := same_bits(_of(model), before):
        return Failure("left alone", "the model", problem)
    if [m.training for m in model.modules()] != flags:
        return Failure("left alone", "training flags", "of the model")
    if problem := same_bits(tensors_of(given), tensors_of([args, kwargs])):
        return Failure("left alone", "the example", problem)
    kept = {name: b for name, b in sim.model.named_buffers() if name in buffers}
    if problem := same_bits(list(kept.values()), [buffers[name] for name in kept]):
        return Failure("left alone", "buffers of the simulation", f"{problem}, of {list(kept)}")
    return None


def _of(model: nn.Module) -> list[Tensor]:
    return [t.detach().clone() for t in (*model.parameters(), *model.buffers())]
