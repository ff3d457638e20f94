"""`qsim.quantize_onnx`: a float ONNX model and data, a Q/DQ model, verified."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir
import torch

from qsim.call_fit import tells_arguments
from qsim.close_names import close_names
from qsim.config.config import Config
from qsim.config.described import described
from qsim.config.named import config_of
from qsim.config.override import SiteInfo
from qsim.config.presets import int8
from qsim.deploy.verification import IN_FLOAT, Verification
from qsim.deploy.verification_page import float_table, verification_figures, verification_table
from qsim.deploy.verify import verify
from qsim.loggers.figures import Figures
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec
from qsim.onnx.file import LARGE, write
from qsim.onnx.lint import lint
from qsim.onnx.model import size_of
from qsim.onnx.sessions import entries, session
from qsim.onnx_ptq.observation import observe
from qsim.onnx_ptq.prepare import prepared
from qsim.onnx_ptq.quantized_values import QuantizedValues, place
from qsim.onnx_ptq.write import Writer
from qsim.operations.onnxruntime import INTEGER_KERNELS
from qsim.options import shown
from qsim.pages.markup import Fact, problems, tiles
from qsim.pages.page import Page
from qsim.pages.report import Report
from qsim.pages.subject import Subject, about
from qsim.quantizers.observer import Observer, encoding_of_range
from qsim.quantizers.weights import search_encodings
from qsim.stages import Stages, seconds_text
from qsim.table import counted
from qsim.version import VERSION

ONNX_TARGETS = ("onnxruntime",)
_CALLER = "qsim.quantize_onnx"
_BITS = 8  # of ONNX Runtime's integer kernels


@dataclass(frozen=True)
class OnnxQuantized(Report):
    """What `quantize_onnx` wrote. ``print`` tells all of it, `save` writes a page.

    Attributes
    ----------
    path : Path
        The model.
    files : dict of Path to int
        What was written, and its bytes.
    activations, weights, biases : int
        Tensors that are quantized: by scales from the data; constants; biases as int32.
    seconds : dict of str to float
    notes : list of str
        What was met, and what stays in float.
    lint : dict of str to str
        Operations that will run in float though there is an integer kernel for them: why.
    session_options : dict of str to str
        Entries for `onnxruntime.SessionOptions.add_session_config_entry`, by which this CPU computes the integers of the file.
    verification : Verification
        The model beside the float one, on the data.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> folder, data = tempfile.mkdtemp(), [{"x": np.random.default_rng(0).normal(size=(64, 8)).astype("float32")}]
    >>> program = torch.onnx.export(
    ...     torch.nn.Linear(8, 4).eval(), (torch.ones(64, 8),), f"{folder}/float.onnx", dynamo=True, verbose=False, input_names=["x"]
    ... )
    >>> done = quantize_onnx(f"{folder}/float.onnx", data, f"{folder}/int8.onnx", progress=False)
    >>> done.worst > 30, done.path in done.files
    (True, True)
    >>> done.save(f"{folder}/report.html")
    """

    path: Path
    files: dict[Path, int]
    activations: int
    weights: int
    biases: int
    seconds: dict[str, float]
    notes: list[str]
    lint: dict[str, str]
    session_options: dict[str, str]
    verification: Verification

    @property
    def worst(self) -> float:
        """The smallest SQNR of an output beside the float model, in dB."""
        beside = [d.sqnr for (mine, _), outputs in self.verification.differences.items() if mine == IN_FLOAT for d in outputs.values()]
        return min(beside, default=math.nan)

    def __str__(self) -> str:
        head = f"quantized {self.activations} activations, {self.weights} weights, {self.biases} biases ({seconds_text(self.seconds)})"
        lines = [head, *(f"  {file}  {size:,} bytes" for file, size in self.files.items())]
        lines += [f'  open with options.add_session_config_entry("{name}", "{value}")' for name, value in self.session_options.items()]
        lines += [f"note: {note}" for note in counted(self.notes)]
        lines += [f"in float: {line}" for line in counted(f"'{name}': {why}" for name, why in self.lint.items())]
        return "\n".join([*lines, str(self.verification)])

    def figures(self) -> Figures:
        """Bytes, seconds, and what the verification found."""
        found = {f"bytes/{file.name}": float(size) for file, size in self.files.items()}
        found |= {f"seconds/{stage}": seconds for stage, seconds in self.seconds.items()}
        return Figures({**found, "in_float": float(len(self.lint)), **verification_figures(self.verification)})

    def page(self) -> Page:
        """See `Report.page`."""
        facts: list[Fact] = [(name, str(getattr(self, name))) for name in ("activations", "weights", "biases")]
        facts += [(file.name, f"{size / 2**20:.2f} MiB") for file, size in self.files.items()]
        facts.append(("seconds", f"{sum(self.seconds.values()):.2f}", seconds_text(self.seconds)))
        body = tiles(facts) + problems(counted(self.notes)) + verification_table(self.verification)
        body += float_table({**self.lint, **self.verification.in_float})
        return Page("Quantized ONNX model", self.path.name, body, about(self.subject))


@tells_arguments("qsim.quantize_onnx")
def quantize_onnx(
    model: str | os.PathLike[str],
    data: Iterable[Mapping[str, Any]],
    path: str | os.PathLike[str],
    target: str = "onnxruntime",
    *,
    config: Config | str | None = None,
    method: str | None = None,
    progress: bool = True,
) -> OnnxQuantized:
    """Quantize a float ONNX model for a runtime, for who has no Python model: observed, written with Q/DQ, verified.

    Operations that have an integer kernel are quantized on both sides, with what is fused to them; weights per output channel, biases as
    int32. Before that, constants are folded and BatchNorm goes into convolutions, as ONNX Runtime's basic optimisations do.

    Parameters
    ----------
    model : path-like
        A float32 model. It stays as it is; names of inputs and outputs are kept.
    data : iterable of mapping of str to array
        Batches by the names of the inputs; read twice. Some hundreds of samples.
    path : path-like
        Where the Q/DQ model goes; replaced as a whole, or left as it was.
    target : str
        "onnxruntime". For other runtimes: simulate the Python model, and `QuantSim.export`.
    config : Config or name of a preset, optional
        8-bit integers; `qsim.int8` for the target by default. Overrides, by names and types of nodes, may leave these in float.
    method : str, optional
        How ranges of activations are chosen, in place of the config's: "minmax", "percentile", "mse", "tf_enhanced", "entropy".
    progress : bool
        Show a progress bar where tqdm is installed.

    Returns
    -------
    OnnxQuantized

    Raises
    ------
    FileFormatError
        The model is none, or has quantizers already.
    CalibrationError
        There is no data, or nothing finite in a tensor.
    ValueError
        The target, the config or the method cannot be had, or no operation has an integer kernel.

    Examples
    --------
    >>> import tempfile
    >>> import numpy as np
    >>> from torch import nn
    >>> folder, net = tempfile.mkdtemp(), nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
    >>> names = {"input_names": ["x"], "output_names": ["y"]}
    >>> program = torch.onnx.export(net, (torch.ones(32, 8),), f"{folder}/float.onnx", dynamo=True, verbose=False, **names)
    >>> data = [{"x": np.random.default_rng(0).normal(size=(32, 8)).astype("float32")}]
    >>> done = quantize_onnx(f"{folder}/float.onnx", data, f"{folder}/int8.onnx", progress=False)
    >>> done.activations, done.weights, done.biases, done.lint
    (3, 2, 2, {})
    """
    if isinstance(data, Iterator):
        raise TypeError(f"{_CALLER}: got data of type {type(data).__name__}, which is used up after one pass: give a list")
    if target not in ONNX_TARGETS:
        wanted = ", ".join(map(repr, ONNX_TARGETS))
        raise ValueError(
            f"{_CALLER}: got target={shown(target)}; expected {wanted}. For others simulate the Python model, and sim.export it"
        )
    given, file = _checked(int8(target) if config is None else config_of(config, _CALLER), method, target), Path(path)
    if not file.parent.is_dir():
        raise FileNotFoundError(f"{_CALLER}: there is no folder {str(file.parent)!r}: make it first")
    seconds, notes = Stages(), list[str]()
    with seconds.stage("prepare"):
        opened = prepared(model)
        _name_nodes(opened.graph)
        placement = place(opened.graph, _wanted(given, opened.graph))
    nested = _nested(opened.graph)
    if not placement.observed:
        inside = f" outside of {nested}, whose operations stay in float" if nested else ""
        such = f"no operation that an integer kernel takes, such as Conv, Gemm or MatMul{inside}"
        raise ValueError(f"{_CALLER}: {Path(model).name} has {such}")
    if nested:
        notes.append(f"operations within {nested} stay in float: which of them run depends on the data")
    with seconds.stage("observe"):
        observers = observe(opened, [str(value.name) for value in placement.observed], data, show=progress)
    notes += [
        f"'{name}' met {seen.counts}; its range comes from the finite ones" for name, seen in observers.items() if seen.counts.nonfinite
    ]
    with seconds.stage("write"):
        writer = _written(opened, placement, observers, given)
        notes += [f"the bias '{name}' stays in float: int32 does not hold it" for name in writer.unheld]
        opened.metadata_props.update({"qsim.version": VERSION, "qsim.target": target})
        files = write(opened, file, external_data=size_of(opened) > LARGE)
    with seconds.stage("verify"):
        verification = verify(file, _beside_float(Path(model), data), model=opened)
    options, more = entries(opened)
    sizes = {made: made.stat().st_size for made in files}
    counts = len(placement.observed) + len(placement.moved), len(placement.weights) + len(placement.constants), writer.biases
    subject = Subject(Path(model).name, described(given))
    return OnnxQuantized(file, sizes, *counts, dict(seconds), [*notes, *more], lint(opened, target), options, verification, subject=subject)


def _checked(config: Config, method: str | None, target: str) -> Config:
    """The config for the target, with this method for activations."""
    config = dataclasses.replace(config, target=target)
    if config.weight is None or config.activation is None:
        raise ValueError(f"{_CALLER}: got a config that leaves weights or activations in float; expected integers of {_BITS} bits for both")
    for role, spec in (("weight", config.weight), ("activation", config.activation)):
        if spec.is_float or spec.bits != _BITS or spec.block_size is not None or spec.is_running:
            raise ValueError(f"{_CALLER}: got a config with {role}={spec}; expected integers of {_BITS} bits, whose range is calibrated")
    if method is None:
        return config
    return dataclasses.replace(config, activation=dataclasses.replace(config.activation, method=method))


def _wanted(config: Config, graph: ir.Graph) -> Callable[[str, str], bool]:
    """Whether a node, by its name and type, is quantized: an override may leave it in float, and nothing else."""
    for override in config.overrides:
        if not any(override.matches(SiteInfo(str(node.name), node.op_type)) for node in graph):
            close = close_names(override.pattern, [str(node.name) for node in graph]) if isinstance(override.pattern, str) else []
            near = f"; close to it: {', '.join(map(repr, close))}" if close else f", such as {graph[0].name!r}"
            raise ValueError(f"{_CALLER}: the override {override} matches no node of the model{near}")

    def wanted(name: str, op: str) -> bool:
        specs = {role: config.spec_for(name, op, role) for role in ("weight", "activation")}
        for role, spec in specs.items():
            if spec is not None and spec != getattr(config, role):
                raise ValueError(f"{_CALLER}: an override changes the {role} of node {name!r}; expected overrides with off=True alone")
        return None not in specs.values()

    return wanted


def _name_nodes(graph: ir.Graph) -> None:
    for node in graph:
        node.name = node.name or str(node.outputs[0].name)


def _nested(graph: ir.Graph) -> str:
    """The nodes with graphs of their own (If, Loop, Scan) that have operations with weights in them; "" without any."""
    inner = {
        node.name: sorted({one.op_type for one in ir.traversal.RecursiveGraphIterator(inside) if one.op_type in INTEGER_KERNELS})
        for node in graph
        for attribute in node.attributes.values()
        for inside in _graphs(attribute)
    }
    return ", ".join(f"{name!r} ({', '.join(kinds)})" for name, kinds in inner.items() if kinds)


def _graphs(attribute: ir.Attr) -> Sequence[ir.Graph]:
    kind = attribute.type
    return [attribute.as_graph()] if kind is ir.AttributeType.GRAPH else attribute.as_graphs() if kind is ir.AttributeType.GRAPHS else []


def _written(model: ir.Model, placement: QuantizedValues, observers: Mapping[str, Observer], config: Config) -> Writer:
    """Put everything that is planned into the model."""
    weight, activation = config.weight, config.activation
    assert weight is not None
    assert activation is not None
    encodings: dict[ir.Value, Encoding] = {}
    for value, op in placement.observed.items():
        if known := config.profile.known_range(op):
            low, high = map(torch.tensor, known)
            encodings[value] = encoding_of_range(low, high, activation)
        else:
            encodings[value] = observers[str(value.name)].encoding(activation)
    for value, source in placement.moved.items():
        encodings[value] = encodings[source]
    writer = Writer(model.graph)
    for value, encoding in encodings.items():
        writer.activation(value, encoding)
    weights = [_values(operand.value) for operand in placement.weights]
    specs = [dataclasses.replace(weight, axis=operand.axis) for operand in placement.weights]
    for operand, values, chosen in zip(placement.weights, weights, search_encodings(weights, specs), strict=True):
        assert chosen is not None
        writer.constant(operand, values, chosen)
    for operand in placement.constants:
        values = _values(operand.value)
        spec = TensorSpec(signed=activation.signed, method="minmax")
        writer.constant(operand, values, encoding_of_range(values.min().clamp(max=0), values.max().clamp(min=0), spec))
    for operand in placement.biases:
        writer.bias(operand, _values(operand.value))
    return writer


def _values(value: ir.Value) -> torch.Tensor:
    assert value.const_value is not None
    return torch.tensor(value.const_value.numpy())


def _beside_float(model: Path, data: Iterable[Mapping[str, Any]]) -> Iterator[tuple[Mapping[str, Any], Mapping[str, Sequence[Any]]]]:
    plain = session(model, optimised=True)
    for batch in data:
        yield batch, {IN_FLOAT: plain.run(None, dict(batch))}
