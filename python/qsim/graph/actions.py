"""What a plan holds: the quantizers, where they stand, and what stays in float."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from qsim.graph.routes import Route, Site
from qsim.graph.tape import InputSlot, Slot
from qsim.spec import TensorSpec


@dataclass(frozen=True)
class PlannedQuantizer:
    """One quantizer of the plan.

    Attributes
    ----------
    key : str
        Its name in `QuantSim.quantizers`.
    role : str
        "weight" (a constant operand of a multiply-accumulate), "constant" (of anything else), "activation" or "input".
    spec : TensorSpec
        With the axis that this tensor has.
    op : str
        The operation whose result or operand is quantized, with what is fused to it: "conv2d + relu".
    parameter : str, optional
        The parameter or buffer that is quantized: its data decide the range. None: the range is observed while the model runs.
    range : (float, float), optional
        The range, where it is known without data.
    reader : str, optional
        Of a parameter: the operation that reads it.
    """

    key: str
    role: str
    spec: TensorSpec
    op: str
    parameter: str | None = None
    range: tuple[float, float] | None = None
    reader: str | None = None

    @property
    def operation(self) -> str:
        """Name of the operation, as overrides match it: "layer1.0.conv1", "head.linear", "input"."""
        return self.reader or (self.key if self.role == "input" else self.key.rpartition(".")[0])


class Use(NamedTuple):
    """A quantizer at an operand. `observes` is False where another reader of the same tensor observes it already."""

    key: str
    observes: bool = True


class LeftFloat(NamedTuple):
    """Something that stays in float: an operation or operand, and why."""

    name: str
    op: str
    reason: str


@dataclass(frozen=True)
class PlannedBias:
    """A bias that is held as int32: its operand's slot, its parameter, and the quantizers whose scales make its scale."""

    slot: Slot
    parameter: str
    op: str
    input: str
    weight: str


@dataclass
class Actions:
    """What happens at one site: quantizers of operands by slot, and of outputs by index; the bias."""

    operands: dict[Slot, Use] = field(default_factory=dict)
    outputs: dict[int, str] = field(default_factory=dict)
    bias: PlannedBias | None = None


@dataclass
class Plan:
    """Routes of all containers by path, what happens at each site, quantizers by key, keys of quantized inputs, what stays in float,
    and what is odd about the config."""

    routes: dict[str, Route]
    actions: dict[Site, Actions]
    quantizers: dict[str, PlannedQuantizer]
    inputs: dict[InputSlot, str]
    left: list[LeftFloat]
    notes: list[str]

    @property
    def biases(self) -> list[PlannedBias]:
        return [actions.bias for actions in self.actions.values() if actions.bias is not None]
