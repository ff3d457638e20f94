"""Operations in place: the traced graph has none, and computes what the model does."""

import contextlib

import onnx
import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import Tensor, nn
from torch.export import ExportedProgram
from traced import evaluated

import qsim
from qsim.trace.capture import capture
from qsim.trace.in_place import writes


def part(y, z):
    y[:, 1:] = z.sigmoid()[:, 1:] + y[:, 1:]
    return y


def added_to_part(y, z):
    y[:, :4] += z[:, 2:]
    return y * 2.0


def whole(y, z):
    y[:, 0:] = z.sigmoid() + y
    return y


def broadcast(y, z):
    y[:, 0:] = z[:1]
    return y * 2.0


def older_view_reads(y, z):
    before = y[:, :3]
    y.relu_()
    return before * 2.0 + z[:, :3]


def older_view_reads_a_part(y, z):
    before = y[:, :3]
    return part(y, z) * 2.0 + before.sum(1, keepdim=True)


def older_name_reads(y, z):
    first = y.mul_(3.0)
    y.add_(z)
    return first * 2.0 + y


def two_views_write(y, z):
    columns, row = y[:, 1:], y[0]
    columns += z[:, 1:]
    row.mul_(2.0)
    return y * 2.0 + columns.sum() + row.sum()


def parts_of_a_split_read(y, z):
    first, second = y.chunk(2, 1)
    y.relu_()
    return first * second + z[:, :3]


def part_of_a_split_writes(y, z):
    first, _ = y.chunk(2, 1)
    first.relu_()
    return y * z


def one_of_all_writes(y, z):
    first, *_ = y.unbind(1)
    first.mul_(2.0)
    return y + z


def flat_view_writes(y, z):
    y.view(-1)[3:].mul_(2.0)
    return y + z


def transposed(y, z):
    y.T[1:].add_(z.T[1:])
    y.transpose(0, 1)[0] = 1.0
    return y * 2.0


def masked(y, z):
    y[y > 0] = 0.5
    return y * z


def indexed(y, z):
    y[:, [0, 2]] = z[:, :2]
    return y * 2.0


def filled(y, z):
    y[1:].fill_(0.5)
    y[:, 0].zero_()
    return y + z


def zeros(y, z):
    out = torch.zeros_like(y)
    out[:, :3] = y[:, 3:]
    out[:, 3:] = z[:, :3]
    return out * 2.0


def same_type(y, z):
    t = y.to(torch.float32)
    t[:, 1:] = 1.0
    return y * t + z


def rows_of_a_loop(y, z):
    sums = []
    for i in range(3):
        y[i] = y[i] + z[i]
        sums.append(y[i].sum())
    return y * torch.stack(sums).sum()


def overlapping(y, z):
    y[:, :3] = y[:, 3:]
    return y * z


def returned_with_a_view(y, z):
    view = y[:, 1:]
    y.add_(z)
    return view, y


def dropped_in_place(y, z):
    return F.dropout(F.alpha_dropout(y.add_(z), 0.5, False, True), 0.5, False, True) * y


def compared(y, z):
    sign = y.clone()
    sign.gt_(0.0)
    return sign * z


def dropped_and_written_by_the_other_name(y, z):
    d = F.dropout(y.view(-1), 0.5, False)
    d[:7].mul_(3.0)
    return y * 2.0 + z


def keeps_its_type(y, z):
    return y.mul_(torch.full((6,), 1.5, dtype=torch.float64)) + z


# What is traced once more by PyTorch.
RETRACED = [part_of_a_split_writes, one_of_all_writes, compared, keeps_its_type]
CASES = [part, added_to_part, whole, broadcast, older_view_reads, older_view_reads_a_part, older_name_reads, two_views_write]
CASES += [parts_of_a_split_read, flat_view_writes, transposed, masked, indexed, filled, zeros, same_type, rows_of_a_loop, overlapping]
CASES += [returned_with_a_view, dropped_in_place, dropped_and_written_by_the_other_name, *RETRACED]


@pytest.fixture
def retraced(monkeypatch):
    """How often PyTorch decomposes a program."""
    calls, run = [], ExportedProgram.run_decompositions
    monkeypatch.setattr(
        ExportedProgram, "run_decompositions", lambda self, *args, **kwargs: calls.append(self) or run(self, *args, **kwargs)
    )
    return calls


def made(change, target="onnxruntime") -> tuple[qsim.QuantSim, Tensor]:
    torch.manual_seed(0)
    model, x = Forward(lambda m, x: change(m.a(x), m.b(x)), a=nn.Linear(6, 6), b=nn.Linear(6, 6)).eval(), torch.randn(8, 6)
    sim = qsim.QuantSim(model, x, qsim.int8(target=target))
    sim.calibrate([x.clone()], progress=False)
    return sim, x


