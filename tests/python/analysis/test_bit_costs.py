"""What bits cost: multiplications beside torch's own counter, bytes and bit operations counted by hand."""

import pytest
import torch
import torch.nn.functional as F
from models import Branches, Calls, ConvNet, Forward, Perceptron, seeded
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import qsim
from qsim.analysis.bit_choices import choices_of
from qsim.analysis.bit_costs import CostModel, bytes_of
from qsim.analysis.bit_operations import UncountedError, products_of

IMAGES = torch.randn(3, 1, 12, 12, generator=torch.Generator().manual_seed(1))


def attention(self, x):
    q, k, v = self.qkv(x).chunk(3, -1)
    y = (q @ k.transpose(1, 2)).softmax(-1) @ v
    return torch.einsum("btc,oc->bto", y, self.out.weight)


NETWORKS = {
    "convolutions": (ConvNet, IMAGES),
    "branches": (Branches, torch.randn(2, 2, 6, 6)),
    "perceptron": (Perceptron, torch.randn(5, 6)),
    "attention": (lambda: Forward(attention, qkv=nn.Linear(8, 24), out=nn.Linear(8, 8, bias=False)), torch.randn(2, 5, 8)),
    "fused attention": (lambda: Calls(lambda x: F.scaled_dot_product_attention(x, x, x)), torch.randn(2, 3, 5, 8)),
    "transposed": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 6, 3, 2, groups=2), nn.Conv2d(6, 3, 1)), torch.randn(2, 4, 5, 5)),
    "added": (lambda: Forward(lambda s, x: torch.addmm(s.a.bias, x, s.a.weight.t()), a=nn.Linear(6, 3)), torch.randn(4, 6)),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_multiplications_are_those_of_torchs_counter(name):
    make, x = NETWORKS[name]
    model = seeded(make)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):  # it does not know the CPU's fused one
        model(x)
    products = products_of(qsim.QuantSim(model, x))
    assert 2 * sum(product.multiplications for product in products) == counter.get_total_flops()


def test_operands_are_found_behind_what_moves_them():
    make, x = NETWORKS["attention"]
    products = {product.operands: product.name for product in products_of(qsim.QuantSim(seeded(make), x))}
    assert products == {
        ("input", "qkv.weight"): "linear",
        ("qkv.output", "qkv.output"): "matmul",
        ("softmax.output", "qkv.output"): "matmul",
        ("matmul_2.output", "out.weight"): "einsum",
    }


def test_what_is_not_counted_is_an_error_that_names_it():
    x = torch.randn(2, 4)
    model = seeded(lambda: Forward(lambda s, x: s.b(x, x), b=nn.Bilinear(4, 4, 2)))
    with pytest.raises(UncountedError, match="multiplications of bilinear"):
        products_of(qsim.QuantSim(model, x))


def test_bytes_by_hand():
    channels = qsim.TensorSpec(symmetric=True, axis=0)
    assert bytes_of(channels, (3, 5), 4) == 8 + 3 * 4  # 15 half bytes take 8
    assert bytes_of(channels, (3, 5), 8) == 15 + 3 * 4
    assert bytes_of(channels, (3, 5), "float") == 60
    blocks = qsim.TensorSpec(axis=1, block_size=4)
    assert bytes_of(blocks, (3, 6), 4) == 9 + 3 * 2 * 4 + 3  # six zero points of half a byte


@pytest.mark.parametrize("candidates", [(4, 8), (3, 16, "float")])
def test_costs_by_hand(candidates):
    sim = qsim.QuantSim(seeded(Perceptron), torch.randn(5, 6), qsim.int4())
    choices = choices_of(sim, candidates)
    assert [choice.name for choice in choices] == ["input", "fc1.weight", "fc1.output", "fc2.weight", "fc2.output"]
    model = CostModel(sim, choices, products_of(sim))
    for picked in [(0, 1, 0, 0, 1), (1, 0, 1, 1, 0), (0, 0, 0, 0, 0)]:
        bits = [32 if candidates[a] == "float" else candidates[a] for a in picked]
        first, second = 6 * 16, 16 * 3
        stored = [first * bits[1] / 8 + (4 * 16 if bits[1] < 32 else 0), second * bits[3] / 8 + (4 * 3 if bits[3] < 32 else 0)]
        costs = model.costs(picked)
        assert costs.size == pytest.approx((sum(stored) + 4 * 19) / (4 * (first + second + 19)))
        multiplied = first * bits[0] * bits[1] + second * bits[2] * bits[3]
        assert costs.bit_operations == pytest.approx(multiplied / (1024 * (first + second)))
        assert costs.tensors == pytest.approx(sum(a > 0 for a in picked) / 5)


def test_what_the_config_leaves_in_float_counts_as_float():
    sim = qsim.QuantSim(seeded(Perceptron), torch.randn(5, 6), qsim.int4().override("fc2", off=True))
    costs = CostModel(sim, choices_of(sim, (4, 8)), products_of(sim)).costs((0, 0, 0))
    assert costs.size == pytest.approx((48 + 64 + 4 * (48 + 19)) / (4 * (96 + 48 + 19)))
    assert costs.bit_operations == pytest.approx((96 * 16 + 48 * 4 * 32) / (1024 * 144))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "got nothing"),
        ({"size": 1.5}, r"got size=1\.5; expected a share"),
        ({"tensors": "few"}, "got tensors='few'"),
        ({"size": True}, "True"),
    ],
)
def test_budgets_are_shares(given, message):
    with pytest.raises(ValueError, match=message):
        qsim.Budget(**given)


def test_a_tied_table_counts_on_each_of_its_grids():
    tied = nn.Embedding(50, 16)
    model = seeded(lambda: Forward(lambda s, ids: F.linear(s.table(ids).tanh(), s.table.weight), table=tied))
    for target, tables, zero_points in (
        ("onnxruntime", [1, 50], 1),
        ("openvino", [50], 0),
    ):  # scales: of rows that are looked up, and of a product
        sim = qsim.QuantSim(model, torch.arange(8), qsim.int8(target=target))
        sim.calibrate([torch.arange(50)], progress=False)
        weights = [key for key, decided in sim.decisions.quantizers.items() if decided.parameter is not None]
        assert [sim.quantizers()[key].encoding.scale.numel() for key in weights] == tables
        choices = choices_of(sim, (4, 8, "float"))
        costs = CostModel(sim, choices, None)
        for picked, bits in enumerate((4, 8)):
            stored = sum(800 * bits // 8 + 4 * scales for scales in tables) + zero_points
            assert costs.costs([picked] * len(choices)).size == pytest.approx(stored / 3200)
        assert costs.costs([2 if len(choice.candidates) > 2 else 1 for choice in choices]).size == 1
