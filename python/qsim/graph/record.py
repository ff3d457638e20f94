"""Record: run the model once in eval and once in training and note every operation with where its operands came from.

A *container* is a module whose forward is Python of its own: the root, anything from outside torch.nn, anything with children.
Its forward runs under a function mode. A `torch.nn` leaf is no container: it stays as it is, and the function it calls is an
operation of the container above it.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_leaves, tree_map_only

from qsim.graph.functions import COMPOSITE, CONSTRUCTORS, RANDOM, READS, TRANSPARENT, Function, name_of, visible
from qsim.graph.snapshot import unchanged
from qsim.graph.tape import Call, InputSlot, Origin, Reader, Slot, Step, Tape, indirect, memory_of, options, tensors, version_of

__all__ = ["Call", "InputSlot", "Origin", "Reader", "Slot", "Step", "Tape", "call_arguments", "containers", "leaves", "record", "subclass"]


def call_arguments(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`example_inputs` as users give them (a tensor, a tuple or list of arguments, a dict of keyword arguments) as `(args, kwargs)`."""
    if isinstance(example_inputs, dict):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        return tuple(example_inputs), {}
    return (example_inputs,), {}


def containers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Path and module of each container. Not scripted modules, nor those with a `forward` set on the instance: their class is not used."""
    for path, m in model.named_modules():
        if isinstance(m, torch.jit.ScriptModule) or "forward" in vars(m) or type(m).forward is nn.Module.forward:  # as in ModuleList
            continue
        if path == "" or not _is_leaf(m):
            yield path, m


def leaves(container: nn.Module) -> Iterator[nn.Module]:
    """The `torch.nn` leaves that are operations of a container, not of one inside it."""
    for m in container.children():
        if _is_leaf(m):
            yield m
        elif type(m).forward is nn.Module.forward:  # as in ModuleList
            yield from leaves(m)


def _is_leaf(m: nn.Module) -> bool:
    return type(m).__module__.startswith("torch.nn.modules") and not any(True for _ in m.children())


@functools.cache
def subclass(mixin: type[nn.Module], cls: type[nn.Module]) -> type[nn.Module]:
    """`cls` with the forward of `mixin` before its own; `_original` is `cls`. Cached, so that equal models have equal classes."""
    before: types.FunctionType = mixin.forward  # type: ignore[assignment]
    forward = types.FunctionType(before.__code__, before.__globals__, "forward", before.__defaults__, before.__closure__)
    forward.__signature__ = inspect.signature(cls.forward)  # type: ignore[attr-defined]  # trainers and torch.export ask for it
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (mixin, cls), {**names, "_original": cls, "forward": forward})


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tape, list[str]]:
    """Run `model` on copies of the example inputs, in eval and in training mode, without gradients, and leave it as it was.

    Returns
    -------
    tape : Tape
        Both passes. A pass that raised is not in it.
    report : list of str
        One sentence for each thing that could not be seen.

    Raises
    ------
    ValueError
        If a lazy module has not got its parameters yet.
    """
    for name, t in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(t):
            raise ValueError(
                f"'{name}' has no shape yet: run the model once on the example inputs, so that its lazy modules get their parameters"
            )
    tape, report = Tape(model), _blind_spots(model)
    for run, mode in enumerate(("eval", "training")):
        calls, steps, results, reads = len(tape.calls), len(tape.steps), set(tape.results), set(tape.reads)
        try:
            with _plain_eager(), unchanged(model), _recording(model, _Pass(tape, run), report):
                given = tree_map_only(Tensor, torch.clone, (args, kwargs))
                out = model.train(mode == "training")(*given[0], **given[1])
                tape.results |= {o for t in tensors_in(out) for o in tape.origins(t)}
                kept = tree_leaves([value for m in model.modules() for name, value in vars(m).items() if not name.startswith("_")])
                tape.reads |= {o for t in kept if isinstance(t, Tensor) for o in tape.origins(t) if isinstance(o.source, Step)}
        except Exception as e:
            del tape.calls[calls:], tape.steps[steps:]
            tape.results, tape.reads = results, reads
            report.append(f"the model could not be recorded in {mode} mode: {type(e).__name__}: {e}")
        tape.forget_tensors()
    report += [f"the result of '{name}' is not dense (sparse, or of another layout): it stays in float" for name in tape.unusual]
    return tape, list(dict.fromkeys(report))


@contextmanager
def _plain_eager() -> Iterator[None]:
    """No gradients, in-place changes counted (inference tensors count none), and compiled parts run as the Python they were made from."""
    with torch.inference_mode(False), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        yield


def _blind_spots(model: nn.Module) -> list[str]:
    scripted = [path for path, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    replaced = [path for path, m in model.named_modules() if "forward" in vars(m) and path not in scripted]
    tops = [p for p in scripted if not any(p.startswith(f"{other}.") or other == "" for other in scripted if other != p)]
    return [f"'{path}' is a scripted module: its operations are not seen" for path in tops] + [
        f"'{path}' has a forward set on the instance: its operations are counted as its caller's" for path in replaced
    ]


def tensors_in(value: Any) -> Iterator[Tensor]:
    """The tensors of a result: in tuples, lists and dicts, and in the attributes of objects such as dataclasses and distributions."""
    seen: set[int] = set()
    left = [value]
    while left:
        for leaf in tree_leaves(left.pop()):
            if isinstance(leaf, Tensor):
                yield leaf
            elif hasattr(leaf, "__dict__") and id(leaf) not in seen:
                seen.add(id(leaf))
                left.append(list(vars(leaf).values()))


@dataclass
class _Pass:
    """One run of the model."""

    tape: Tape
    run: int
    leaf: str = ""  # path of the leaf that runs now
    began: bool = False  # the root has been called


class Recorder(TorchFunctionMode):
    """Notes on the tape what one call of one container does."""

    def __init__(self, current: _Pass, path: str, training: bool, *, framed: bool = False) -> None:
        super().__init__()
        self.current, self.tape, self.call, self.framed = current, current.tape, Call(path, training, current.run), framed
        self.tape.calls.append(self.call)

    @property
    def leaf(self) -> str:
        return "" if self.framed else self.current.leaf

    def frame(self, name: str) -> Recorder:
        """Records part of a composite function as a call of its own."""
        path = ".".join(filter(None, (self.leaf or self.call.path, name)))
        self.call.frames.append((len(self.call.steps), path))
        return Recorder(self.current, path, self.call.training, framed=True)

    def __torch_function__(self, func: Function, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs, name = kwargs or {}, name_of(func)
        if name in COMPOSITE:
            with self:
                return COMPOSITE[name](*args, **kwargs)
        if name in CONSTRUCTORS:
            out = func(*args, **kwargs)
            if name in RANDOM:
                self.tape.mark(out, Origin("random"))
            return out
        with torch._C.DisableTorchFunction():
            given = dict(tensors(args, kwargs))
            origins = {slot: self.tape.origins(t) for slot, t in given.items()}
            versions = {slot: version_of(t) for slot, t in given.items()}
            out = func(*args, **kwargs)
            changed = frozenset(slot for slot, t in given.items() if version_of(t) != versions[slot])
            for slot in changed:
                self.tape.rewrite(given[slot], origins[slot])
            if name in RANDOM:
                for t in _results(out):
                    self.tape.mark(t, Origin("random"))
            elif name in TRANSPARENT or not any(t.is_floating_point() for t in _results(out)):
                self._flow(name, given, origins, changed, out)
            else:
                step = self._step(func, given, origins, changed)
                step.options = dict(options(args, kwargs))
                out = self._mark_results(step, given, out)
            return out

    def _flow(
        self, name: str, given: dict[Slot, Tensor], origins: dict[Slot, frozenset[Origin]], changed: frozenset[Slot], out: Any
    ) -> None:
        """A transparent function hands on where its operands came from; constants, indices and masks only if there is nothing else."""
        floats = [found for slot, found in origins.items() if given[slot].is_floating_point()]
        flow = indirect(o for found in floats or origins.values() for o in found)
        flow = frozenset(o for o in flow if o.kind != "const") or flow
        for slot in changed:  # x[...] = y: x now comes from both
            self.tape.mark(given[slot], *indirect(origins[slot]), *flow)
        for t in _results(out):
            if flow and not any(t is g for g in given.values()):
                self.tape.mark(t, *flow)
        masks = any(not (t.is_floating_point() or t.is_complex()) for t in _results(out))
        if name in READS or (floats and masks):
            self.tape.reads |= {o for o in flow if isinstance(o.source, Step)}

    def _step(self, func: Function, given: dict[Slot, Tensor], origins: dict[Slot, frozenset[Origin]], changed: frozenset[Slot]) -> Step:
        floats = {slot: t for slot, t in given.items() if _is_data(t)}
        step = Step(
            self.call.path,
            self.leaf,
            func,
            self.call.training,
            self.call.run,
            operands={slot: origins[slot] for slot in floats},
            side=frozenset(o for slot, found in origins.items() if slot not in floats for o in found if o.kind != "const"),
            dims={slot: t.dim() for slot, t in floats.items()},
            same={slot: self.tape.identity(t) for slot, t in floats.items()},
            changed=changed,
            transformed=torch._C._functorch.maybe_current_level() is not None,
            masks=frozenset(slot for slot, t in floats.items() if _is_mask(t)),
        )
        self.call.steps.append(step)
        self.tape.steps.append(step)
        for slot in changed:
            self.tape.mark(given[slot], Origin("stale", step))
        return step

    def _mark_results(self, step: Step, given: dict[Slot, Tensor], out: Any) -> Any:
        if type(out) in (tuple, list):
            return type(out)(self._result(step, t, i, given) for i, t in enumerate(out))
        if isinstance(out, tuple):  # a torch.return_types
            for i, t in enumerate(out):
                self._result(step, t, i, given)
            return out
        return self._result(step, out, 0, given)

    def _result(self, step: Step, t: Any, output: int, given: dict[Slot, Tensor]) -> Any:
        """Marks a result. One that is an operand too (`x.add_(1)`) is returned under an alias, to tell the returned from the changed."""
        if not isinstance(t, Tensor) or not t.is_floating_point():
            return t
        if t.layout is not torch.strided:
            self.tape.unusual[step.name] = None
            return t
        step.outputs = output + 1
        if _is_mask(t):
            step.masked_outputs |= {output}
        if not visible(step.func):
            self.tape.mark(t, Origin("stale", step, output))
            return t
        if any(t is g for g in given.values()):
            t = t.view_as(t)
        self.tape.mark(t, Origin("step", step, output))
        if step.changed:
            self.tape.returned[memory_of(t)].add((step, output))
        return t


def _is_data(t: Tensor) -> bool:
    """Whether an operand is what a quantizer takes. An empty one (a cache that is not filled yet) is no data."""
    return t.is_floating_point() and t.layout is torch.strided and t.numel() > 0


def _is_mask(t: Tensor) -> bool:
    """Whether a tensor holds -Inf or the lowest finite number. One that cannot be compared here (sparse, meta) is taken for none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(t):  # inside vmap or jvp: a bool of the wrapper is refused
        t = torch._C._functorch.get_unwrapped(t)
    return t.layout is torch.strided and not t.is_meta and bool((t <= torch.finfo(t.dtype).min).any())


