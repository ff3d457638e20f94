"""What lives: a simulation, what it was made of, and what was done to it that a float model has to undergo too."""

from __future__ import annotations

import copy
import dataclasses
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import qsim

from ..programs.results import tensors_of
from .subjects import SUBJECTS, Call, Subject


class Skip(Exception):
    """A step has nothing to do here."""


def _learned() -> qsim.Config:
    config = qsim.int8()
    assert config.activation is not None
    assert config.weight is not None
    learn = {"learnable": True}
    return dataclasses.replace(
        config, activation=dataclasses.replace(config.activation, **learn), weight=dataclasses.replace(config.weight, **learn)
    )


def _running() -> qsim.Config:
    config = dataclasses.replace(qsim.int8(), batch_norm="keep")
    assert config.activation is not None
    return dataclasses.replace(config, activation=dataclasses.replace(config.activation, method="ema", averaging=0.1))


CONFIGS: dict[str, Callable[[], qsim.Config]] = {
    "int8": qsim.int8,
    "int8, BatchNorm kept": lambda: dataclasses.replace(qsim.int8(), batch_norm="keep"),
    "int8, BatchNorm frozen": lambda: dataclasses.replace(qsim.int8(), batch_norm="freeze"),
    "int4": qsim.int4,
    "w4a8": qsim.w4a8,
    "int16": qsim.int16,
    "onnxruntime": lambda: qsim.int8(target="onnxruntime"),
    "tensorrt": lambda: qsim.int8(target="tensorrt"),
    "executorch": lambda: qsim.int8(target="executorch"),
    "fp16": qsim.fp16,
    "bf16": qsim.bf16,
    "fp8": qsim.fp8,
    "w4a16": lambda: qsim.w4a16(group=8),
    "w8a8_dynamic": qsim.w8a8_dynamic,
    "fp8_static": qsim.fp8_static,
    "learned scales": _learned,
    "running ranges": _running,
    "per tensor": lambda: qsim.int8().override(axis=None).override("*", bits=6),
}


@dataclass
class Life:
    """A simulation and its past.

    Attributes
    ----------
    subject : Subject
    config : Config
        That of `sim`; another one once it was retargeted.
    sim : QuantSim
    source : nn.Module
        The float model that it was made of, its BatchNorms folded as those of the simulation were.
    changes : list of callable
        What a plain model has to undergo to have the structure that `sim.model` has by now: folding, parametrizing.
    folded_later : bool
        BatchNorms that stayed were folded since.
    is_rebuilt : bool
        It was made of another simulation, so none that is made anew need have its quantizers.
    compiles : bool
        Whether `compiled` is compared with the simulation after each step.
    folder : str
        For files.
    """

    subject: Subject
    config: qsim.Config
    sim: qsim.QuantSim
    source: nn.Module
    changes: list[Callable[[nn.Module], None]] = field(default_factory=list)
    folded_later: bool = False
    is_rebuilt: bool = False
    compiles: bool = False
    compiled: Any = None
    folder: str = ""

    def model_state(self) -> dict[str, Tensor]:
        """What `sim.model` holds, by the names that it has there; tensors of its own."""
        return {name: t.detach().clone() for name, t in self.sim.model.state_dict().items()}

    def twin(self) -> nn.Module:
        """The float model with the weights that the simulation has now, in the modes that its modules have."""
        model = copy.deepcopy(self.source)
        for change in self.changes:
            change(model)
        model.load_state_dict(self.model_state(), strict=True, assign=True)
        training = {name: module.training for name, module in self.sim.model.named_modules()}
        for name, module in model.named_modules():
            module.training = training[name]
        for (_, p), (_, own) in zip(self.sim.model.named_parameters(), model.named_parameters(), strict=False):
            own.requires_grad_(p.requires_grad)  # kernels of recurrent layers depend on it
        return model

    def batches(self, rng: random.Random, count: int = 3) -> list[Any]:
        """Data for `calibrate` and the like, in the dtype of the model: each path in turn."""
        calls = [self.call(rng.randrange(1 << 30)) for _ in range(count)]
        return [{**self._named(args), **kwargs} if kwargs else (args[0] if rng.random() < 0.5 else args) for args, kwargs in calls]

    def _named(self, args: tuple[Any, ...]) -> dict[str, Any]:
        return {"x": args[0]}

    def call(self, seed: int) -> Call:
        return self.fitted(self.subject.call(seed))

    def fitted(self, call: Call) -> Call:
        """In the dtype of the model."""
        dtype = self.dtype
        args, kwargs = call
        return tuple(t.to(dtype) if t.is_floating_point() else t for t in args), kwargs

    def examples(self) -> list[Call]:
        return [self.fitted(call) for call in self.subject.examples()]

    def raw_examples(self) -> Any:
        """As `QuantSim` takes them."""
        return _examples(self.examples())

    @property
    def dtype(self) -> torch.dtype:
        return next(p.dtype for p in self.sim.model.parameters())

    @property
    def is_calibrated(self) -> bool:
        return not self.sim.missing()

    def fresh(self) -> qsim.QuantSim:
        """A simulation made anew as this one was, of a model without its weights."""
        model = self.subject.model(5).to(self.dtype)
        sim = qsim.QuantSim(model, self.raw_examples(), self.config)
        if self.folded_later:
            sim.fold_batch_norms()
        return sim

    def begin(self, model: nn.Module) -> None:
        """A simulation of a model, in place of the one that there was."""
        examples = _examples(self.subject.examples())
        self.sim, self.source, self.changes, self.folded_later = qsim.QuantSim(model, examples, self.config), model, [], False
        if self.sim.folds:
            qsim.fold_batch_norms(model, examples)


