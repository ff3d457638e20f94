"""The quantizers of a simulation."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import chain
from operator import attrgetter
from typing import Any, NoReturn, TypeVar

import torch
from torch import Tensor, nn

from qsim.close_names import close_names
from qsim.graph.execute.moved import moved_on, tied_names, untied
from qsim.graph.plan.actions import Decisions
from qsim.options import check_patterns
from qsim.quantizers.observer import encoding_of_range
from qsim.quantizers.quantizer import Quantizer
from qsim.warning import warn

_Value = TypeVar("_Value")

OPERATION_FORMATS = (
    "int",
    "float16",
    "bfloat16",
    "float32",
)  # what `operation_formats` holds are their positions: state dicts depend on the order


class ByKey(dict[str, _Value]):
    """A dict by the keys of quantizers, whose error of one that it lacks has those that are close.

    Examples
    --------
    >>> ByKey({"conv1.weight": 1, "conv1.output": 2})["conv1"]
    Traceback (most recent call last):
        ...
    KeyError: "QuantSim: no quantizer 'conv1' here; close to it: 'conv1.weight', 'conv1.output'"
    """

    def __missing__(self, key: str) -> NoReturn:
        close = [own for own in self if own.startswith(f"{key}.")] or close_names(str(key), self)
        raise KeyError(f"QuantSim: no quantizer {key!r} here; close to it: {', '.join(map(repr, close[:4])) or 'see sim.quantizers()'}")


class QuantizerBank(nn.Module):
    """All quantizers of a simulation, flat: containers refer to them without owning them.

    Attributes
    ----------
    operation_formats : Tensor, uint8, shape [operations]
        What each operation of the simulation computes in, as a position in `OPERATION_FORMATS`.
    restored_weights : Tensor, uint8, shape [parameters that have a quantizer + 1]
        What restoration did to each, and last to any others, as bits: see `RestoredWeights`.
    restored_as : Tensor, int64, shape [parameters that have a quantizer, 4]
        The fingerprint of each when it did: a scale that was found for one weight is not another's.
    observed_before : Tensor, uint8, shape []
        Of a state dict, 1 where parameters are others than those with which quantizers observed what they hold: see `ObservedWith`.
    """

    operation_formats: Tensor
    restored_weights: Tensor
    restored_as: Tensor
    observed_before: Tensor

    def __init__(self, model: nn.Module, decisions: Decisions, known: Mapping[str, Quantizer]) -> None:
        super().__init__()
        planned, devices = decisions.quantizers, decisions.devices
        self._keys, self._operations = list(planned), list(decisions.operations)
        self._paths = {key: decided.parameter for key, decided in planned.items() if decided.parameter is not None}
        self._shapes = {key: attrgetter(parameter)(model).shape for key, parameter in self._paths.items()}
        self._tied = tied_names(model, self._paths.values())
        self._gates = [key for key, decided in planned.items() if decided.role == "gate"]
        on = next(chain((t.device for t in chain(model.parameters(), model.buffers())), devices.values()), torch.device("cpu"))
        for key, decided in planned.items():
            parameter: Tensor | None = attrgetter(decided.parameter)(model) if decided.parameter else None
            quantizer = known.get(key) or Quantizer(decided.spec, None if parameter is None else parameter.shape, key)
            quantizer.batched = parameter is None
            if decided.range is not None:
                low, high = map(torch.tensor, decided.range)
                quantizer.set_encoding(encoding_of_range(low, high, decided.spec))
            # nn.Module allows no dots in names; "/" keeps them readable in state dicts
            self._modules[key.replace(".", "/")] = quantizer.to(devices.get(key, on) if parameter is None else parameter.device)
        self.register_buffer("operation_formats", torch.zeros(len(self._operations), dtype=torch.uint8, device=on))
        self.register_buffer("restored_weights", torch.zeros(len(self._paths) + 1, dtype=torch.uint8, device=on))
        self.register_buffer("restored_as", torch.zeros(len(self._paths), 4, dtype=torch.int64, device=on))
        self.register_buffer("observed_before", torch.zeros((), dtype=torch.uint8, device=on))

    @property
    def formats(self) -> dict[str, str]:
        """The float formats of the operations that fall back, by name."""
        return {name: OPERATION_FORMATS[code] for name, code in zip(self._operations, self.operation_formats.tolist(), strict=True) if code}

    @formats.setter
    def formats(self, formats: Mapping[str, str]) -> None:
        codes = [OPERATION_FORMATS.index(formats.get(name, "int")) for name in self._operations]
        self.operation_formats.copy_(torch.tensor(codes, dtype=torch.uint8))

    @property
    def restored(self) -> dict[str, int]:
        """What restoration did, by key; under "" to parameters that have no quantizer."""
        if self.restored_weights.is_meta:
            return {}
        return {key: did for key, did in zip([*self._paths, ""], self.restored_weights.tolist(), strict=True) if did}

    @restored.setter
    def restored(self, did: Mapping[str, int]) -> None:
        self.restored_weights.copy_(torch.tensor([did.get(key, 0) for key in (*self._paths, "")], dtype=torch.uint8))

    @property
    def fingerprints(self) -> dict[str, tuple[int, ...]]:
        """`restored_as`, by key."""
        return {key: tuple(row) for key, row in zip(self._paths, self.restored_as.tolist(), strict=True)}

    @fingerprints.setter
    def fingerprints(self, found: Mapping[str, tuple[int, ...]]) -> None:
        rows = [found.get(key, (0,) * 4) for key in self._paths]
        self.restored_as.copy_(torch.tensor(rows, dtype=torch.int64).view(-1, 4))

    def path_of(self, key: str) -> str:
        """The parameter that a quantizer quantizes, by its name in the model."""
        return self._paths[key]

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.setdefault(f"{prefix}operation_formats", self.operation_formats)  # states from before there were fallbacks
        for name in ("restored_weights", "restored_as"):  # and from before it was kept
            state_dict.setdefault(f"{prefix}{name}", self._buffers[name])
        state_dict.setdefault(f"{prefix}observed_before", torch.zeros_like(self.observed_before))
        self._keep_gates(state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _keep_gates(self, state_dict: dict[str, Any], prefix: str) -> None:
        """Add the gates' own entries to a state from before gates were quantized: their ranges are known without data."""
        names = [key.replace(".", "/") for key in self._gates]
        missing = [name for name in names if not any(entry.startswith(f"{prefix}{name}.") for entry in state_dict)]
        if missing and any(entry.startswith(f"{prefix}{name}.") for name in self._modules for entry in state_dict):
            for name in missing:
                state_dict.update({f"{prefix}{name}.{entry}": tensor for entry, tensor in self._modules[name].state_dict().items()})  # type: ignore[union-attr]
            shown = ", ".join(repr(name.replace("/", ".")) for name in missing[:3]) + (", ..." if len(missing) > 3 else "")
            warn(
                f"QuantSim: the state is of a simulation whose gates were in float; {len(missing)} of this one keep the ranges that they "
                f"have ({shown}), so results differ a little. As they were: a profile with gates=(), see docs/targets.md"
            )

    def train(self, mode: bool = True) -> QuantizerBank:
        """Of the bank alone: a quantizer follows the container where it stands, which may be one that the model keeps in eval mode."""
        self.training = mode
        return self

    def items(self) -> Iterable[tuple[str, Quantizer]]:
        """The quantizers by their names as modules."""
        return self._modules.items()  # type: ignore[return-value]

    def by_key(self) -> dict[str, Quantizer]:
        return ByKey(zip(self._keys, self._modules.values(), strict=True))  # type: ignore[arg-type]

    def weights(self, model: nn.Module) -> dict[str, Tensor]:
        """The parameters of `model` that have a quantizer, by its key; ValueError where one is not as it was when it was simulated."""
        found = {}
        for key, path in self._paths.items():
            try:
                found[key] = weight = attrgetter(path)(model)
            except AttributeError:
                raise self._changed(f"the model has no {path!r} any more") from None
            if weight.shape != self._shapes[key]:
                raise self._changed(f"{path!r} has the shape {tuple(weight.shape)} now, and had {tuple(self._shapes[key])}")
            if moved := moved_on(model, path) or untied(model, path, self._tied.get(path, ())):
                raise self._changed(moved)
        return found

    def _changed(self, what: str) -> ValueError:
        return ValueError(f"QuantSim: {what}: the model was changed after it was simulated. Change it first, then make a simulation of it")

    def matching(self, patterns: Sequence[str]) -> list[Quantizer]:
        """The quantizers whose key, or what comes before its last dot, a glob matches; ValueError for a glob that matches nothing."""
        check_patterns("QuantSim", patterns)
        found, quantizers = {}, self.by_key()
        for pattern in patterns:
            keys = [key for key in quantizers if key == pattern or any(fnmatchcase(n, pattern) for n in (key, key.rpartition(".")[0]))]
            if not keys:
                close = ", ".join(map(repr, close_names(pattern, quantizers))) or "see sim.quantizers()"
                raise ValueError(f"QuantSim: no quantizer matches {pattern!r}; close to it: {close}")
            found.update({key: quantizers[key] for key in keys})
        return list(found.values())
