"""What mainstream architectures are made of leaves for ONNX Runtime, and computes there what the simulation says."""

import math
from collections import namedtuple

import onnx
import onnxruntime as ort
import pytest
import torch
import torch.nn.functional as F
from models import Forward
from torch import nn
from transformers.integrations import moe

import qsim
from qsim.onnx.decomposition import Decomposition
from qsim.trace.capture import capture


def exported(model, path, *example, batch=None):
    """The report of an export whose simulation on integers is compared with ONNX Runtime."""
    sim = qsim.QuantSim(model.eval(), example, qsim.int8(target="onnxruntime"))
    sim.calibrate([example], progress=False)
    return sim.export(path / "model.onnx", verify=[example if batch is None else batch])


def differing(report, reference="on integers"):
    return sum(difference.mismatching for difference in report.verification.differences[reference, "optimised"].values())


def tokens(*shape):
    return torch.randint(0, 20, shape)


def positions(m, x):
    return m.f(m.e(x) + m.p(torch.arange(x.shape[1])))


def test_what_is_made_of_positions_alone(tmp_path):
    torch.manual_seed(0)
    model = Forward(positions, e=nn.Embedding(20, 16), p=nn.Embedding(9, 16), f=nn.Linear(16, 4))
    report = exported(model, tmp_path, tokens(3, 7), batch=(tokens(50, 7),))
    assert differing(report) == 0
    assert "p.weight" in report.names


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 3])
@pytest.mark.parametrize("bags", ["matrix", "offsets", "last offset"])
def test_embedding_bag(mode, padding, bags, tmp_path):
    torch.manual_seed(0)
    table = nn.EmbeddingBag(20, 16, mode=mode, padding_idx=padding, include_last_offset=bags == "last offset")
    offsets = torch.tensor([0, 3, 3, 9, 20])  # the second bag is empty
    example = (tokens(6, 5),) if bags == "matrix" else (tokens(20), offsets)
    report = exported(Forward(lambda m, *x: m.f(m.e(*x)), e=table, f=nn.Linear(16, 4)), tmp_path, *example)
    assert differing(report) == 0


def test_a_view_of_what_attention_returns(tmp_path):
    """Decomposed attention has other strides than the fused one, which the view was traced with."""
    torch.manual_seed(0)

    def forward(m, x):
        q, k, v = (f(x).view(len(x), 9, 2, 8).transpose(1, 2) for f in (m.q, m.k, m.v))
        return m.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(len(x), 9, -1))

    report = exported(Forward(forward, **{name: nn.Linear(16, 16) for name in "qkvo"}), tmp_path, torch.randn(3, 9, 16))
    assert report.verification.differences["simulation", "not optimised"]["output"].largest <= 1


def _mask(*shape):
    return torch.linspace(-2, 2, math.prod(shape)).view(shape)


ATTENTION = {  # shape of the operands; the mask; options
    "no batch": ((5, 16), None, {}),
    "no heads": ((4, 5, 16), None, {}),
    "no heads, causal": ((4, 5, 16), None, {"is_causal": True, "scale": 0.3}),
    "no heads, a mask of the batch": ((4, 5, 16), lambda: _mask(1, 5, 5), {}),
    "no heads, a mask of all": ((4, 5, 16), lambda: torch.ones(5, 5, dtype=torch.bool).tril(), {}),
    "windows": ((4, 3, 2, 5, 16), None, {}),
    "windows, causal": ((4, 3, 2, 5, 16), None, {"is_causal": True}),
    "windows, a mask of theirs": ((4, 3, 2, 5, 16), lambda: _mask(1, 3, 1, 5, 5), {}),
    "windows, a mask of heads": ((4, 3, 2, 5, 16), lambda: _mask(2, 5, 5), {}),
    "windows, a mask of all": ((4, 3, 2, 5, 16), lambda: _mask(5, 5), {}),
    "windows of windows": ((4, 3, 2, 2, 5, 16), None, {}),
}


@pytest.mark.parametrize("name", ATTENTION)
def test_attention_over_any_number_of_dimensions(name, tmp_path):
    """As in NesT, Twins and Hiera, whose windows are a dimension of their own; torch's exporter takes four."""
    torch.manual_seed(0)
    shape, mask, options = ATTENTION[name]

    def forward(m, x):
        return m.out(F.scaled_dot_product_attention(m.q(x), m.k(x), m.v(x), None if mask is None else mask(), **options))

    layers = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "out")}
    report = exported(Forward(forward, **layers), tmp_path, torch.randn(shape))
    assert differing(report) == 0
    assert report.verification.differences["simulation", "not optimised"]["output"].largest <= 1


OF_INTEGERS = {
    "one less a mask": lambda mask: 1.0 - mask,
    "one less bytes": lambda mask: 1.0 - mask.to(torch.uint8),
    "two less a comparison": lambda mask: 2.5 - (mask > 0).int(),
    "a limit": lambda mask: mask.clamp(0.5),
}