def _examples(calls: list[Call]) -> Any:
    return [args if not kwargs else {"x": args[0], **kwargs} for args, kwargs in calls]


def born(subject: str, config: str, seed: int, folder: str) -> Life:
    """A simulation that was just made."""
    kind = SUBJECTS[subject]
    model, settings, examples = kind.model(seed), CONFIGS[config](), _examples(kind.examples())
    sim = qsim.QuantSim(model, examples, settings)
    if sim.folds:
        qsim.fold_batch_norms(model, examples)
    return Life(kind, settings, sim, model, folder=folder)


def run(sim: nn.Module, call: Call, *, gradients: bool = False, by: Callable[..., Tensor] | None = None) -> list[Tensor | None]:
    """What a call returns, and the gradients of all parameters and inputs if `gradients`; what it wrote to buffers is undone. `by`: what
    computes it with gradients, from the parameters of `sim`."""
    args, kwargs = call
    buffers = [(b, b.detach().clone()) for b in sim.buffers()]
    torch.manual_seed(17)
    try:
        if not gradients:
            with torch.no_grad():
                return list(tensors_of(sim(*args, **kwargs)))
        given = [t.clone().requires_grad_() if t.is_floating_point() else t for t in args]
        with torch.enable_grad():
            results = tensors_of((by or sim)(*given, **kwargs))
            sources = [t for t in (*given, *sim.parameters()) if t.requires_grad]
            total = sum((t.double() * torch.linspace(-1, 1, t.numel()).double().view(t.shape)).sum() for t in results)
            found: list[Tensor | None] = [None for _ in sources]
            if isinstance(total, Tensor) and total.requires_grad and sources:
                found = list(torch.autograd.grad(total, sources, allow_unused=True))
        return [*(t.detach() for t in results), *found]
    finally:
        restore(sim, buffers)


def restore(sim: nn.Module, buffers: list[tuple[Tensor, Tensor]]) -> None:
    """Put back what a call changed, and nothing else: to write at all would have what is kept forgotten."""
    own = list(sim.buffers())
    with torch.no_grad():
        for (buffer, value), now in zip(buffers, own, strict=True):
            same = buffer.shape == value.shape and torch.equal(buffer.nan_to_num(1e30), value.nan_to_num(1e30))
            if buffer is now and not (same and torch.equal(buffer.isnan(), value.isnan())):
                buffer.copy_(value)


@contextmanager
def savings(sim: qsim.QuantSim, on: bool) -> Iterator[None]:
    was, sim.savings = sim.savings, on
    try:
        yield
    finally:
        sim.savings = was
