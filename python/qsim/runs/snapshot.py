"""Running a model without leaving a trace in it."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from qsim.runs.arguments import are_same
from qsim.runs.fingerprint import fingerprint
from qsim.runs.held import HeldValues, is_unchanged
from qsim.runs.mapped import MappedParameter
from qsim.runs.random_numbers import random_numbers_unchanged
from qsim.runs.sharding import is_sharded

# Of every module: parameters, buffers, children, and hooks, which a forward may install when it first runs (Hugging Face's do).
_REGISTRIES = tuple(name for name, held in vars(nn.Module()).items() if isinstance(held, (dict, set)))
_COPY: dict[type, Callable[[Any], Any]] = {dict: dict, OrderedDict: dict, set: set}


# A copy of parameters beyond so many bytes is more than it is worth: next to no forward writes to them. They are looked at afterwards.
_COPIED = 256 << 20
_SMALL = 1 << 20  # of one parameter: such are copied in any case


class ContentsLostError(RuntimeError):
    """A forward changed parameters whose contents were not held: the model is not what it was."""


class Snapshot:
    """What `model` is: the contents of its parameters and buffers, and every module's attributes, with its hooks and what they hold.

    Parameters
    ----------
    model : nn.Module
    whole : bool
        Whether all contents are held: one copy of the model's tensors. Otherwise parameters of large models are not, of which no forward is
        known to write to them, nor large tensors that are neither parameters nor buffers, and `restore` raises where they were changed.
    parameters : bool
        Whether parameters are put back too.
    """

    def __init__(self, model: nn.Module, *, whole: bool = True, parameters: bool = True) -> None:
        modules = [*model.modules()]
        self._modules = [
            (m, held := dict(vars(m)), {name: _COPY.get(type(held[name]), copy.copy)(held[name]) for name in _registries(held)})
            for m in modules
            if not isinstance(m, torch.jit.ScriptModule)  # its attributes are not Python's
        ]
        own = {id(p): p for m in modules for p in m.parameters(recurse=False)}
        replaced = {id(getattr(m, name)) for m in modules if _is_ours(m) for name in m._non_persistent_buffers_set}  # never written to
        buffers = {id(b): b for m in modules for b in m.buffers(recurse=False) if id(b) not in replaced}
        switches = [value for m, held, _ in self._modules if _is_ours(m) for value in held.values() if isinstance(value, Tensor)]
        tensors = [*own.values(), *buffers.values(), *switches]
        theirs = [held for m, held, _ in self._modules if not _is_ours(m)]
        attributes = [value for held in theirs for name, value in held.items() if name not in _REGISTRIES]
        self._held = HeldValues(attributes, {id(t) for t in (*tensors, *(m for m, _, _ in self._modules))})
        watched = [] if whole or not parameters else [*_watched(model), *_large(self._held.tensors)]
        self._watched = [(what, tensor, _fingerprint(tensor)) for what, tensor in watched]
        mapped = [p for p in own.values() if isinstance(p, MappedParameter)] if parameters else []
        self._mapped = [(p, p.contents()) for p in mapped]  # files are copies already
        apart = {id(tensor) for tensor in (*(tensor for _, tensor in watched), *(mapped if parameters else own.values()))}
        self.tensors = [(t, t.detach().clone()) for t in (*tensors, *self._held.tensors) if id(t) not in apart]
        self._leaves = [t for t, _ in self.tensors if t.is_leaf and not t._is_view()]
        self._modes = _modes(modules)

    def is_changed(self) -> bool:
        """Whether anything of it is another thing now, or has other contents."""
        for module, attributes, registries in self._modules:
            now = vars(module)
            if not are_same(now, attributes) or not all(is_unchanged(now[name], entries) for name, entries in registries.items()):
                return True
        return self._held.is_changed() or not all(_are_equal(tensor, contents) for tensor, contents in self.tensors)

    def restore(self) -> None:
        """Put everything back.

        Raises
        ------
        ContentsLostError
            A parameter whose contents are not held was changed.
        """
        for module, attributes, registries in self._modules:
            vars(module).clear()
            vars(module).update(attributes)
            for name, entries in registries.items():
                vars(module)[name].clear()
                vars(module)[name].update(entries)
        _put_back(self._modes)
        self._held.restore()
        with torch.no_grad():
            for tensor, contents in self.tensors:
                tensor.data.copy_(contents)  # .data: no version bump, so a graph the caller still holds stays usable
            for mapped, values in self._mapped:
                mapped.put_back(values)
        for tensor in self._leaves:
            if not tensor.is_leaf:  # what was written to it had a gradient
                tensor.detach_()
        changed = [(what, tensor) for what, tensor, before in self._watched if _fingerprint(tensor) != before]
        if changed:
            what, tensor = changed[0]
            raise ContentsLostError(
                f"qsim: running the model changed {what} ({tensor.nbytes >> 20} MiB), which cannot be put back: of more than "
                f"{_COPIED >> 20} MiB no copy is made. Have what forward writes in a buffer (register_buffer), and load the model again"
            )


def _is_ours(module: nn.Module) -> bool:
    return type(module).__module__.startswith("qsim.")


def _registries(held: dict[str, Any]) -> list[str]:
    """Those among a module's attributes; without its parameters where they are sharded, since FSDP knows which of them it has gathered, and
    puts shards back itself."""
    sharded = any(map(is_sharded, held.get("_parameters", {}).values()))
    return [name for name in _REGISTRIES if name in held and not (sharded and name == "_parameters")]


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """To the bit: NaN is NaN."""
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device:
        return False
    return one.is_meta or bool(((one == other) | ((one != one) & (other != other))).all())


def _watched(model: nn.Module) -> list[tuple[str, Tensor]]:
    """The parameters of a large model that are looked at in place of being copied, with what to call them."""
    parameters = dict(model.named_parameters())
    if sum(parameter.nbytes for parameter in parameters.values()) <= _COPIED:
        return []
    renormed = {id(m.weight) for m in model.modules() if isinstance(m, (nn.Embedding, nn.EmbeddingBag)) and m.max_norm is not None}
    plain = {name: p for name, p in parameters.items() if type(p) is nn.Parameter and p.is_contiguous() and not p.is_inference()}
    return [(f"its parameter {name!r}", p) for name, p in plain.items() if p.nbytes > _SMALL and id(p) not in renormed]


def _large(tensors: Sequence[Tensor]) -> list[tuple[str, Tensor]]:
    """Likewise, of tensors that a model holds without parameters and buffers."""
    if sum(t.nbytes for t in tensors) <= _COPIED:
        return []
    return [("a tensor that is neither a parameter nor a buffer", t) for t in tensors if t.nbytes > _SMALL and t.is_contiguous()]


def _fingerprint(parameter: Tensor) -> tuple[int, ...]:
    """Equal as long as nobody writes to it: beside its contents the version, which `.data` does not count."""
    return parameter._version, *fingerprint(parameter)


@contextmanager
def unchanged(model: nn.Module, *, whole: bool = True) -> Iterator[None]:
    """Undo on leaving, also by an exception, what the body did to `model` and to the random numbers of torch, Python and NumPy.

    Put back is what a `Snapshot` holds: training flags, what a forward assigns (counters, caches, replaced buffers, modules made on the
    first call), hooks. `whole`: as there.
    """
    before = Snapshot(model, whole=whole)
    with random_numbers_unchanged():
        try:
            yield
        finally:
            before.restore()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """In eval mode; training flags are afterwards as they were."""
    modes = _modes(model.modules())
    try:
        model.eval()
        yield
    finally:
        _put_back(modes)


def _modes(modules: Iterable[nn.Module]) -> dict[nn.Module, bool]:
    """Training flags, those of quantizers too, which follow the containers where they stand."""
    return {each: each.training for m in modules for each in (m, *getattr(m, "_qsim_followers", tuple)())}


def _put_back(modes: dict[nn.Module, bool]) -> None:
    for module, training in modes.items():
        module.training = training


@contextmanager
def undone_on_error(model: nn.Module) -> Iterator[None]:
    """Undo what the body did to `model`, as a `Snapshot` holds it, if it ends by an exception, Ctrl-C among them.

    Examples
    --------
    >>> layer = nn.Linear(2, 2)
    >>> try:
    ...     with undone_on_error(layer), rewriting():
    ...         layer.weight.fill_(0.25)[0].add_("half way")
    ... except TypeError:
    ...     print(bool((layer.weight == 0.25).any()))
    False
    """
    before = Snapshot(model)
    try:
        yield
    except BaseException:
        with rewriting():
            before.restore()
        raise


@contextmanager
def plain_eager() -> Iterator[None]:
    """No gradients, in-place changes counted (inference tensors count none), compiled parts run as the Python they were made from, and
    autocast keeps no parameter in another type."""
    keeps = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("force_eager"):
            yield
    finally:
        torch.set_autocast_cache_enabled(keeps)


@contextmanager
def without_autocast() -> Iterator[None]:
    """Operations compute in the types of what they are given, as in a file: what autocast makes of them is no part of the model.

    Examples
    --------
    >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
    ...     nn.Linear(2, 2)(torch.ones(1, 2)).dtype
    torch.float32
    """
    with ExitStack() as stack:
        for kind in ("cpu", "cuda"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def rewriting() -> Iterator[None]:
    """No gradients, for a body that writes to parameters. What autocast keeps of them, until its block ends, is forgotten.

    Examples
    --------
    >>> layer = nn.Linear(2, 2, bias=False)
    >>> with torch.autocast("cpu", torch.bfloat16):
    ...     _ = layer(torch.ones(1, 2))
    ...     with rewriting():
    ...         _ = layer.weight.zero_()
    ...     layer(torch.ones(1, 2)).tolist()
    [[0.0, 0.0]]
    """
    try:
        with torch.no_grad():
            yield
    finally:
        torch.clear_autocast_cache()


@contextmanager
def beginning_alike(model: nn.Module) -> Iterator[None]:
    """Undo on leaving, also by an exception, what the body did to `model` but for the contents of its parameters, take buffers out of
    graphs, and have the random numbers that it drew come next again. What runs in several of these, and may go back through the model,
    begins from the same each time, as in float and simulated.

    Examples
    --------
    >>> norm = nn.BatchNorm1d(2)
    >>> def run():
    ...     with beginning_alike(norm):
    ...         return norm(torch.randn(3, 2))
    >>> torch.equal(run(), run()), norm.num_batches_tracked.item()
    (True, 0)
    """
    before = Snapshot(model, parameters=False)
    buffers = [(m, name, b, b.requires_grad) for m in model.modules() for name, b in m.named_buffers(recurse=False)]
    with random_numbers_unchanged():
        try:
            yield
        finally:
            before.restore()
            for module, name, buffer, required in buffers:
                if buffer.requires_grad != required:  # what a graph wrote to stays in it
                    setattr(module, name, buffer.detach().clone())
