"""Folding of BatchNorm into the convolution or linear layer beside it (docs/numerics.md, section 8)."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from qsim.batch_norm.foldable import Fold, NoLayerBeside, NotFoldable, find_folds
from qsim.batch_norm.frozen import as_batch_norms
from qsim.batch_norm.lone_norms import NAME, before_children, has_layer, reset, unit_layer
from qsim.batch_norm.own_forward import is_torchs_own
from qsim.close_names import close_names
from qsim.graph.execute.simulated import Simulated
from qsim.graph.record.record import record
from qsim.graph.record.tape import Tape
from qsim.loggers.figures import Figures
from qsim.operations.layers import Layer, by_channel
from qsim.pages.markup import Cell, Column, Fact, Line, name_cell, problems, table, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import about
from qsim.runs.arguments import example_calls
from qsim.runs.offloaded import settle_offloaded
from qsim.runs.report_subject import subject_of
from qsim.runs.runnable import cannot_run, check_module, refuse_packed

# From here on the rounding of a float32 input, 2^-24 of it, grows to the size of the normalized signal: the result is noise.
_LARGEST_FACTOR = 2.0**23


@dataclass(frozen=True)
class FoldReport(Report):
    """What `fold_batch_norms` did; `print(report)` shows it, `save` writes a page.

    Attributes
    ----------
    folded : dict of str to str
        Path of each BatchNorm that is now an Identity, with the path of the layer that took it over.
    kept : dict of str to str
        Path of each other BatchNorm (or place of a call of `F.batch_norm`), with the reason: one sentence.
    alone : dict of str to str
        Path of each BatchNorm that is a layer of its own now, a depthwise convolution, with the reason why no other took it over. Where a
        simulation's target has integer kernels for these alone.
    warnings : tuple of str
        What deserves a look although it was no obstacle: one sentence each.
    folds : tuple of (Fold, BatchNorm)
        What was done, in order, with the modules that are gone: for states of the model as it was (`fold_state`).
    biases : tuple of str
        Biases that a simulation rounds to int32 from now on, as it does with those of other layers; BatchNorm's shift was float.

    Examples
    --------
    >>> import tempfile
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2)).eval()
    >>> report = qsim.fold_batch_norms(model, torch.zeros(1, 1, 4, 4))
    >>> report.folded
    {'1': '0'}
    >>> report.save(tempfile.mktemp(".html"))
    """

    folded: dict[str, str] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    warnings: tuple[str, ...] = ()
    folds: tuple[tuple[Fold, _BatchNorm], ...] = field(default=(), repr=False)
    alone: dict[str, str] = field(default_factory=dict)
    biases: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [self._headline()]
        lines += [f"  folded '{name}' into '{layer}'" for name, layer in self.folded.items()]
        lines += [f"  made '{name}' a layer of its own: {reason}" for name, reason in self.alone.items()]
        lines += [f"  kept '{name}': {reason}" for name, reason in self.kept.items()]
        if self.biases:
            lines.append(f"  {self._rounded}")
        return "\n".join([*lines, *(f"  warning: {warning}" for warning in self.warnings)])

    def _headline(self) -> str:
        alone = f", {len(self.alone)} made layers of their own" if self.alone else ""
        return f"BatchNorm: {len(self.folded)} folded{alone}, {len(self.kept)} kept"

    @property
    def _rounded(self) -> str:
        steps = "in steps of two scales' product: outputs move, by a step of their grid mostly"
        return f"{len(self.biases)} biases are int32 from now on, {steps}"

    def figures(self) -> Figures:
        """How many were folded, made layers of their own, and kept."""
        counts = {"folded": self.folded, "alone": self.alone, "kept": self.kept}
        return Figures({f"batch_norm/{name}": float(len(paths)) for name, paths in counts.items()})

    def page(self) -> Page:
        """See `Report.page`."""
        facts: list[Fact] = [("folded", str(len(self.folded))), ("kept", str(len(self.kept)))]
        facts += [("layers of their own", str(len(self.alone)))] if self.alone else []
        lines = [Line([name_cell(name), Cell("folded"), Cell(f"into '{layer}'")]) for name, layer in self.folded.items()]
        lines += [Line([name_cell(name), Cell("a layer of its own"), Cell(reason)]) for name, reason in self.alone.items()]
        lines += [Line([name_cell(name), Cell("kept"), Cell(reason)], severity="warning") for name, reason in self.kept.items()]
        columns = [Column("BatchNorm", wide=True), Column("now"), Column("why", wide=True)]
        told = [*([self._rounded] if self.biases else []), *self.warnings]
        body = tiles(facts) + problems(told) + table("BatchNorms", "In the order of the model.", columns, lines)
        return Page("BatchNorm", self._headline().removeprefix("BatchNorm: "), body, about(self.subject))


def fold_batch_norms(model: nn.Module, example_inputs: Any, *, keep: Collection[str] = ()) -> FoldReport:
    """Fold each BatchNorm into the convolution or linear layer right before it, or right after it, in place.

    Parameters
    ----------
    model : nn.Module, any device, float16/bfloat16/float32/float64
        Runs on the example inputs in eval and in training mode, and is then as it was but for the folding: outputs in eval mode are
        equal to a few ulp, a folded BatchNorm is an `nn.Identity` at the same path (of a subclass that calls its children after it has
        normalized, as timm's do, the children stay, in an `nn.Sequential`; frozen ones that are none by class, `FrozenBatchNorm2d`,
        fold too), training flags are kept. Whatever those flags say,
        the running statistics are folded.
    example_inputs : Tensor, tuple of arguments, dict of keyword arguments, or list of such calls
    keep : collection of str
        Paths of BatchNorms to leave as they are.

    Returns
    -------
    FoldReport
        What was folded into what, and what was kept for which reason.

    Raises
    ------
    ValueError
        If the model fails on the example inputs in eval mode, has lazy modules that never ran, or is a simulation.

    Examples
    --------
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
    >>> fold_batch_norms(model, torch.zeros(2, 3, 8, 8)).folded
    {'1': '0'}

    Notes
    -----
    Jacob et al. 2018, "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", section 3.2.
    Who follows whom is read from the recorded calls, not from the order of the modules.
    """
    if any(isinstance(m, Simulated) for m in model.modules()):
        raise ValueError("qsim.fold_batch_norms: got a simulation, which folds its own: sim.fold_batch_norms()")
    check_module(model, "fold_batch_norms")
    settle_offloaded(model)
    if isinstance(keep, str) or not isinstance(keep, Collection):
        raise TypeError(f"fold_batch_norms: got keep={keep!r}; expected the paths of BatchNorms, such as ['stem.bn']")
    paths = dict(model.named_modules())
    for path in keep:
        if path not in paths:
            near = ", ".join(map(repr, close_names(str(path), paths))) or "see model.named_modules()"
            raise ValueError(f"fold_batch_norms: got {path!r} in keep, which is no module; close to it: {near}")
    as_batch_norms(model, lambda path: path not in keep)
    return fold_recorded(model, *recorded(model, example_inputs, "fold_batch_norms"), keep)


def recorded(model: nn.Module, example_inputs: Any, caller: str) -> tuple[Tape, list[str]]:
    """The recording of a model on its example inputs, and what could not be seen.

    Raises
    ------
    TypeError
        It is no module, returns None, or takes a packed sequence.
    ValueError
        It does not run in eval mode.
    """
    check_module(model, caller)
    calls = example_calls(example_inputs)
    refuse_packed(calls, caller)
    tape, problems = record(model, calls)
    if tape.answers == {type(None)}:
        raise TypeError(
            f"{caller}: the model returned None for the example inputs; expected tensors. Does its forward end without `return`?"
        )
    for number, error in tape.raised.items():
        raise cannot_run(model, calls, number, error, caller) from error
    if not any(call.run == 0 for call in tape.calls):
        raise ValueError(f"{caller}: {problems[0] if problems else 'the model has no forward in Python to look at'}")
    return tape, problems


def fold_recorded(
    model: nn.Module, tape: Tape, problems: Iterable[str], keep: Collection[str] = (), *, alone: Collection[str] = ()
) -> FoldReport:
    """As `fold_batch_norms`, for a model that was recorded already. BatchNorms in `alone` become layers of their own where they fold into
    no other."""
    norms = {path: m for path, m in model.named_modules() if isinstance(m, _BatchNorm)}
    folds, refused = find_folds(model, tape)
    kept = {path: str(reason) for path, reason in refused.items()}
    folded: dict[str, str] = {}
    done: list[tuple[Fold, _BatchNorm]] = []
    for fold in folds:
        try:
            if fold.batch_norm in keep:
                raise NotFoldable(f"'{fold.batch_norm}' is kept as asked")
            apply_fold(model, fold)
            folded[fold.batch_norm] = fold.layer
            done.append((fold, norms[fold.batch_norm]))
        except NotFoldable as reason:
            kept[fold.batch_norm] = str(reason)
    apart: dict[str, str] = {}
    for path, refusal in refused.items():
        if path in alone and isinstance(refusal, NoLayerBeside) and has_layer(refusal.dims):
            try:
                done.append((_set_apart(model, path, *refusal.dims), norms[path]))
                apart[path] = kept.pop(path)
            except NotFoldable as obstacle:
                kept[path] = str(obstacle)
    warnings = (*problems, *_warnings(norms, {*folded, *apart}))
    return FoldReport(folded, kept, warnings, tuple(done), apart, subject=subject_of(model))


def _set_apart(model: nn.Module, path: str, dims: int) -> Fold:
    """Put a layer in the place of a BatchNorm."""
    bn = cast(_BatchNorm, model.get_submodule(path))
    layer = unit_layer(bn, dims)
    _applied(nn.ModuleDict({"layer": layer, "bn": bn}), Fold("bn", "layer", before=False))
    _replace(model, bn, layer)
    return Fold(path, f"{path}.{NAME}", before=False, alone=True)


def fold_state(model: nn.Module, folds: Iterable[tuple[Fold, _BatchNorm]], state: dict[str, Any]) -> None:
    """Fold the BatchNorms in a state dict of the model as it was, so that it fits the model as it is.

    Parameters
    ----------
    model : nn.Module
        After `folds`; not changed.
    state : dict of str to Tensor
        Changed in place. One without entries of BatchNorms that are gone stays as it is.

    Raises
    ------
    NotFoldable
        The state has some of those BatchNorms and not the others or their layers, or statistics that mean nothing.
    """
    layers: dict[str, nn.Module] = {}
    own = [f"{fold.batch_norm}.{name}" for fold, bn in folds for name in bn.state_dict() if "." not in name]
    if not any(key in state for key in own):
        return
    for fold, bn in folds:
        if fold.layer not in layers:
            layer = model.get_submodule(fold.layer)
            layers[fold.layer] = reset(cast(Layer, copy.deepcopy(layer))) if fold.alone else _loaded(fold.layer, layer, state)
        pair = nn.ModuleDict({"layer": layers[fold.layer], "bn": _loaded(fold.batch_norm, bn, state)})
        _applied(pair, Fold("bn", "layer", fold.before))  # the model's own folds were tried
    state.update({f"{path}.{name}": t for path, layer in layers.items() for name, t in layer.state_dict().items()})


def _loaded(path: str, module: nn.Module, state: dict[str, Any]) -> nn.Module:
    """A copy of the module, without its children, that holds its entries of the state, which are taken out."""
    names = [key.removeprefix(f"{path}.") for key in state if key.startswith(f"{path}.")]
    own = {name: state.pop(f"{path}.{name}") for name in names if "." not in name}
    module = copy.deepcopy(module)
    for child, _ in list(module.named_children()):
        delattr(module, child)
    if "bias" not in own and not isinstance(module, _BatchNorm):  # a layer's came with the folding
        module.register_parameter("bias", None)
    try:
        module.load_state_dict(own)
    except RuntimeError as error:
        raise NotFoldable(f"'{path}', which has part in folding BatchNorm, does not load ({error})") from error
    return module


def _warnings(norms: dict[str, _BatchNorm], folded: Collection[str]) -> list[str]:
    training = [f"'{path}'" for path, bn in norms.items() if bn.training and path in folded]
    counts = {path: bn.num_batches_tracked for path, bn in norms.items()}
    untrained = [f"'{path}'" for path, count in counts.items() if count is not None and not count.is_meta and not count.item()]
    found = []
    if training:
        found.append(f"in training mode, yet folded with the running statistics, as eval mode uses them: {', '.join(training)}")
    if untrained:
        found.append(f"num_batches_tracked is 0: the running statistics may still be the initial ones: {', '.join(untrained)}")
    return found


def apply_fold(model: nn.Module, fold: Fold) -> Tensor:
    """Fold one BatchNorm. Returns what each element of the layer's weight was multiplied by, in float64 on the CPU.

    Raises NotFoldable, and changes nothing, where its statistics mean nothing.
    """
    layer = cast(Layer, model.get_submodule(fold.layer))
    if not (is_torchs_own(layer, "forward") and is_torchs_own(layer, "_conv_forward")) and not _folds_on_trial(layer, fold.before):
        raise NotFoldable(f"'{fold.layer}' ({type(layer).__name__}) has a forward of its own, which uses weight and bias in other ways")
    return _applied(model, fold)


def _folds_on_trial(layer: Layer, before: bool) -> bool:
    """Whether a layer with a forward of its own computes what it did with a BatchNorm folded into it: on a copy, in float64, with
    statistics and inputs drawn at random. timm's Conv2dSame, which pads by itself, does."""
    kernel = [] if isinstance(layer, nn.Linear) else [d * (k - 1) + 1 for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    inputs, outputs = (layer.in_features, layer.out_features) if isinstance(layer, nn.Linear) else (layer.in_channels, layer.out_channels)
    bn = getattr(nn, f"BatchNorm{max(len(kernel), 1)}d")(inputs if before else outputs)
    with torch.no_grad(), torch.random.fork_rng([]):
        for t in (bn.weight, bn.bias, bn.running_mean, bn.running_var):
            t.uniform_(0.5, 2.0)
        x = torch.randn(2, inputs, *(2 * size + 3 for size in kernel), dtype=torch.float64)
        pair = copy.deepcopy(nn.ModuleDict({"bn": bn, "layer": layer})).to("cpu", torch.float64).eval()
        first, second = (pair["bn"], pair["layer"]) if before else (pair["layer"], pair["bn"])
        try:
            expected = second(first(x))
            _applied(pair, Fold("bn", "layer", before))
            return torch.allclose(pair["layer"](x), expected, rtol=1e-9, atol=1e-9)
        except (RuntimeError, TypeError, ValueError):
            return False


def _applied(model: nn.Module, fold: Fold) -> Tensor:
    """As `apply_fold`, of a layer that is known to compute with its weight and bias as torch's own do."""
    bn, layer = cast(_BatchNorm, model.get_submodule(fold.batch_norm)), cast(Layer, model.get_submodule(fold.layer))
    g, mean, beta = normalization(fold.batch_norm, bn)
    weight, bias = (_before if fold.before else _after)(layer, g, mean, beta)
    new = {"weight": weight.to(layer.weight.dtype), "bias": bias.to(layer.weight.dtype)}  # the one rounding
    for name, t in new.items():
        if not bool(t.isfinite().all()):
            raise NotFoldable(f"the {name} of '{fold.layer}' with '{fold.batch_norm}' folded into it would not be finite in {t.dtype}")
    with torch.no_grad():
        layer.weight.copy_(new["weight"])
        if layer.bias is None:
            layer.bias = nn.Parameter(new["bias"].to(layer.weight.device), requires_grad=layer.weight.requires_grad)
        else:
            layer.bias.copy_(new["bias"])
    _replace(model, bn)
    return _scaled(torch.ones_like(weight), layer, g, fold.before)


def normalization(name: str, bn: _BatchNorm) -> tuple[Tensor, Tensor, Tensor]:
    """`g = gamma / sqrt(var + eps)`, mean and beta of a BatchNorm in float64; raises NotFoldable where they mean nothing."""
    if cast(Tensor, bn.running_mean).is_meta:
        raise NotFoldable(f"'{name}' is on the meta device: its statistics have no values")
    mean, var = _exact(cast(Tensor, bn.running_mean)), _exact(cast(Tensor, bn.running_var))
    gamma = torch.ones_like(mean) if bn.weight is None else _exact(bn.weight)
    beta = torch.zeros_like(mean) if bn.bias is None else _exact(bn.bias)
    for what, t in (("running_mean", mean), ("running_var", var), ("weight", gamma), ("bias", beta)):
        _refuse(~t.isfinite(), name, f"its {what} is not finite")
    _refuse(var < 0, name, "its running_var is negative")
    _refuse(var + bn.eps == 0, name, "its running_var and eps are both zero")
    g = gamma / (var + bn.eps).sqrt()
    _refuse(g.abs() > _LARGEST_FACTOR, name, f"it would multiply by more than {_LARGEST_FACTOR:.3g} (weight / sqrt(running_var + eps))")
    return g, mean, beta


def _refuse(bad: Tensor, name: str, why: str) -> None:
    if bool(bad.any()):
        channels = bad.nonzero().flatten().tolist()
        raise NotFoldable(f"'{name}' has degenerate statistics: {why} in {len(channels)} of {bad.numel()} channels, first in {channels[0]}")


def _after(layer: Layer, g: Tensor, mean: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of `layer` followed by the normalization: `W' = W g` by output channel, `b' = beta + (b - mean) g`."""
    return _scaled(_exact(layer.weight), layer, g, before=False), beta + (_bias(layer) - mean) * g


def _before(layer: Layer, g: Tensor, mean: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of `layer` preceded by the normalization: `W' = W g` by input channel, `b' = b + W (beta - mean g)`."""
    weight, bias = _exact(layer.weight), _bias(layer)
    view = by_channel(weight, layer)
    bias += (view * (beta - mean * g).view(view.shape[0], 1, -1, 1)).sum((2, 3)).flatten()
    return _scaled(weight, layer, g, before=True), bias


def _scaled(weight: Tensor, layer: Layer, g: Tensor, before: bool) -> Tensor:
    """`weight`, multiplied in place by `g` along its output channels, or its input channels."""
    view = by_channel(weight, layer)
    view *= g.view(view.shape[0], 1, -1, 1) if before else g.view(view.shape[0], -1, 1, 1)
    return weight


def _bias(layer: Layer) -> Tensor:
    channels = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return torch.zeros(channels, dtype=torch.float64) if layer.bias is None else _exact(layer.bias)


def _exact(t: Tensor) -> Tensor:
    """A copy in float64, on the CPU: not every device has that type."""
    return t.detach().to("cpu", torch.float64, copy=True, memory_format=torch.contiguous_format)


def _replace(model: nn.Module, bn: _BatchNorm, layer: nn.Module | None = None) -> None:
    """An Identity wherever `bn` is registered, or its layer and what it called behind the normalization (`is_followed_by_children`)."""
    rest = before_children(bn, layer)
    for path, module in list(model.named_modules(remove_duplicate=False)):
        if module is bn:
            parent, _, child = path.rpartition(".")
            setattr(model.get_submodule(parent), child, rest)