def _results(out: Any) -> list[Tensor]:
    return [t for t in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(t, Tensor)]


class Recorded(nn.Module):
    """Mixin of a container while it is recorded."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        current, path = vars(self)["_qsim_recording"]
        if path == "" and not current.began:
            current.began = True
            _mark_inputs(current.tape, args, kwargs)
        with Recorder(current, path, self.training):
            return super().forward(*args, **kwargs)


def _mark_inputs(tape: Tape, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """As the root's forward gets them: after its pre-hooks, where the simulation quantizes them."""
    for keys, value in tree_flatten_with_path((args, kwargs))[0]:
        path = tuple(next(getattr(key, a) for a in ("idx", "key", "name") if hasattr(key, a)) for key in keys[1:])
        for inner, t in [((), value)] if isinstance(value, Tensor) else _attributes(value):
            slot = path[0] if len(path) == 1 and not inner else (*path, *inner)
            tape.inputs[slot] = t.dtype
            if inner or not t.is_floating_point():
                tape.unreplaced.add(slot)
            tape.mark(t, Origin("input", slot))


def _attributes(value: Any) -> list[tuple[tuple[Any, ...], Tensor]]:
    """The tensors that an argument, a dataclass say, holds in its attributes, each with its path."""
    leaves = tree_flatten_with_path(dict(vars(value)))[0] if hasattr(value, "__dict__") and not isinstance(value, nn.Module) else []
    return [(tuple(getattr(key, "key", getattr(key, "idx", key)) for key in keys), t) for keys, t in leaves if isinstance(t, Tensor)]


@contextmanager
def _recording(model: nn.Module, current: _Pass, report: list[str]) -> Iterator[None]:
    """Containers record, leaves tell their name, until the body ends."""
    with ExitStack() as undo:
        for path, m in list(containers(model)):
            original = type(m)
            try:
                m.__class__ = subclass(Recorded, original)  # type: ignore[arg-type]  # Module's __hash__ is annotated out of line
            except TypeError as e:
                report.append(f"'{path}' is counted as part of its caller: its class {original.__name__} takes no subclass here ({e})")
                continue
            undo.callback(setattr, m, "__class__", original)
            vars(m)["_qsim_recording"] = (current, path)
            undo.callback(vars(m).pop, "_qsim_recording")
        for path, m in model.named_modules():
            if path and _is_leaf(m):
                undo.callback(m.register_forward_pre_hook(_announce(current, path)).remove)
                undo.callback(m.register_forward_hook(_announce(current, ""), prepend=True, always_call=True).remove)
        yield


def _announce(current: _Pass, path: str) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        current.leaf = path

    return hook
