from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qsim import ops
from qsim.numbers.blocks import Axes
from qsim.numbers.encoding import Encoding
from qsim.numbers.spec import TensorSpec, range_shape
from qsim.quantizers.observer import Observer


class RunningObserver(Observer):
    """Keeps a range that moves towards that of each batch: an exponential moving average, for ranges that move in training.

    NaN and Inf are counted and never reach the range. A batch without a finite value, and a channel or block without one, leaves
    the range where it is. Unlike everything else that is observed this depends on the order of batches and on their size.

    Parameters
    ----------
    averaging : float, 0 < averaging <= 1
        Weight of a batch; the first one is the range.
    axis, block_size, shape, name
        As for `Observer`.

    Attributes
    ----------
    lowest, highest : Tensor, float32, shape ``()``, ``[C]`` or one per block
        Ends of the running range; +Inf and -Inf while there is none.
    counters : Tensor, int64 [4]
        Elements, NaN, +Inf, -Inf of all batches.

    Examples
    --------
    >>> observer = RunningObserver(averaging=0.5)
    >>> for batch in (torch.tensor([-1.0, 1.0]), torch.tensor([0.0, 3.0, torch.inf])):
    ...     _ = observer(batch)
    >>> observer.min.item(), observer.max.item(), observer.counts.positive_infs
    (-0.5, 2.0, 1)
    """

    def __init__(
        self,
        averaging: float,
        axis: Axes = None,
        block_size: Axes = None,
        shape: Sequence[int] | None = None,
        name: str = "",
    ) -> None:
        super().__init__(axis, block_size, shape, name)
        self.averaging = averaging

    @property
    def sketched(self) -> bool:
        return False

    def forward(self, x: Tensor) -> Tensor:
        """Observe a tensor and return it, unchanged.

        Parameters
        ----------
        x : Tensor, float16/bfloat16/float32/float64, on the observer's device
        """
        if self.held_shape is None:
            self.adopt(range_shape(x.shape, self.axis, self.block_size))
        switches = torch.tensor([True, False], device=x.device)
        unused = torch.empty_like(self.lowest), torch.empty_like(self.lowest, dtype=torch.int32)
        ranges = self.lowest, self.highest, self.counters
        options = {"averaging": self.averaging, "axis": self.axis, "block_size": self.block_size}
        ops.observe_fake_quantize(x.detach(), switches[0], switches[1], *ranges, *unused, -128, 127, **options)  # type: ignore[arg-type]
        return x

    def start_from(self, encoding: Encoding) -> None:
        """Take the range that an encoding spans as the running range."""
        if self.held_shape is None:
            self.adopt(tuple(encoding.scale.shape))
        self.lowest.copy_(encoding.min)
        self.highest.copy_(encoding.max)

    def merge(self, other: Observer) -> None:
        """Not possible: always a ValueError."""
        raise ValueError(
            f"{self._title}: a running range (method='ema') depends on the order of its batches, so two of them have no union. Use "
            "another method where observers are merged, or let one quantizer see all batches."
        )

    def check_method(self, spec: TensorSpec) -> None:
        """Raise a ValueError unless the spec's method is "ema": a running range tells nothing else."""
        if not spec.is_running:
            raise ValueError(
                f"{self._title}: keeps a running range alone, and method {spec.method!r} needs all that was observed; choose it in the "
                "TensorSpec, before calibration"
            )

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, averaging={self.averaging}"