@pytest.mark.parametrize("change", CASES, ids=lambda change: change.__name__)
def test_the_graph_computes_what_the_model_does(change, retraced):
    sim, x = made(change)
    program = capture(sim, (x,), {})
    assert bool(retraced) == (change in RETRACED)
    assert not any(map(writes, program.exported.graph.nodes))
    with torch.no_grad():
        expected = sim(x)
    torch.testing.assert_close(evaluated(sim, program, x), expected if isinstance(expected, Tensor) else expected[0], rtol=0, atol=1e-6)


@pytest.mark.parametrize("target", ["onnxruntime", "default"])
@pytest.mark.parametrize("change", [change for change in CASES if change is not keeps_its_type], ids=lambda change: change.__name__)
def test_files_and_integers_compute_what_the_simulation_does(change, target, tmp_path):
    sim, x = made(change, target)
    report = sim.export(tmp_path / "model.onnx", verify=[x.clone()])
    for pair in (("simulation", "not optimised"), ("on integers", "optimised")):
        for difference in report.verification.differences[pair].values():
            assert difference.largest <= (1 if difference.step else 1e-5), pair
    with torch.no_grad():
        expected = sim(x)
        with sim.integer():
            found = sim(x)
    pairs = zip(expected, found, strict=True) if isinstance(expected, tuple) else [(expected, found)]
    for ours, integers in pairs:
        torch.testing.assert_close(integers, ours, rtol=0, atol=0.05)


def test_what_torch_cannot_replace_is_an_error_that_names_it(monkeypatch):
    def refuse(*_):
        raise RuntimeError("no rule for this\n\nand much more")

    sim, x = made(part_of_a_split_writes)
    monkeypatch.setattr(ExportedProgram, "run_decompositions", refuse)
    with pytest.raises(qsim.CaptureError, match=r"cannot do without operations in place \(relu_ in ''\): no rule for this$"):
        capture(sim, (x,), {})


def test_inputs_are_not_written_to(tmp_path):
    model = Forward(lambda m, x: m.a(x[:, :3].mul_(2.0)) + x[:, :3], a=nn.Linear(3, 3)).eval()
    x = torch.randn(8, 6)
    sim = qsim.QuantSim(model, x.clone(), qsim.w4a16(group=None))
    program = capture(sim, (x.clone(),), {})
    assert not any(map(writes, program.exported.graph.nodes))
    assert len(program.exported.graph.output_node().args[0]) == 1
    given = x.clone()
    found = evaluated(sim, program, given)
    assert torch.equal(given, x)
    with torch.no_grad():
        torch.testing.assert_close(found, sim(x.clone()), rtol=0, atol=1e-6)


class Remembers(nn.Module):
    """Its state goes on from call to call."""

    def __init__(self, write):
        super().__init__()
        self.i, self.u, self.write = nn.Linear(4, 4), nn.Linear(4, 4), write
        self.register_buffer("h", torch.zeros(2, 4))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        h = torch.tanh(self.i(x) + self.u(self.h))
        self.write(self.h, h)
        return self.h * 2.0


def _row_by_row(place, h):
    place[0] = h[0]
    place[1:] = h[1:]


WAYS = {
    "whole": lambda place, h: place.copy_(h),
    "rows": _row_by_row,
    "unbound": lambda place, h: [a.copy_(b) for a, b in zip(place, h, strict=True)],
}


@pytest.mark.parametrize("way", WAYS)
def test_what_is_left_in_buffers_is_there_in_the_next_call(way, tmp_path):
    torch.manual_seed(0)
    calls = list(torch.randn(4, 2, 4))
    sim = qsim.QuantSim(Remembers(WAYS[way]).eval(), calls[0], qsim.int8(target="onnxruntime"))
    sim.calibrate(calls, progress=False)
    found = {}
    with torch.no_grad():
        for name, context in (("simulated", contextlib.nullcontext()), ("integer", sim.integer())):
            sim.model.h.zero_()
            sim.model.calls.zero_()
            with context:
                found[name] = torch.stack([sim(x) for x in calls])
            assert sim.model.calls == 4
    torch.testing.assert_close(found["integer"], found["simulated"], rtol=0, atol=0.05)
    with pytest.warns(UserWarning, match=r"QuantSim.export: forward reads and writes the buffer 'h'; the file keeps nothing"):
        report = sim.export(tmp_path / "model.onnx")
    assert any("reads and writes the buffer 'h'" in note for note in report.notes)
    assert [value.name for value in onnx.load(report.path).graph.output] == ["output"]
