"""How long products take in ONNX Runtime on this machine: each exported and timed by itself, with every pair of widths."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from qsim.analysis.bit_choices import Bits
from qsim.analysis.bit_operations import Product, Sized
from qsim.config.config import Config
from qsim.deploy.export_model import check_installed, export
from qsim.errors import ExportError
from qsim.onnx.export_options import Options
from qsim.progress import progress
from qsim.simulation.calibration import calibrate
from qsim.simulation.simulation import Simulation

_ROUNDS = 20
_STORED = (4, 8, 16)  # the integers of ONNX that hold what is quantized: kernels know no others

Pair = tuple[Bits, Bits]  # of both operands


class Latencies:
    """Times of the products of a simulation, with each pair of candidates.

    A product is exported for ONNX Runtime with random numbers of the sizes that it has in the first example call, once for each pair of
    integers that may hold its operands; its result has the bits of its first operand that is an activation. All of them run by turns. A
    time is the least of 20 runs, of the kernels by ONNX Runtime's profiler: with what converts between integers and floats there, but not
    with the first QuantizeLinear of an input and the last DequantizeLinear, which in a model its neighbours have. Attention that is one
    operation runs in float.

    Attributes
    ----------
    total : float
        Seconds of all products in float.
    """

    def __init__(self, sim: Simulation, products: Sequence[Product], candidates: Sequence[Bits], *, show: bool) -> None:
        check_installed()
        self._sim = sim
        stored = list(dict.fromkeys([*map(_stored, candidates), "float"]))
        alike = {self._kind(product): product for product in products if product.args}
        self._seconds: dict[str, dict[Pair, float]] = {}
        for kind, product in progress(alike.items(), total=len(alike), title="latency", unit="product", show=show):
            left, right = ([*stored] if key is not None and not product.is_attention else ["float"] for key in product.operands)
            self._seconds[kind] = self._measured(product, [(a, b) for a in left for b in right])
        self.total = sum(self.of(product, "float", "float") for product in products)

    def of(self, product: Product, left: Bits, right: Bits) -> float:
        """Seconds with these bits of its operands."""
        if not product.args:  # counted with the other product of its operation
            return 0.0
        known = self._seconds[self._kind(product)]
        return known["float", "float"] if product.is_attention else known[_stored(left), _stored(right)]

    def _kind(self, product: Product) -> str:
        """What products have in common that take the same time: the call, and the specs of the operands but for their bits."""
        planned = self._sim.decisions.quantizers
        specs = [key and (planned[key].role, replace(planned[key].spec, bits=8)) for key in product.operands]
        return repr((product.name, product.args, specs))

    def _measured(self, product: Product, pairs: Sequence[Pair]) -> dict[Pair, float]:
        from qsim.onnx import sessions

        planned = self._sim.decisions.quantizers
        weighs = product.name.startswith(("conv", "linear"))
        constant = [weighs and i == 1 if key is None else planned[key].role == "weight" for i, key in enumerate(product.operands)]
        alone = _Alone(product, constant).eval()
        with tempfile.TemporaryDirectory() as folder:
            opened = []
            for i, pair in enumerate(pairs):
                path = Path(folder) / f"{i}.onnx"
                quantized = self._write(alone, self._config(product, pair, constant), path)
                opened.append((sessions.session(path, profile=path.with_suffix("")), quantized))
            feeds = [{given.name: x.numpy() for given, x in zip(s.get_inputs(), alone.inputs, strict=True)} for s, _ in opened]
            for _ in range(_ROUNDS):
                for (session, _quantized), given in zip(opened, feeds, strict=True):
                    session.run(None, given)
            return {pair: _least(Path(session.end_profiling()), *ends) for pair, (session, ends) in zip(pairs, opened, strict=True)}

    def _config(self, product: Product, pair: Pair, constant: Sequence[bool]) -> Config:
        planned = self._sim.decisions.quantizers
        specs = [
            None if key is None or isinstance(bits, str) else replace(planned[key].spec, bits=bits)
            for key, bits in zip(product.operands, pair, strict=True)
        ]
        weight = next((spec for spec, held in zip(specs, constant, strict=True) if held), None)
        inputs = [spec for spec, held in zip(specs, constant, strict=True) if not held]
        config = Config(weight=weight, activation=next((spec for spec in inputs if spec is not None), None), target="onnxruntime")
        for i, spec in enumerate(inputs if len(inputs) > 1 else ()):
            config = config.override(f"input[[]{i}]", activation=spec)
        return config

    def _write(self, alone: _Alone, config: Config, path: Path) -> tuple[int, bool]:
        """The product as a file; how many of its inputs are quantized, and whether its result is."""
        made = type(self._sim)(alone, tuple(alone.inputs), config)
        calibrate(made, [tuple(alone.inputs)], None, max_batches=None, progress=False)
        try:
            export(made, path, "onnxruntime", Options(dynamic_batch=False), verify=False)
        except ExportError as error:
            raise ValueError(
                f"QuantSim.search_bits: a latency is that in ONNX Runtime, which cannot express {alone.name} with these candidates: {error}"
            ) from error
        activations = [key for key, decided in made.decisions.quantizers.items() if decided.parameter is None]
        inputs = sum(key.startswith("input") for key in activations)
        return inputs, len(activations) > inputs


class _Alone(nn.Module):
    """One product of random numbers; operands that are `constant`, and what is added, are parameters."""

    def __init__(self, product: Product, constant: Sequence[bool]) -> None:
        super().__init__()
        self.name = product.name
        self._args, generator = product.args, torch.Generator().manual_seed(0)
        made = [torch.randn(leaf.shape, generator=generator) for leaf in tree_leaves(product.args) if isinstance(leaf, Sized)]
        self._given = [product.first + i for i, held in enumerate(constant) if not held]
        self.inputs = [made[at] for at in self._given]
        self._count = len(made)
        for at in set(range(self._count)).difference(self._given):
            self.register_parameter(f"held{at}", nn.Parameter(made[at]))

    def forward(self, *inputs: Tensor) -> Any:
        given = dict(zip(self._given, inputs, strict=True))
        tensors = iter([given[at] if at in given else getattr(self, f"held{at}") for at in range(self._count)])
        call = getattr(F, self.name, None) or getattr(torch, self.name)
        return call(*tree_map_only(Sized, lambda _: next(tensors), self._args))


def _stored(bits: Bits) -> Bits:
    """The width of the integers that hold so many bits."""
    return bits if isinstance(bits, str) else next(width for width in _STORED if bits <= width)


def _least(profile: Path, inputs: int, result: bool) -> float:
    """Seconds of the fastest run."""
    events = [event for event in json.loads(profile.read_bytes()) if event.get("cat") == "Node" and event["name"].endswith("_kernel_time")]
    size = len(events) // _ROUNDS
    return min(_seconds(events[at * size : (at + 1) * size], inputs, result) for at in range(_ROUNDS))


def _seconds(events: Sequence[Any], inputs: int, result: bool) -> float:
    """Of one run's kernels, without those that its neighbours have."""
    names = [event["args"]["op_name"] for event in events]
    first = [at for at, name in enumerate(names) if name == "QuantizeLinear"][:inputs]
    last = [at for at, name in enumerate(names) if name == "DequantizeLinear"][-1:] if result else []
    return 1e-6 * sum(float(event["dur"]) for at, event in enumerate(events) if at not in (*first, *last))
