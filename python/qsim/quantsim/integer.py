"""The part of `qsim.QuantSim` that computes as a runtime's integer kernels do."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from qsim.integer import programs
from qsim.integer.assignment import Kernel
from qsim.runs.batches import Forward
from qsim.simulation.simulation import Simulation


class IntegerEvaluation(Simulation):
    """Base of `qsim.QuantSim`: evaluation on integers."""

    def integer(self) -> AbstractContextManager[None]:
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
        ValueError
            At a call: a weight or bias that becomes integers has NaN or Inf in it.

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
        return programs.on_integers(self)

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
        >>> [kernel.name for kernel in sim.kernels() if kernel.saturates]  # could differ on x86 CPUs without VNNI
        ['0', '2']
        """
        with self.calibrated():
            return programs.evaluation(self, *self.calls[0]).prepared.with_pairs()

    def evaluate(self, batch: Any, forward: Forward | None = None, *, integer: bool = False) -> Any:
        """What the model returns for a batch, in eval mode and without gradients.

        Parameters
        ----------
        batch : Tensor, tuple, list or dict
            As `calibrate` takes batches: what the model does not take, such as targets, is ignored.
        forward : callable, optional
            ``forward(model, batch)`` for anything else.
        integer : bool
            As a runtime's integer kernels compute it: see `integer`.

        Returns
        -------
        What the model, or `forward`, returns.

        Examples
        --------
        >>> sim = qsim.QuantSim(torch.nn.Linear(4, 2), torch.zeros(1, 4), qsim.int8(target="onnxruntime"))
        >>> report = sim.calibrate([torch.randn(8, 4)], progress=False)
        >>> batch = (torch.randn(8, 4), torch.zeros(8))  # with labels
        >>> sim.evaluate(batch, integer=True).shape
        torch.Size([8, 2])
        """
        return programs.evaluate(self, batch, forward, integer=integer)
