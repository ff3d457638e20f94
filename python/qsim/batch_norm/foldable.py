"""Which BatchNorm is folded into which layer: decided here from the recorded graph, with the reason for every other. Numbers alone are
refused later, where they are computed (`absorb`)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from qsim.batch_norm.absorb import NotFoldable
from qsim.batch_norm.own_forward import is_a_product, is_followed_by_children, is_torchs_own
from qsim.graph.record.tape import Origin, Slot, Step, Tape
from qsim.graph.record.uses import Uses, computed_anew, mode, owner, reading
from qsim.operations.functions import name_of
from qsim.operations.layers import DIMS, LAYERS, TRANSPOSED, Layer

T = TypeVar("T")


class NoLayerBeside(NotFoldable):
    """A BatchNorm that could be folded, if there were a layer for it.

    Attributes
    ----------
    dims : set of int
        How many dimensions what it normalizes has.
    """

    def __init__(self, reason: str, dims: set[int]) -> None:
        super().__init__(reason)
        self.dims = dims


@dataclass(frozen=True)
class Fold:
    """One BatchNorm and the layer that can take it over, by path."""

    batch_norm: str
    layer: str
    before: bool  # the BatchNorm runs before the layer, not after it
    alone: bool = False  # the layer is one of its own, in its place: see `qsim.batch_norm.lone_norms`


def find_folds(
    model: nn.Module, tape: Tape, *, keep: Collection[str] = (), trained: bool = False
) -> tuple[list[Fold], dict[str, NotFoldable]]:
    """All possible folds, in the order of the calls, and the reason for every other BatchNorm by its name. Those in `keep` stay; of a
    model that was `trained` as a simulation, also those before a layer."""
    graph = _Graph(model, tape)
    steps: dict[str, list[Step]] = defaultdict(list)
    for step in tape.steps:
        if step.kind == "batch_norm":
            module = owner(step)
            steps[module if isinstance(graph.modules[module], _BatchNorm) else step.name].append(step)
    uncalled = [path for path, m in graph.modules.items() if isinstance(m, _BatchNorm) and path not in steps]
    folds: list[Fold] = []
    kept: dict[str, NotFoldable] = {}
    for name in (*steps, *uncalled):
        try:
            fold = graph.fold(name, steps[name])
            if name in keep:
                raise NotFoldable(f"'{name}' is kept as asked")
            if trained and fold.before:
                raise NotFoldable(f"'{name}' runs before '{fold.layer}': its result is quantized, as it was trained")
            _check_forward(fold, cast(Layer, graph.modules[fold.layer]))
            folds.append(fold)
        except NotFoldable as reason:
            kept[name] = reason
    return folds, kept


class _Graph:
    """The model's modules and tensors with the steps that use them."""

    def __init__(self, model: nn.Module, tape: Tape) -> None:
        self.tape, self.uses = tape, Uses(model, tape)
        self.modules, self.products = self.uses.modules, self.uses.products

    def fold(self, name: str, steps: list[Step]) -> Fold:
        self._check_batch_norm(name, steps)
        try:
            return Fold(name, self._layer_before(name, steps), before=False)
        except NotFoldable as reason:
            try:
                return Fold(name, self._layer_after(name, steps), before=True)
            except NotFoldable as other:
                # Of two reasons, the one about a neighbour that is a layer at all.
                only_after = not any(_producer(s) for s in steps) and any(self._consumer(s) for s in steps)
                raise NoLayerBeside(str(other if only_after else reason), {len(_input(step.shapes)) for step in steps}) from None

    def _check_batch_norm(self, name: str, steps: list[Step]) -> None:
        bn = self.modules.get(name)
        if not isinstance(bn, _BatchNorm):
            raise NotFoldable(f"'{name}' is a call of F.batch_norm, not a module that could be taken out of the model")
        if not is_torchs_own(bn, "forward") and not is_followed_by_children(bn, len(_input(steps[0].shapes)) if steps else 0):
            raise NotFoldable(
                f"'{name}' ({type(bn).__name__}) has a forward of its own, which does something else than normalize, then call its children"
            )
        if parametrize.is_parametrized(bn):
            raise NotFoldable(f"'{name}' is parametrized: its weight or bias is computed anew in each call")
        self._check_module(name)
        if bn.running_mean is None or bn.running_var is None:
            raise NotFoldable(f"'{name}' has no running statistics (track_running_stats=False): it normalizes each batch by its own")
        if any(s.options.get("training", s.options.get(5)) for s in steps if s.run == 0):
            raise NotFoldable(f"'{name}' normalizes each batch by its own statistics in eval mode too")

    def _check_module(self, name: str) -> None:
        """Both partners of a fold are called once, unobserved, with parameters that nobody else uses."""
        if (why := self.uses.obstacle(name)) is not None:
            raise NotFoldable(why)

    def _layer_before(self, name: str, steps: list[Step]) -> str:
        for step in steps:
            layer = _producer(step)
            if layer is None:
                raise NotFoldable(f"'{name}' reads {_sources(step)}, not the result of a convolution or linear layer as it is{mode(step)}")
            for reader in self.tape.readers(layer):
                if reader.step is not step:
                    raise NotFoldable(f"the output of '{layer.name}' goes to '{name}' and is also {reading(reader.step)}")
            self._check_layer(layer, len(_input(step.shapes)), name)
        producers = [_producer(step) for step in steps]
        layer_path = _agreed(name, producers)
        if any(owner(step) == layer_path and step not in producers for step in self.products):
            raise NotFoldable(f"'{layer_path}' also runs without '{name}' behind it")
        return layer_path

    def _consumer(self, step: Step) -> Step | None:
        """The convolution or linear layer that reads a BatchNorm's output, if nothing else does."""
        readers = self.tape.readers(step)
        if len(readers) != 1 or readers[0].step is None or readers[0].slot not in (0, "input"):
            return None
        return readers[0].step if name_of(readers[0].step.func) in DIMS else None

    def _layer_after(self, name: str, steps: list[Step]) -> str:
        for step in steps:
            layer = self._consumer(step)
            if layer is None:
                raise NotFoldable(f"the output of '{name}' is not read by one convolution or linear layer alone{mode(step)}")
            _check_padding(name, layer.name, self._check_layer(layer, len(_input(layer.shapes)), name))
            if not _is_result(_input(layer.operands)):
                raise NotFoldable(f"'{layer.name}' reads '{name}' through a reshape, dropout or the like{mode(step)}")
            if any(map(self._is_written, _input(step.operands))):
                raise NotFoldable(
                    f"what '{name}' reads is written to in place, and '{layer.name}' may only see what it held before{mode(step)}"
                )
        consumers = [self._consumer(step) for step in steps]
        layer_path = _agreed(name, consumers)
        if any(owner(step) == layer_path and step not in consumers for step in self.products):
            raise NotFoldable(f"'{layer_path}' also runs without '{name}' before it")
        return layer_path

    def _is_written(self, origin: Origin) -> bool:
        """Whether something writes into a tensor from there. An Identity would hand that on, where a BatchNorm made a tensor of its own."""
        return origin.kind == "other" or (origin.source, origin.output) in self.tape.rewritten or origin.source in self.tape.written

    def _check_layer(self, step: Step, dims: int, batch_norm: str) -> Layer:
        name, func = owner(step), name_of(step.func)
        layer = self.modules.get(name)  # none where a recurrent layer is written out
        if not isinstance(layer, LAYERS):
            raise NotFoldable(f"'{step.name}' beside '{batch_norm}' is a function call, not a layer that could hold the new bias")
        if (own := computed_anew(step)) is not None:
            raise NotFoldable(f"the {own} of '{name}' is computed anew in each call (a parametrization, weight_norm or the like)")
        self._check_module(name)
        if dims != DIMS[func]:
            raise NotFoldable(f"'{batch_norm}' normalizes axis 1, which '{name}' with {dims} dimensions does not have its channels on")
        return layer


