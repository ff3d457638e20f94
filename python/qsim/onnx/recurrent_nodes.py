"""Recurrent layers that are left in float, each as the one operation that ONNX has for it, over sequences of any length.

ONNX orders the gates otherwise, and has the weights of both directions, and the two biases of each, in one tensor
(onnx.ai/onnx/operators, LSTM, GRU, RNN).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from onnxscript import values


@dataclass(frozen=True)
class _Kind:
    """An operator of ONNX, torch's number of each of its gates, and its options."""

    operator: str
    gates: tuple[int, ...]
    activations: tuple[str, ...] = ()
    linear_before_reset: int | None = None


_KINDS = {
    "lstm": _Kind("LSTM", (0, 3, 1, 2)),
    "gru": _Kind("GRU", (1, 0, 2), linear_before_reset=1),
    "rnn_tanh": _Kind("RNN", (0,), ("Tanh",)),
    "rnn_relu": _Kind("RNN", (0,), ("Relu",)),
}


def recurrent(op: values.Opset) -> Callable[..., Any]:
    """What torch's exporter takes for `qsim.graph.execute.recurrent_layers.RECURRENT`."""

    def ints(*numbers: int) -> Any:
        return op.Constant(value_ints=list(numbers))

    def reordered(weight: Any, gates: Sequence[int]) -> Any:
        """The gates of a weight or bias in ONNX's order, with an axis for the direction in front."""
        rows = weight.shape[0] // len(gates)
        return op.Unsqueeze(joined([op.Slice(weight, ints(gate * rows), ints((gate + 1) * rows), ints(0)) for gate in gates], 0), ints(0))

    def joined(parts: Sequence[Any], axis: int) -> Any:
        return parts[0] if len(parts) == 1 else op.Concat(*parts, axis=axis)

    def run(
        x: Any, states: Sequence[Any], weights: Sequence[Any], kind: str, biases: bool, layers: int, both: bool, batch_first: bool
    ) -> Any:
        like, directions, own = _KINDS[kind], 1 + both, 4 if biases else 2
        options: dict[str, Any] = {"hidden_size": weights[1].shape[1], "direction": "bidirectional" if both else "forward"}
        options |= {"activations": list(like.activations) * directions} if like.activations else {}
        options |= {} if like.linear_before_reset is None else {"linear_before_reset": like.linear_before_reset}
        x, last = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x, []
        for begin in range(0, layers * directions, directions):
            given = [[reordered(t, like.gates) for t in weights[i * own : (i + 1) * own]] for i in range(begin, begin + directions)]
            weight, again = (joined([one[i] for one in given], 0) for i in (0, 1))
            bias = joined([op.Concat(one[2], one[3], axis=1) for one in given], 0) if biases else None
            first = [op.Slice(state, ints(begin), ints(begin + directions), ints(0)) for state in states]
            y, *ends = getattr(op, like.operator)(x, weight, again, bias, None, *first, **options, _outputs=1 + len(states))
            x = op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), ints(0, 0, -1))  # directions side by side
            last.append(ends)
        x = op.Transpose(x, perm=[1, 0, 2]) if batch_first else x
        return [x, *(joined(ends, 0) for ends in zip(*last, strict=True))]

    return run
