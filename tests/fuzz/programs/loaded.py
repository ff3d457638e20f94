"""A program as a model that can be called, and the calls that are made of it."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from .ir import FORMS, Program, Test, all_statements
from .source import source

_BATCH = {"rows": 6, "seq": 4, "img": 2}
_BIG_BATCH = {"rows": 2600, "seq": 440, "img": 110}  # more than 20,000 elements: big enough for every saving


_serial = itertools.count()


class _Where:
    """The device on which models run in this process."""

    device = torch.device("cpu")


def device() -> torch.device:
    """Where models run in this process."""
    return _Where.device


def use_device(name: str) -> None:
    """Run models on a device from here on. On a GPU with what float32 says: no TF32, and the same sums each time."""
    _Where.device = torch.device(name)
    if _Where.device.type == "cuda":
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cudnn.deterministic = True


@dataclass(frozen=True)
class Call:
    """Arguments of the model. `recorded`: it takes the path of the example, as far as flags and data decide."""

    name: str
    tensors: dict[str, Tensor | None]
    flags: dict[str, Any]
    recorded: bool


@dataclass
class Loaded:
    """A program's Python module while its file exists."""

    program: Program
    module: Any

    def model(self, dtype: torch.dtype = torch.float32) -> nn.Module:
        """The model in eval mode: the same weights at every call."""
        torch.manual_seed(self.program.seed)
        made: nn.Module = self.module.Model()
        for m in made.modules():
            if isinstance(m, nn.BatchNorm1d | nn.BatchNorm2d):
                for tensor, draw in (
                    (m.running_mean, torch.randn),
                    (m.running_var, torch.rand),
                    (m.weight, torch.rand),
                    (m.bias, torch.randn),
                ):
                    tensor.data.copy_(draw(tensor.shape) * 0.5 + (0.0 if draw is torch.randn else 0.6))
                m.num_batches_tracked.fill_(10)
        self.module.hook_model(made)
        return made.to(_Where.device, dtype).eval()

    def hook(self, model: nn.Module) -> None:
        """Put the hooks on that come after the simulation was made."""
        self.module.hook_simulation(model)

    @contextlib.contextmanager
    def recomputing(self) -> Iterator[None]:
        """Within the context what runs under a checkpoint keeps its results, which torch then has to compute again."""

        def keeping(function: Callable[..., Any], *args: Any, **options: Any) -> Any:
            return checkpoint(lambda *given: tree_map_only(Tensor, _kept, function(*given)), *args, **options)

        within = patch("torch.utils.checkpoint.checkpoint", keeping)  # of `checkpoint_sequential`
        with patch.object(self.module, "checkpoint", keeping), within:
            yield

    @property
    def log(self) -> list[Tensor]:
        """What hooks noted."""
        found: list[Tensor] = getattr(self.module, "LOG", [])
        return found

    def arguments(self, call: Call, dtype: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Fresh tensors, packed as the model wants them."""
        copies = {name: t if t is None else t.to(dtype).clone() if t.is_floating_point() else t.clone() for name, t in call.tensors.items()}
        packed = self.module.arguments(**copies)
        return (packed, dict(call.flags)) if isinstance(packed, tuple) else ((), {**packed, **call.flags})

    def example(self, dtype: torch.dtype) -> Any:
        """As `QuantSim` takes it."""
        args, kwargs = self.arguments(self.calls()[0], dtype)
        return args or kwargs

    def calls(self) -> list[Call]:
        """The example first, then the other calibration data, then other lengths, flags and paths."""
        p = self.program
        batch = (_BIG_BATCH if p.big else _BATCH)[p.form]
        shape = FORMS[p.form][1]
        first, second = (self._tensors(i, (batch, *shape)) for i in (1, 2))
        longer = (batch + 1, *((shape[0] + 2, *shape[1:]) if p.form == "seq" else shape))
        found = [Call("example", first, {}, True), Call("second", second, {}, True)]
        found.append(Call("other lengths", self._tensors(3, longer), {}, True))
        found += [Call(f"{flag.name}={v}", first, {flag.name: v}, False) for flag in p.flags for v in flag.others]
        if len(p.flags) > 1:
            found.append(Call("all flags", second, {flag.name: flag.others[0] for flag in p.flags}, False))
        asked = {s.test.text for s in all_statements(p) if isinstance(test := getattr(s, "test", None), Test) and test.kind == "data"}
        for text, factor in (("{0}.mean() > 0", -1.0), ("{0}.abs().amax() > 60.0", 300.0)):
            if text in asked:
                scaled = {name: t * factor if t is not None and t.is_floating_point() else t for name, t in first.items()}
                found.append(Call(f"data times {factor}", scaled, {}, False))
        if p.returns.endswith(" with loss"):
            found.append(Call("no labels", {**second, "labels": None}, {}, False))
        return found

    def _tensors(self, index: int, shape: tuple[int, ...]) -> dict[str, Tensor | None]:
        generator = torch.Generator().manual_seed(self.program.seed * 10 + index)
        x, z = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
        labels = None
        if self.program.returns.endswith(" with loss"):
            rows = shape[0] * shape[1] if self.program.form == "seq" else shape[0]
            labels = torch.randint(0, 8, (rows,), generator=generator)
        given = {"x": x + 0.3, "z": z, "labels": labels}
        return {name: None if t is None else t.to(_Where.device) for name, t in given.items()}


def _kept(t: Tensor) -> Tensor:
    return t.clamp(-torch.inf, torch.inf) if t.is_floating_point() else t


@contextlib.contextmanager
def loaded(program: Program) -> Iterator[Loaded]:
    """Write the program to a file, as a user's would be, and import it until the body ends."""
    name = f"fuzzed_program_{program.seed}_{next(_serial)}"  # an oracle may load a variant beside it
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(source(program))
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield Loaded(program, module)
        finally:
            del sys.modules[name]