@pytest.mark.parametrize("name", OF_INTEGERS)
def test_numbers_beside_integers(name, tmp_path):
    """As in XLNet; torch's own export fails for differences."""
    forward = OF_INTEGERS[name]
    example = torch.randn(2, 3, 4), torch.tensor([[1, 1, 0], [1, 0, 0]])
    report = exported(
        Forward(lambda m, x, mask: m.a(m.b(x) * forward(mask)[..., None]), a=nn.Linear(4, 4), b=nn.Linear(4, 4)), tmp_path, *example
    )
    assert differing(report) == 0


def test_attention_whose_operands_are_broadcast_is_refused(tmp_path):
    model = Forward(lambda m, x: F.scaled_dot_product_attention(m.q(x), x[:1], x), q=nn.Linear(16, 16))
    with pytest.raises(qsim.ExportError, match=r"4D query, key, and value .*expand them"):
        exported(model, tmp_path, torch.randn(4, 3, 2, 5, 16))


class Experts(nn.Module):
    """A mixture whose experts are one tensor, gathered for each token: transformers' "batched_mm"."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16))

    def forward(self, x):
        shares, chosen = torch.softmax(self.router(x), -1).topk(2, -1)
        rows = torch.bmm(x.repeat_interleave(2, 0).unsqueeze(1), self.experts[chosen.flatten()]).squeeze(1)
        return (rows.view(-1, 2, 16) * shares[..., None]).sum(1)


def test_experts_that_are_gathered(tmp_path):
    torch.manual_seed(0)
    report = exported(Experts(), tmp_path, torch.randn(64, 16))
    found = report.verification.differences["on integers", "optimised"].values()
    assert all(difference.step is None and difference.largest < 1e-5 for difference in found)  # in float: rows have scales of their own
    assert "experts" in report.names


class SortedExperts(Experts):
    """The same experts, rows sorted by them: transformers' "grouped_mm", what it is when nothing else is asked for."""

    def forward(self, x, choice):
        order = torch.argsort(choice)
        ends = torch.stack([(choice <= expert).sum() for expert in range(len(self.experts))]).int()
        rows = moe._grouped_mm(torch.relu(self.router(x))[order], self.experts, ends)
        return torch.zeros_like(rows).index_copy(0, order, rows)


@pytest.mark.parametrize("of", [4, 3])
def test_experts_whose_rows_are_sorted(of, tmp_path):
    """`of` 3: no row is the last expert's."""
    torch.manual_seed(0)
    model = SortedExperts()
    model.router, model.experts = nn.Linear(16, 8), nn.Parameter(torch.randn(4, 8, 16))
    x, choice = torch.randn(64, 16), torch.arange(64) * 7 % of
    sim = qsim.QuantSim(model, (x, choice))
    sim.calibrate([(x, choice)], progress=False)
    report = sim.export(tmp_path / "experts.onnx", verify=[(x, choice)])
    found = report.verification.differences["on integers", "optimised"].values()
    assert all(difference.largest < 1e-5 for difference in found)
    assert "experts" in report.names
    y = ort.InferenceSession(tmp_path / "experts.onnx").run(None, {"x": x[:5].numpy(), "choice": choice[:5].numpy()})
    torch.testing.assert_close(torch.from_numpy(y[0]), sim(x[:5], choice[:5]), rtol=1e-4, atol=1e-4)


def test_rows_that_a_mask_chooses(tmp_path):
    """As BART's end-of-sentence tokens: how many there are is a number that the graph makes, once, also where PyTorch takes it apart."""
    torch.manual_seed(0)

    def forward(m, x):
        chosen = F.relu(m.a(x))[x[..., 0] > 0, :]
        return m.b(chosen.narrow(1, 0, 8))  # which PyTorch takes apart

    model = Forward(forward, a=nn.Linear(16, 16), b=nn.Linear(8, 16))
    report = exported(model, tmp_path, torch.randn(4, 6, 16), batch=(torch.randn(9, 6, 16),))
    assert differing(report) == 0


