"""Calibration block by block: all batches pass one block before any goes on to the next, so that its weights are read once."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from qsim.close_names import close_names
from qsim.errors import CalibrationError
from qsim.numbers.range_methods import RANGE_METHODS
from qsim.options import check_patterns
from qsim.quantizers.quantizer import Quantizer
from qsim.runs.paused import PausedRun, current_run, workers_of

_SMALLEST = 1 << 12  # bytes: what is less stays in memory


def blocks_named(model: nn.Module, patterns: Sequence[str]) -> list[nn.Module]:
    """The modules whose paths match one of the globs, without those inside of others; ValueError for a glob that matches nothing."""
    check_patterns("QuantSim.calibrate", patterns)
    paths = dict(model.named_modules())
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matching = {path: module for path, module in paths.items() if path and fnmatchcase(path, pattern)}
        if not matching:
            close = ", ".join(map(repr, close_names(pattern, paths))) or "see sim.model.named_modules()"
            raise ValueError(f"QuantSim.calibrate: got blocks={pattern!r}, which matches no module; close to it: {close}")
        found |= matching
    return [module for path, module in found.items() if not any(path.startswith(f"{other}.") for other in found)]


def block_by_block(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    run: Callable[[Any], object],
    batches: Sequence[Any],
    quantizers: Mapping[str, Quantizer],
    folder: Path | None,
) -> Iterator[int]:
    """Run each batch up to the first block, then each through that block, and so on. Yields, whenever one has stopped, which it was.

    Parameters
    ----------
    model : nn.Module
    blocks : sequence of nn.Module
    run : callable
        Runs the model on a batch.
    batches : sequence
    quantizers : mapping of str to Quantizer
        Those that observe.
    folder : Path or None
        Where the arguments of blocks are kept while a run is stopped; None for memory.

    Raises
    ------
    CalibrationError
        What is observed would depend on the order of the batches: the message says why.
    """
    threads, workers = torch.get_num_threads(), workers_of(len(batches))
    runs = [PausedRun(partial(run, batch), f"qsim batch {number}", workers) for number, batch in enumerate(batches)]
    with _kept_in(folder, model, batches) as kept, _stopping(blocks, kept):
        try:
            states, stages = _states(model), dict.fromkeys(quantizers, 0)
            seen = {key: quantizer.observer.counts.elements for key, quantizer in quantizers.items()}
            while not all(one.is_over for one in runs):
                for number, one in enumerate(runs):
                    if not one.is_over:
                        _resumed(one, model, states)
                        yield number
                _check_order(quantizers, seen, stages, len(runs))
        finally:
            for one in runs:
                one.abandon()
            torch.set_num_threads(threads)


def _resumed(run: PausedRun, model: nn.Module, states: tuple[Any, ...]) -> None:
    before = run.random
    run.resume()
    if run.error is not None:
        raise run.error
    if not run.random.is_same(before):
        raise CalibrationError(
            "QuantSim.calibrate: the model draws random numbers in eval mode, which would be others block by block; calibrate without "
            "blocks="
        )
    if _states(model) != states:
        raise CalibrationError(
            "QuantSim.calibrate: the model writes to its buffers, and one batch would read what another wrote; calibrate without blocks="
        )


def _states(model: nn.Module) -> tuple[Any, ...]:
    """Changes when somebody writes to a buffer, or replaces one."""
    return tuple((id(t), t._version) for t in model.buffers() if not t.is_inference())


def _check_order(quantizers: Mapping[str, Quantizer], seen: dict[str, int], stages: dict[str, int], batches: int) -> None:
    """What is observed in two blocks is observed in another order than batch by batch, which histograms and running ranges depend on."""
    for key, quantizer in quantizers.items():
        count = quantizer.observer.counts.elements
        stages[key] += count > seen[key]
        seen[key] = count
        if stages[key] > 1 and batches > 1 and (not RANGE_METHODS[quantizer.spec.method].takes_range or quantizer.spec.is_running):
            raise CalibrationError(
                f"QuantSim.calibrate: '{key}' is met in more than one block, or batches take other ways through them: block by block it "
                "would see tensors in another order, and its range might differ. Calibrate without blocks=, or name blocks that do not "
                "share it"
            )


@contextmanager
def _stopping(blocks: Sequence[nn.Module], kept: _Kept | None) -> Iterator[None]:
    """Within the context a run stops before each of the blocks."""

    def stop(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        run = current_run()
        if run is None:
            return
        with torch._C.DisableTorchFunction():
            files = [] if kept is None else kept.out((args, kwargs))
            run.pause()
            for t, file in files:
                kept.back(t, file)  # type: ignore[union-attr]

    handles = [block.register_forward_pre_hook(stop, with_kwargs=True) for block in blocks]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _kept_in(folder: Path | None, model: nn.Module, batches: Sequence[Any]) -> Iterator[_Kept | None]:
    if folder is None:
        yield None
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="qsim-", dir=folder) as own:
        yield _Kept(Path(own), model, batches)


class _Kept:
    """Tensors in files. While one is there the object has no memory, and NaN for values: nobody is to read it."""

    def __init__(self, folder: Path, model: nn.Module, batches: Sequence[Any]) -> None:
        self._folder, self._count = folder, 0
        held = tree_leaves([*map(vars, model.modules()), *batches])
        self._others = {id(t): t for t in held if isinstance(t, Tensor)}
        self._out: dict[int, Tensor] = {}

    def out(self, arguments: Any) -> list[tuple[Tensor, Path]]:
        """Write what a run alone has of its arguments, and free its memory."""
        tensors = {id(t): t for t in tree_leaves(arguments) if isinstance(t, Tensor)}
        if tensors.keys() & self._out.keys():
            raise CalibrationError(
                "QuantSim.calibrate: two batches read one tensor, which the model keeps; calibrate without folder=, with activations in "
                "memory"
            )
        found = []
        for t in tensors.values():
            if self._is_own(t):
                path = self._folder / f"{self._count}"
                self._count += 1
                t.reshape(-1).view(torch.uint8).cpu().numpy().tofile(path)
                self._out[id(t)] = t
                t.data = torch.full((), torch.nan, dtype=t.dtype, device=t.device).expand(t.shape)
                found.append((t, path))
        return found

    def back(self, t: Tensor, path: Path) -> None:
        """Read it again."""
        stored = torch.from_file(str(path), dtype=t.dtype, size=t.numel()).reshape(t.shape)
        t.data = stored.to(t.device, copy=True)
        del self._out[id(t)]
        path.unlink()

    def _is_own(self, t: Tensor) -> bool:
        """Whether no other tensor shares its memory, which is worth a file. What the model or the data hold, others may read."""
        plain = type(t) is Tensor and t.is_floating_point() and t.layout is torch.strided and t.is_contiguous() and not t.requires_grad
        if not plain or t.nbytes < _SMALLEST or id(t) in self._others or t._is_view():
            return False
        return torch._C._storage_Use_Count(t.untyped_storage()._cdata) == 2  # the tensor, and the object that was asked
