"""The part of `qsim.QuantSim` that computes as a runtime's integer kernels do."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_leaves

from qsim.deploy.capture import capture
from qsim.graph.arguments import Arguments
from qsim.integer.evaluate import Evaluation
from qsim.integer.regions import Kernel
from qsim.quantizers.quantizer import Quantizer
from qsim.sim.sharding import sharded_modules
from qsim.sim.training import Training
from qsim.training.batch_norm import FoldReport


class Programs(dict[Any, Evaluation]):
    """Traced simulations, by the structure and the shapes of their inputs. A copy, or what is pickled, starts empty."""

    def __reduce__(self) -> tuple[type[Programs], tuple[()]]:
        return Programs, ()


class IntegerEvaluation(Training):
    """Base of `qsim.QuantSim`: evaluation on integers."""

    _on_integers = False

    def _simulate(self, examples: Sequence[Arguments], folding: FoldReport, known: Mapping[str, Quantizer]) -> None:
        self._programs = Programs()
        super()._simulate(examples, folding, known)

    def _fall_back(self, formats: Mapping[str, str]) -> None:
        self._programs = Programs()  # marks in them stand where operations ran in integers
        super()._fall_back(formats)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model's forward, simulated; on integers within `integer`. Raises NoEncodingError before calibration."""
        if not (self._on_integers and self._switch.on):
            return super().forward(*args, **kwargs)
        if self.training:
            raise RuntimeError("QuantSim.integer: the simulation is in training mode; integers have no gradient: call sim.eval()")
        if torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tree_leaves((args, kwargs))):
            raise RuntimeError("QuantSim.integer: an input requires a gradient, and integers have none: call under torch.no_grad()")
        return self._evaluation(args, kwargs).run(args, kwargs)

    @contextlib.contextmanager
    def integer(self) -> Iterator[None]:
        """``with sim.integer():`` the simulation computes what ONNX Runtime's integer kernels compute, bit for bit; in all threads.

        Convolutions, linear layers, matrix products, additions, multiplications, pooling, concatenation, sigmoid and softmax between
        quantizers are computed as the runtime's fused kernels do: sums in int32, then one multiplication in float32. The plain
        simulation is what the runtime computes without optimisations: within one step of that. Which operations have a
        kernel, and why others do not: `kernels`. docs/integer.md says what is exact.

        The model is traced with `torch.export` at its first call with inputs of new shapes, the batch apart where it may vary, so
        hooks do not run. Only in eval mode, and without gradients. Calls raise AccumulatorError where a sum leaves int32.

        Raises
        ------
        NoEncodingError
            Before calibration.
        CaptureError
            At a call: the model cannot be traced.

        Examples
        --------
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> sim = qsim.QuantSim(model, torch.randn(1, 4), qsim.int8(target="onnxruntime"))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> x = torch.randn(5, 4)
        >>> with sim.integer():
        ...     y = sim(x)
        >>> bool((y - sim(x)).abs().max() <= sim.encodings()["2.output"].scale * 1.001)
        True
        """
        if sharded_modules(self):
            raise ValueError("QuantSim.integer: fully_shard holds the weights; load the state into a simulation that is not sharded")
        with self._calibrated():
            was, self._on_integers = self._on_integers, True
            try:
                yield
            finally:
                self._on_integers = was

    def kernels(self) -> list[Kernel]:
        """How ONNX Runtime runs each operation of the model: the integer kernel that takes it, or why none does.

        Raises
        ------
        NoEncodingError
            Before calibration.
        CaptureError
            The model cannot be traced.

        Examples
        --------
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Tanh())
        >>> sim = qsim.QuantSim(model, torch.randn(1, 4), qsim.int8(target="onnxruntime"))
        >>> report = sim.calibrate([torch.randn(32, 4)], progress=False)
        >>> [kernel.kernel or kernel.reason for kernel in sim.kernels()]
        ['QGemm', 'QGemm', "'3' runs in float: ONNX Runtime has no integer kernel for Tanh"]
        """
        with self._calibrated():
            return self._evaluation(*self._calls[0]).prepared.kernels

    def evaluate(self, batch: Any, *, integer: bool = False) -> Any:
        """What the model returns for a batch, in eval mode and without gradients.

        Parameters
        ----------
        batch : Tensor, tuple, list or dict
            As `calibrate` takes batches: what the model does not take, such as targets, is ignored.
        integer : bool
            As a runtime's integer kernels compute it: see `integer`.

        Returns
        -------
        What the model returns.
        """
        training = [module for module in self.modules() if module.training]
        if training:
            self.eval()
        try:
            with torch.no_grad(), self.integer() if integer else contextlib.nullcontext():
                return self._forward_batch(self, batch)
        finally:
            for module in training:
                module.training = True

    def _evaluation(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Evaluation:
        """The traced simulation for such arguments."""
        leaves, structure = tree_flatten((args, kwargs))
        shapes = [t.shape[1:] if isinstance(t, Tensor) else None for t in leaves]
        others = [(t.dtype, t.device, t.dim()) if isinstance(t, Tensor) else t for t in leaves]
        key = (str(structure), repr(shapes), repr(others), repr(self._followed))
        whole = (*key, repr([t.shape[:1] for t in leaves if isinstance(t, Tensor)]))
        found = self._programs.get(key) or self._programs.get(whole)
        if found is None:
            program = capture(self, args, kwargs)
            found = Evaluation(program, self.quantizers(), self.model)
            self._programs[key if program.dynamic_batch else whole] = found
        return found
