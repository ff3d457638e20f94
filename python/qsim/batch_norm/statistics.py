"""The running statistics of the BatchNorms in a simulated model: what is wrong with them, and how to estimate them anew."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.absorb import NotFoldable, normalization
from qsim.errors import CalibrationError
from qsim.runs.snapshot import unchanged


def batch_norms(model: nn.Module) -> dict[str, _BatchNorm]:
    """The BatchNorms of a model by path."""
    return {path: module for path, module in model.named_modules() if isinstance(module, _BatchNorm)}


def freeze(norms: Mapping[str, nn.Module]) -> None:
    """From now on they normalize with their running statistics, which may not be reset: no batch in training would tell others."""
    for path, norm in norms.items():
        norm.eval()
        vars(norm).setdefault("reset_running_stats", functools.partial(_refuse_reset, path))


def thaw(norms: Mapping[str, nn.Module], training: bool) -> None:
    """Undo `freeze`."""
    for norm in norms.values():
        norm.train(training)
        vars(norm).pop("reset_running_stats", None)


def _refuse_reset(path: str) -> NoReturn:
    raise RuntimeError(
        f"QuantSim: BatchNorm '{path}' is frozen, and its running statistics were to be reset, as torch.optim.swa_utils.update_bn does: "
        "they would stay at a mean of 0 and a variance of 1. Expected sim.reestimate_batch_norms(data), which estimates those of all"
    )


def degenerate(model: nn.Module) -> dict[str, str]:
    """Why the output of a BatchNorm means nothing in eval mode: a sentence for each that has such statistics, by path."""
    found = {}
    for path, norm in batch_norms(model).items():
        if norm.running_mean is None or norm.running_var is None:
            continue  # normalizes each batch by its own
        try:
            normalization(path, norm)
        except NotFoldable as reason:
            found[path] = str(reason)
    return found


def reestimate(model: nn.Module, batches: Iterator[Any], run: Callable[[Any], object]) -> dict[str, int]:
    """Set the running statistics to the average over batches of each batch's mean and unbiased variance.

    Everything else stays in eval mode. A batch that has NaN or Inf where a BatchNorm reads it does not count there.

    Returns
    -------
    dict of str to int
        Batches that counted, by path.

    Raises
    ------
    CalibrationError
        There was no batch, or a BatchNorm met none that counts; no statistics are changed.
    """
    norms = {path: norm for path, norm in batch_norms(model).items() if norm.running_mean is not None and norm.running_var is not None}
    averages = {path: _Average(path, norm) for path, norm in norms.items()}
    count = 0
    with unchanged(model), torch.no_grad(), ExitStack() as undo:
        model.eval()
        for average in averages.values():
            undo.enter_context(average.listening())
        for batch in batches:
            run(batch)
            count += 1
    if count == 0:
        raise CalibrationError("QuantSim: reestimate_batch_norms got no batch. Is the iterator used up, or the data set empty?")
    counted = {path: int(average.batches) for path, average in averages.items()}
    if unmet := [path for path, number in counted.items() if number == 0]:
        names = ", ".join(f"'{path}' ({averages[path].why_not})" for path in unmet)
        raise CalibrationError(f"QuantSim: no batch of {count} tells the statistics of BatchNorm {names}; none were changed")
    for average in averages.values():
        average.store()
    return counted


class _Average:
    """The cumulative average of what one BatchNorm sees, kept on its device."""

    def __init__(self, path: str, norm: _BatchNorm) -> None:
        self.path, self.norm = path, norm
        wide = torch.promote_types(cast(Tensor, norm.running_mean).dtype, torch.float32)
        self.mean, self.var = (torch.zeros_like(cast(Tensor, t), dtype=wide) for t in (norm.running_mean, norm.running_var))
        self.batches = torch.zeros((), dtype=torch.int64, device=self.mean.device)
        self.reached = False

    @property
    def why_not(self) -> str:
        return "every batch holds NaN or Inf there" if self.reached else "none reached it"

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Have the BatchNorm leave each batch's statistics in its buffers, and take them from there."""
        self.norm.train()
        self.norm.momentum = 1.0
        handles = [self.norm.register_forward_pre_hook(self._begin), self.norm.register_forward_hook(self._add)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _begin(self, norm: _BatchNorm, args: tuple[Any, ...]) -> None:
        with torch._C.DisableTorchFunction():  # the simulation follows the model's own calls
            single = args[0].numel() == args[0].shape[1]
            cast(Tensor, norm.running_mean).zero_()  # a momentum of 1 does not forget NaN and Inf: 0 * NaN is NaN
            cast(Tensor, norm.running_var).zero_()
        if single:
            raise ValueError(
                f"QuantSim: reestimate_batch_norms: BatchNorm '{self.path}' got one value per channel, which has no variance; "
                "use batches of two samples or more"
            )

    def _add(self, norm: _BatchNorm, args: tuple[Any, ...], out: Tensor) -> None:
        with torch._C.DisableTorchFunction():
            mean, var = cast(Tensor, norm.running_mean).to(self.mean), cast(Tensor, norm.running_var).to(self.var)
            good = (mean.isfinite() & var.isfinite()).all()
            self.mean += torch.where(good, mean, 0.0)
            self.var += torch.where(good, var, 0.0)
            self.batches += good
            self.reached = True

    def store(self) -> None:
        cast(Tensor, self.norm.running_mean).copy_(self.mean / self.batches)
        cast(Tensor, self.norm.running_var).copy_(self.var / self.batches)
        if self.norm.num_batches_tracked is not None:
            self.norm.num_batches_tracked.copy_(self.batches)
