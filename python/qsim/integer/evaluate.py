"""Runs a traced simulation with integer kernels in place of the operations that have them."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter, Node
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from qsim import ops
from qsim.deploy.capture import Program
from qsim.deploy.carry import carry_marks
from qsim.encoding import Encoding
from qsim.errors import AccumulatorError
from qsim.float_format import FLOAT_FORMATS
from qsim.graph.frugal import Stamp
from qsim.graph.marks import BIAS, QUANTIZED, ROUNDED
from qsim.integer.kernels.exact import AccumulatorOverflow
from qsim.integer.kernels.products import Bias
from qsim.integer.kernels.quantized import Quantized, quantize
from qsim.integer.launch import Launcher, Operators
from qsim.integer.regions import Kernel, classify
from qsim.quantizer import Quantizer

Quantizers = Mapping[str, Quantizer]


class Evaluation:
    """A traced simulation, ready to run on integers.

    What follows from encodings and parameters (which kernels there are, integer weights and biases) is kept until one of them changes,
    as far as PyTorch counts changes: see `QuantSim.savings`.

    Parameters
    ----------
    program : Program
        Its graph gets carried marks.
    quantizers : mapping of str to Quantizer
        All that the marks name.
    model : nn.Module
        The model that was traced, whose parameters and buffers are used.
    """

    def __init__(self, program: Program, quantizers: Quantizers, model: nn.Module) -> None:
        carry_marks(program.exported.graph)
        self.program, self.quantizers, self.model = program, quantizers, model
        self._stored = {
            spec.arg.name: spec.target
            for spec in program.exported.graph_signature.input_specs
            if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER)
        }
        self._constant = {
            node: str(self._stored[node.args[0].name])
            for node in program.exported.graph.nodes
            if node.op == "call_function" and node.target in (QUANTIZED, BIAS) and node.args[0].name in self._stored
        }
        self._stamp, self._settings = Stamp(), list[Any]()
        self.kernels: list[Kernel] = []
        self.encodings: dict[str, Encoding] = {}
        self._operators: Operators = {}
        self._marked: dict[Node, Any] = {}  # constants behind their marks

    def refresh(self) -> None:
        """Look at encodings and parameters again, if any of them changed since."""
        used = [attrgetter(path)(self.model) for path in self._constant.values()]
        grids = [tensor for quantizer in self.quantizers.values() for tensor in quantizer.grid_tensors]
        settings = [quantizer.settings for quantizer in self.quantizers.values()]
        if self._settings == settings and self._stamp.matches(*used, *grids):
            return
        found = {key: quantizer.encoding for key, quantizer in self.quantizers.items() if quantizer.enabled}
        self.encodings = {key: encoding for key, encoding in found.items() if encoding is not None}
        self.kernels = classify(self.program, self.encodings)
        self._operators, self._marked = {}, {}
        self._stamp, self._settings = Stamp(*used, *grids), settings

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for these arguments, which have the structure and the shapes of those it was traced with.

        Raises
        ------
        AccumulatorError
            A sum of products leaves int32.
        """
        self.refresh()
        exported = self.program.exported
        inputs = iter(tree_flatten((args, kwargs))[0])
        held = [
            next(inputs) if spec.kind is InputKind.USER_INPUT else self._held(exported, spec)
            for spec in exported.graph_signature.input_specs
        ]
        with torch.no_grad():
            results = _Run(self).run(*held)
        specs = exported.graph_signature.output_specs
        wanted = [value for value, spec in zip(results, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
        return tree_unflatten(tree_map_only((Quantized, Bias), lambda value: value.dequantized(), wanted), exported.call_spec.out_spec)

    def _held(self, exported: ExportedProgram, spec: Any) -> Any:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            return attrgetter(spec.target)(self.model)
        return exported.constants[spec.target]


class _Run(Interpreter):
    """One run of the graph. Values are tensors, and `Quantized` behind marks of integers."""

    def __init__(self, evaluation: Evaluation) -> None:
        super().__init__(evaluation.program.exported.graph_module)
        self.extra_traceback = False
        self._of = evaluation
        self._kernels = {kernel.node: kernel for kernel in evaluation.kernels if kernel.kernel is not None}
        self._taken = {kernel.rectifier for kernel in self._kernels.values()}
        self._launcher = Launcher(self._value, set(evaluation._constant), evaluation._operators)

    def _value(self, argument: Any) -> Any:
        return self.env[argument] if isinstance(argument, Node) else argument

    def run_node(self, n: Node) -> Any:
        if (kernel := self._kernels.get(n)) is not None:
            return self._launched(kernel)
        if n in self._of._constant:
            kept = self._of._marked
            return kept[n] if n in kept else kept.setdefault(n, super().run_node(n))
        if n in self._taken:
            return self.env[n.all_input_nodes[0]]
        return super().run_node(n)

    def _launched(self, kernel: Kernel) -> Any:
        try:
            return self._launcher.run(kernel.node, None if kernel.result is None else self._of.encodings[kernel.result])
        except AccumulatorOverflow as error:
            name = (kernel.result or kernel.module).rpartition(".")[0]
            raise AccumulatorError(
                f"QuantSim.integer: an accumulator of '{name}' ({kernel.kernel}) holds {error.largest:.0f}, and int32 ends at {2**31 - 1}: "
                "on the runtime it wraps around. Give the layer fewer bits, or a larger scale of its weight or input."
            ) from error

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is QUANTIZED:
            return self._marked(*args)
        if target is BIAS:
            return self._bias(*args)
        if target is ROUNDED:
            x, format, _ = args
            return ops.round_to_format(x.dequantized() if isinstance(x, (Quantized, Bias)) else x, format)
        return super().call_function(target, *tree_map_only((Quantized, Bias), lambda value: value.dequantized(), (args, kwargs)))

    def _marked(self, x: Any, key: str) -> Any:
        encoding = self._of.encodings.get(key)
        if isinstance(x, Quantized):
            if encoding is x.encoding:
                return x
            x = x.dequantized()
        if encoding is None:
            return x
        if x.dtype is not torch.float32:
            raise TypeError(f"QuantSim.integer: '{key}' is {x.dtype}; integer kernels work with float32: simulate model.float()")
        if encoding.dtype in FLOAT_FORMATS:
            return self._of.quantizers[key].quantize(x)
        return quantize(x, encoding)

    def _bias(self, b: Tensor, input: str, weight: str) -> Any:
        grids = [self._of.encodings.get(key) for key in (input, weight)]
        return b if None in grids else Bias.simulated(b, *grids)  # type: ignore[arg-type]
