"""Runs a traced simulation with integer kernels in place of the operations that have them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export.graph_signature import InputKind, OutputKind
from torch.fx import Interpreter, Node
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from qsim import ops
from qsim._library import Stamp
from qsim.errors import AccumulatorError
from qsim.graph.execute.marks import BIAS, QUANTIZED, ROUNDED
from qsim.integer.assignment import Kernel
from qsim.integer.kernel_calls import Launcher
from qsim.integer.kernels.exact import AccumulatorOverflow
from qsim.integer.kernels.products import Bias
from qsim.integer.kernels.quantized import QuantizedTensor, quantize
from qsim.integer.prepared import Prepared, stored_inputs
from qsim.integer.ties import FIRST_OF_EQUALS
from qsim.integer.traced_state import address, traced_state
from qsim.numbers.float_format import FLOAT_FORMATS
from qsim.quantizers.quantizer import Quantizer
from qsim.trace.capture import Program
from qsim.trace.fx_nodes import arguments
from qsim.trace.idle_nodes import drop_idle_nodes
from qsim.trace.integer_forms import NUMBER, SCALED, number, scaled
from qsim.trace.mark_uses import per_channel
from qsim.trace.marks_behind_moves import mark_behind_moves


class Evaluation:
    """A traced simulation, to run on integers.

    What follows from encodings and parameters (which kernels there are, integer weights and biases) is kept until one of them changes,
    as far as PyTorch counts changes: see `QuantSim.savings`.

    Parameters
    ----------
    program : Program
        Its graph gets marks behind moves, and loses what does nothing.
    quantizers : mapping of str to Quantizer
        All that the marks name.
    model : nn.Module
        The model that was traced, whose parameters and buffers are used.
    """

    def __init__(self, program: Program, quantizers: Mapping[str, Quantizer], model: nn.Module) -> None:
        drop_idle_nodes(program.exported.graph)
        mark_behind_moves(program.exported.graph, per_channel(quantizers))
        self.program, self.quantizers, self.model = program, quantizers, model
        self._paths = [path for _, path in stored_inputs(program)]
        self._constants = {address(t) for t in program.exported.constants.values() if isinstance(t, Tensor)}
        self._state = traced_state(model, self._constants)
        self._kept: tuple[Stamp, list[Any], Prepared] | None = None  # replaced as a whole: threads share it

    def is_of_now(self) -> bool:
        """Whether the model is the one that was traced: the same modules, hooks and attributes."""
        return self._state == traced_state(self.model, self._constants)

    @property
    def prepared(self) -> Prepared:
        """The kernels for the encodings and parameters as they are."""
        tensors = [self._stored(path) for path in self._paths]
        tensors += [tensor for quantizer in self.quantizers.values() for tensor in quantizer.grid_tensors]
        settings = [quantizer.settings for quantizer in self.quantizers.values()]
        if self._kept is not None and self._kept[1] == settings and self._kept[0].matches(*tensors):
            return self._kept[2]
        prepared = Prepared(self.program, self.quantizers, self._stored)
        self._kept = Stamp(*tensors), settings, prepared
        return prepared

    def run(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What the model returns for these arguments, which have the structure and the shapes of those it was traced with.

        Raises
        ------
        AccumulatorError
            A sum of products leaves int32.
        """
        exported = self.program.exported
        inputs = iter(tree_flatten((args, kwargs))[0])
        held = [
            next(inputs) if spec.kind is InputKind.USER_INPUT else self.program.held_value(spec, self._stored)
            for spec in exported.graph_signature.input_specs
        ]
        with torch.no_grad():
            results = _Run(self.prepared, self.quantizers).run(*held)
        specs = exported.graph_signature.output_specs
        wanted = [value for value, spec in zip(results, specs, strict=True) if spec.kind is OutputKind.USER_OUTPUT]
        return tree_unflatten(
            tree_map_only((QuantizedTensor, Bias), lambda value: value.dequantized(), wanted), exported.call_spec.out_spec
        )

    def _stored(self, path: str) -> Tensor:
        stored: Tensor = attrgetter(path)(self.model)
        return stored


class _Run(Interpreter):
    """One run of the graph. Values are tensors, and `QuantizedTensor` behind marks of integers."""

    def __init__(self, prepared: Prepared, quantizers: Mapping[str, Quantizer]) -> None:
        super().__init__(prepared.module)
        self.extra_traceback = False
        self._of, self._quantizers = prepared, quantizers
        self._kernels = {kernel.node: kernel for kernel in prepared.kernels if kernel.kernel is not None}
        self._taken = {kernel.rectifier for kernel in self._kernels.values()}
        self._launcher = Launcher(self._value, prepared.constants, prepared.operators)

    def _value(self, argument: Any) -> Any:
        return self.env[argument] if isinstance(argument, Node) else argument

    def run_node(self, n: Node) -> Any:
        if (kernel := self._kernels.get(n)) is not None:
            return self._launched(kernel)
        if n in self._of.constants:
            kept = self._of.marked
            return kept[n] if n in kept else kept.setdefault(n, super().run_node(n))
        if n in self._of.biases:
            return self._with_integer_bias(n)
        if n in self._taken:
            return self.env[n.all_input_nodes[0]]
        return super().run_node(n)

    def _launched(self, kernel: Kernel) -> Any:
        try:
            return self._launcher.run(kernel.node, None if kernel.result is None else self._of.encodings[kernel.result])
        except AccumulatorOverflow as error:
            raise AccumulatorError(
                f"QuantSim.integer: an accumulator of '{kernel.name}' ({kernel.kernel}) holds {error.largest:.0f}, and int32 ends at "
                f"{2**31 - 1}: on the runtime it wraps around. Give the layer fewer bits, or its weight or input a larger scale."
            ) from error

    def _with_integer_bias(self, node: Node) -> Any:
        values = {name: self._value(value) for name, value in arguments(node).items()}
        bias = self._of.biases[node]
        x, weight = (value.encoding for value in values.values() if isinstance(value, QuantizedTensor))
        values[bias] = Bias.of_a_float_operation(values[bias], x, weight)
        return self.call_function(node.target, (), values)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if target is QUANTIZED:
            return self._marked(*args)
        if target is BIAS:
            return self._bias(*args)
        if target is SCALED:
            return dataclasses.replace(args[0], encoding=scaled(args[0].encoding, args[2]))
        if target is NUMBER:
            integer, encoding = number(args[2], args[0].encoding)
            return QuantizedTensor(args[0].integers.new_tensor(integer), encoding)
        args, kwargs = tree_map_only((QuantizedTensor, Bias), lambda value: value.dequantized(), (args, kwargs))
        if target is ROUNDED:
            return ops.round_to_format(*args[:2])
        return super().call_function(FIRST_OF_EQUALS.get(target, target), args, kwargs)

    def _marked(self, x: Any, key: str) -> Any:
        encoding = self._of.encodings[key]
        if isinstance(x, QuantizedTensor):
            if encoding is x.encoding:
                return x
            x = x.dequantized()
        if x.dtype is not torch.float32:
            raise TypeError(f"QuantSim.integer: '{key}' is {x.dtype}; integer kernels work with float32: simulate model.float()")
        if encoding.dtype in FLOAT_FORMATS:
            return self._quantizers[key].quantize(x)
        return quantize(x, encoding)

    def _bias(self, b: Tensor, input: str, weight: str) -> Any:
        return Bias.simulated(b, self._of.encodings[input], self._of.encodings[weight])