def _check_forward(fold: Fold, layer: Layer) -> None:
    """Tried last, since it takes longest."""
    own = not (is_torchs_own(layer, "forward") and is_torchs_own(layer, "_conv_forward"))
    if own and not is_a_product(layer, before=fold.before):
        raise NotFoldable(f"'{fold.layer}' ({type(layer).__name__}) has a forward of its own, which uses weight and bias in other ways")


def _check_padding(batch_norm: str, name: str, layer: Layer) -> None:
    """What BatchNorm adds before a layer is a constant behind it only where every output sees every tap of the kernel."""
    if isinstance(layer, nn.Linear):
        return
    pointwise = all(k == 1 for k in layer.kernel_size)
    if isinstance(layer, TRANSPOSED):
        if not pointwise or any(s != 1 for s in layer.stride) or any((*layer.padding, *layer.output_padding)):
            raise NotFoldable(
                f"'{batch_norm}' runs before '{name}', a transposed convolution: not every output sees all of its taps, "
                f"so that what '{batch_norm}' adds is no constant behind it"
            )
        return
    pads = not pointwise if layer.padding == "same" else layer.padding != "valid" and any(layer.padding)
    if pads and layer.padding_mode == "zeros":
        raise NotFoldable(
            f"'{batch_norm}' runs before '{name}', which pads with zeros (padding={layer.padding!r}): "
            f"what '{batch_norm}' adds is missing there, so that it is no constant behind it"
        )
    if pads:
        raise NotFoldable(f"'{name}' pads what it gets from '{batch_norm}' (padding_mode='{layer.padding_mode}') before it convolves")


def _input(values: Mapping[Slot, T]) -> T:
    """Of the operands of a BatchNorm, convolution or linear layer: what it computes on."""
    return values[0] if 0 in values else values["input"]


def _producer(step: Step) -> Step | None:
    """The convolution or linear layer whose result, as it is, a BatchNorm reads."""
    origins = step.operands.get(0, step.operands.get("input", frozenset()))  # nothing of a tensor without elements
    if not _is_result(origins):
        return None
    (origin,) = origins
    source: Step = origin.source
    return source if name_of(source.func) in DIMS else None


def _is_result(origins: frozenset[Origin]) -> bool:
    """One result of one step, untouched since."""
    return len(origins) == 1 and all(o.kind == "step" and o.direct for o in origins)


def _agreed(name: str, found: list[Step | None]) -> str:
    layers = sorted({owner(step) for step in found if step})
    if len(layers) != 1:
        raise NotFoldable(f"'{name}' belongs to '{layers[0]}' in one mode and to '{layers[1]}' in the other")
    return layers[0]


def _sources(step: Step) -> str:
    origins = _input(step.operands)
    names = sorted({f"'{o.source.name}'" if isinstance(o.source, Step) else f"a model {o.kind}" for o in origins})
    return " and ".join(names) + ("" if all(o.direct for o in origins) else " through a reshape, dropout or the like")