class Positions(nn.Module):
    """A bias made of a table of positions by layers of its own, as in Swin v2 and timm's vit_relpos."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(5, 5, 2))
        self.up, self.down, self.q = nn.Linear(2, 8), nn.Linear(8, 1), nn.Linear(5, 5)

    def forward(self, x):
        return torch.softmax(self.q(x) + self.down(F.relu(self.up(self.table)))[..., 0], -1)


def test_layers_of_a_constant(tmp_path):
    torch.manual_seed(0)
    report = exported(Positions(), tmp_path, torch.randn(4, 5, 5))
    assert differing(report) == 0
    assert "table" in report.names


def test_windows_keep_their_grid(tmp_path):
    model = Forward(lambda m, x: m.a(x.unfold(1, 4, 2)), a=nn.Linear(4, 3))
    report = exported(model, tmp_path, torch.randn(4, 10))
    assert differing(report) == 0
    assert not report.lint


@pytest.mark.parametrize("sizes", [(3,), (3, 5), (2, 3, 4)], ids=str)
def test_adaptive_pooling_over_windows_that_differ(sizes, tmp_path):
    pool = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}[len(sizes)]
    torch.manual_seed(0)
    report = exported(Forward(lambda m, x: pool(F.relu(m.a(x)), sizes), a=nn.Linear(7, 7)), tmp_path, torch.randn(2, 3, *[7] * len(sizes)))
    assert differing(report) == 0


Result = namedtuple("Result", ["scores", "count"])


def test_what_is_no_tensor_is_left_out(tmp_path):
    def forward(m, x):
        y = m.a(x)
        return Result(y, 3), None, "text", x.shape[0], {"x": y + 1.0, "none": None}

    report = exported(Forward(forward, a=nn.Linear(4, 3)), tmp_path, torch.randn(4, 4))
    assert list(report.verification.differences["on integers", "optimised"]) == ["output_0_scores", "output_4_x"]
    assert differing(report) == 0
    assert any("no tensor, and the file has not: output_0_count, output_2, output_3" in note for note in report.notes)


class Echo(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 3)

    def forward(self, x):
        return {"x": self.a(x)}


def test_an_output_that_is_called_as_an_input_is(tmp_path):
    report = exported(Echo(), tmp_path, torch.randn(4, 4))
    assert [value.name for value in onnx.load(report.path).graph.output] == ["output_x"]


WHOLE = {
    "operations in place": (True, lambda m, x: F.relu(m.a(x), inplace=True).add_(m.b(x)).mul_(2.0)),
    "assigned to a part": (True, lambda m, x: _assigned(m.a(x), m.b(x)) * 2.0),
    "dropped in evaluation": (True, lambda m, x: F.dropout(F.alpha_dropout(m.a(x), 0.5, m.training, True), 0.5, m.training, True) * 2.0),
    "a square": (True, lambda m, x: m.a(x).relu_().square()),
    "a copy that was asked for": (False, lambda m, x: _copied_first(m.a(x))),
}


def _assigned(y, z):
    y[:, 1:] += z[:, :-1]
    return y


def _copied_first(y):
    z = y.to(y.dtype, copy=True)
    z.add_(1.0)
    return z * y


@pytest.mark.parametrize("name", WHOLE)
def test_what_pytorch_need_not_take_apart(name, tmp_path):
    whole, forward = WHOLE[name]
    torch.manual_seed(0)
    model, x = Forward(forward, a=nn.Linear(6, 6), b=nn.Linear(6, 6)).eval(), torch.randn(8, 6)
    sim = qsim.QuantSim(model, x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x.clone()], progress=False)
    decomposition = Decomposition(capture(sim, (x,), {}).exported)
    decomposition.program().run_decompositions({})
    assert decomposition.skipped == whole
    report = sim.export(tmp_path / "model.onnx", verify=[x.clone()])
    assert report.verification.differences["simulation", "not optimised"]["output"].largest <= 1


@pytest.mark.parametrize("norm", [None, nn.LayerNorm(8)])
@pytest.mark.parametrize("padding", [[6, 4, 6, 2], [6, 6, 6, 6]])
def test_padded_positions_are_what_the_model_in_eager_mode_makes_of_them(padding, norm, tmp_path):
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Forward(lambda m, x, mask: m.encoder(x, src_key_padding_mask=mask), encoder=nn.TransformerEncoder(layer, 1, norm)).eval()
    x, ends = torch.randn(4, 6, 8), torch.arange(6) >= torch.tensor(padding)[:, None]
    sim = qsim.QuantSim(model, (x, ends), qsim.int16())
    sim.calibrate([(x, ends)], progress=False)
    report = sim.export(tmp_path / "model.onnx")
    session = ort.InferenceSession(report.path, providers=["CPUExecutionProvider"])
    for mask in (ends, ends.flip(0), ends.flip(1)):  # padded in front, nothing is packed
        with torch.no_grad():
            expected = sim(x, mask)
            with sim.integer():
                torch.testing.assert_close(sim(x, mask), expected, rtol=0, atol=1e-3)
        names = [value.name for value in session.get_inputs()]
        found = session.run(None, dict(zip(names, (x.numpy(), mask.numpy()), strict=True)))[0]
        torch.testing.assert_close(torch.from_numpy(found), expected, rtol=0, atol=1e-3)


class DynamicCache:
    """As Hugging Face's: no container that torch knows."""

    def __init__(self, keys):
        self.keys = keys


def test_a_cache_among_the_outputs_is_refused_with_the_cure(tmp_path):
    model = Forward(lambda m, x: (m.a(x), DynamicCache(x)), a=nn.Linear(4, 4)).eval()
    sim = qsim.QuantSim(model, torch.randn(2, 4), qsim.int8())
    sim.calibrate([torch.randn(8, 4)], progress=False)
    with pytest.raises(qsim.ExportError, match=r"forward returns a cache \(DynamicCache\).*use_cache"):
        sim.export(tmp_path / "model.onnx")
    assert not (tmp_path / "model.onnx").exists()
