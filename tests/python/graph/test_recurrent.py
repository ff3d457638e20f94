"""Recurrent layers: the written-out form computes what torch's does, and every step in time shares its quantizers."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import qsim

LAYERS = {
    "lstm": lambda: nn.LSTM(4, 6),
    "lstm, two layers, both directions": lambda: nn.LSTM(4, 6, num_layers=2, bidirectional=True, batch_first=True),
    "lstm, projected": lambda: nn.LSTM(4, 6, proj_size=3),
    "lstm, projected, no bias": lambda: nn.LSTM(4, 6, proj_size=3, bias=False),
    "gru": lambda: nn.GRU(4, 6, batch_first=True),
    "gru, two layers, both directions": lambda: nn.GRU(4, 6, num_layers=2, bidirectional=True),
    "rnn, no bias": lambda: nn.RNN(4, 6, bias=False),
    "rnn, relu": lambda: nn.RNN(4, 6, nonlinearity="relu"),
}


class Sequences(nn.Module):
    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> tuple[Tensor, ...]:
        first = self.layer.batch_first
        if lengths is not None:
            x = pack_padded_sequence(x, lengths, batch_first=first, enforce_sorted=False)
        y, state = self.layer(x)
        if lengths is not None:
            y = pad_packed_sequence(y, batch_first=first)[0]
        return y, *(state if isinstance(state, tuple) else (state,))


class Cells(nn.Module):
    def __init__(self, cell: nn.RNNCellBase) -> None:
        super().__init__()
        self.cell = cell

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        state = None
        for step in x:
            state = self.cell(step, state)
        return state if isinstance(state, tuple) else (state,)


def check(model: nn.Module, inputs: tuple[Tensor, ...]) -> qsim.QuantSim:
    sim = qsim.QuantSim(model.eval(), inputs, qsim.int8())
    expected = model(*inputs)
    sim.disable("*")
    for found, theirs in zip(sim(*inputs), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=0, atol=1e-6)
    with sim.in_float():
        assert all(map(torch.equal, sim(*inputs), expected))
    sim.enable("*")
    sim.calibrate([inputs], progress=False)
    for found, theirs in zip(sim(*inputs), expected, strict=True):
        torch.testing.assert_close(found, theirs, rtol=0, atol=0.05)
        assert not torch.equal(found, theirs)
    assert sim.summary().notes == []
    sim.train()
    sum(y.square().sum() for y in sim(*inputs)).backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sim.model.parameters())
    return sim


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", LAYERS)
def test_layers(kind, packed):
    torch.manual_seed(0)
    inputs = (torch.randn(5, 5, 4), torch.tensor([5, 2, 4, 3, 5])) if packed else (torch.randn(5, 5, 4),)
    sim = check(Sequences(LAYERS[kind]()), inputs)
    weights = {key for key, quantizer in sim.quantizers().items() if ".weight_" in key and quantizer.spec.axis == 0}
    assert weights == {f"layer.{name}" for name, _ in sim.model.layer.named_parameters() if name.startswith("weight")}


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(cell):
    torch.manual_seed(0)
    check(Cells(cell(4, 6)), (torch.randn(5, 3, 4),))


def test_longer_sequences_meet_the_same_quantizers():
    torch.manual_seed(0)
    sim = check(Sequences(nn.LSTM(4, 6, batch_first=True)), (torch.randn(2, 3, 4),))
    seen = []
    sim.quantizers()["layer.l0.cell.linear.output"].register_forward_hook(lambda *_: seen.append(1))
    sim(torch.randn(2, 9, 4))
    assert len(seen) == 9
    assert sim.summary().notes == []
