"""Masks that are computed from flags and added to scores: no range of unpadded batches holds them, and none of padded ones the scores."""

import math

import pytest
import torch
from by_hand import decibels, simulated
from models import Forward
from torch import nn

import qsim
from qsim.graph.record.handing_on import is_mask

IDS = torch.randint(1, 50, (4, 10), generator=torch.Generator().manual_seed(0))
WHOLE = torch.ones(4, 10, dtype=torch.long)
PADDED = (torch.arange(10) < torch.tensor([[4], [6], [8], [10]])).long()


def model(mask, layers=1) -> nn.Module:
    """`mask` of the attention mask and what the layer reads."""
    torch.manual_seed(0)

    def forward(m, ids, attention):
        x = m.e(ids)
        added = mask(attention, x)
        for _ in range(layers):
            scores = m.q(x) @ m.k(x).mT / 4
            x = torch.softmax(scores + added if m.plus else scores - added, -1) @ m.v(x)
        return m.head(x)

    made = Forward(forward, e=nn.Embedding(50, 16), **{name: nn.Linear(16, 16) for name in ("q", "k", "v", "head")}).eval()
    made.plus = True
    return made


MASKS = {
    "as BERT's was": lambda attention, x: (1.0 - attention[:, None].to(x.dtype)) * -10000.0,
    "of flags": lambda attention, x: (attention == 0)[:, None].float() * -1e4,
    "of data": lambda attention, x: (x.abs().sum(-1) > 1e9)[:, None].float() * -1e4 + (attention == 0)[:, None] * -1e4,
    "where": lambda attention, x: torch.where(attention[:, None] > 0, 0.0, -1e4),
    "logarithm": lambda attention, x: (attention[:, None] + 1e-4).log() * 1000,
}


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_scores_keep_their_grid_beside_a_mask(mask, layers):
    m = model(mask, layers)
    sim = simulated(m, IDS, PADDED, config=qsim.int8())
    assert not any(key.startswith(("rsub", "mul", "log")) for key in sim.quantizers())
    assert any(left.reason.startswith(("a mask: ", "computed from integers or flags")) for left in sim.summary().left)
    with torch.no_grad():
        assert decibels(sim(IDS, PADDED), m(IDS, PADDED)) > 28


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_padding_counts_though_calibration_had_none(mask, compiled):
    torch._dynamo.reset()
    m = model(mask)
    sim = simulated(m, IDS, WHOLE, config=qsim.int8())
    run = torch.compile(sim, backend="eager") if compiled else sim
    with torch.no_grad():
        one, other = run(IDS, PADDED), run(torch.where(PADDED > 0, IDS, 7), PADDED)
    torch.testing.assert_close(one[PADDED > 0], other[PADDED > 0], rtol=0, atol=0)  # what is padded is read by nothing


def test_attention_in_one_operation():
    def forward(m, ids, attention):
        x, mask = m.e(ids), (1.0 - attention[:, None].float()) * -10000.0
        return torch.nn.functional.scaled_dot_product_attention(m.q(x), m.k(x), x, attn_mask=mask.expand(4, 10, 10))

    m = Forward(forward, e=nn.Embedding(50, 16), q=nn.Linear(16, 16), k=nn.Linear(16, 16)).eval()
    sim = simulated(m, IDS, WHOLE, config=qsim.int8())
    assert not any(key.startswith(("rsub", "mul")) or "attn_mask" in key for key in sim.quantizers())
    with torch.no_grad():
        one, other = sim(IDS, PADDED), sim(torch.where(PADDED > 0, IDS, 7), PADDED)
    torch.testing.assert_close(one[PADDED > 0], other[PADDED > 0], rtol=0, atol=0)


def test_a_mask_that_is_taken_off():
    m = model(lambda attention, x: (attention == 0)[:, None] * 1e4)
    m.plus = False
    sim = simulated(m, IDS, PADDED, config=qsim.int8())
    with torch.no_grad():
        assert decibels(sim(IDS, PADDED), m(IDS, PADDED)) > 28


def test_in_half_precision_it_is_rounded_as_all_else_is():
    m = model(lambda attention, x: (1.0 - attention[:, None].to(x.dtype)) * -1e6)
    sim = simulated(m, IDS, PADDED, config=qsim.fp16())
    assert any(key.startswith("mul") for key in sim.quantizers())


def test_numbers_that_a_layer_reads_are_no_mask():
    """Nor is what a softmax reads of layers alone, or a constant table of positions."""
    m = Forward(lambda m, ids, attention: m.a((attention[..., None] * 3.0).expand(4, 10, 16) / 7), a=nn.Linear(16, 16)).eval()
    assert set(simulated(m, IDS, PADDED, config=qsim.int8()).quantizers()) == {"div.output", "a.weight", "a.output"}
    table = nn.Parameter(torch.randn(10, 10))
    biased = model(lambda attention, x: table)
    assert not any("mask" in left.reason for left in simulated(biased, IDS, PADDED, config=qsim.int8()).summary().left)


def test_what_had_one_value_throughout_is_told():
    m = Forward(lambda m, x, scale: m.a(x * scale.to(x.dtype)[:, None]), a=nn.Linear(8, 8)).eval()
    sim = qsim.QuantSim(m, (torch.randn(4, 8), torch.ones(4, dtype=torch.long)))
    (problem,) = sim.calibrate([(torch.randn(4, 8), torch.ones(4, dtype=torch.long))], progress=False).problems
    assert problem.startswith("one value throughout, as a mask has in batches without padding: 'mul.input[1]' 1. What else")
    assert not sim.calibrate([(torch.randn(4, 8), torch.arange(4))], progress=False).problems


ANGLES = {
    "product": lambda t, f: t[:, None] * f,
    "outer": torch.outer,
    "einsum": lambda t, f: torch.einsum("i,j->ij", t, f),
    "matmul": lambda t, f: t[:, None] @ f[None],
}


def rotated(m, x, positions=None):
    positions = torch.arange(x.shape[0]) if positions is None else positions
    angles = m.angles(positions.float(), m.frequencies)
    return m.b(m.a(x) * angles.cos() + m.a(x).roll(1, -1) * angles.sin())


@pytest.mark.parametrize("given", [True, False], ids=["given", "made"])
@pytest.mark.parametrize("angles", ANGLES.values(), ids=ANGLES)
@pytest.mark.parametrize("target", [None, "onnxruntime", "openvino", "tensorrt"])
def test_positions_are_counted_and_what_data_is_computed_with_is_rounded(target, angles, given):
    """As constants are: a step of four radians would leave nothing of a cosine."""
    torch.manual_seed(0)
    m = Forward(rotated, a=nn.Linear(16, 16), b=nn.Linear(16, 16)).eval()
    m.register_buffer("frequencies", 10000 ** (-torch.arange(16) / 16))
    m.angles = angles
    inputs = (torch.randn(512, 16), torch.arange(512))[: 2 if given else 1]
    sim = simulated(m, *inputs, config=qsim.int8(**({} if target is None else {"target": target})))
    assert not any(name in key for key in sim.quantizers() for name in ("einsum", "matmul", "outer", "frequencies"))
    with torch.no_grad():
        assert decibels(sim(*inputs), m(*inputs)) > 32
        if target is None:
            torch._dynamo.reset()
            compiled = torch.compile(sim, backend="eager")(*inputs)
            torch.testing.assert_close(compiled, sim(*inputs), rtol=1e-5, atol=1e-5)


def test_a_product_of_weights_is_arithmetic_of_the_target():
    m = Forward(lambda m, x: x @ (m.left @ m.right), a=nn.Linear(1, 1)).eval()
    m.left, m.right = nn.Parameter(torch.randn(8, 2)), nn.Parameter(torch.randn(2, 8))
    assert {"left", "right", "matmul.output"} <= set(simulated(m, torch.randn(4, 8), config=qsim.int8()).quantizers())


def test_what_is_counted_is_named_in_the_summary():
    m = Forward(lambda m, x, t: m.b(torch.relu(m.a(x)) + (t[:, None] / 1000.0).sin()), a=nn.Linear(8, 8), b=nn.Linear(8, 8)).eval()
    sim = simulated(m, torch.randn(4, 8), torch.tensor([1, 50, 900, 20]), config=qsim.int8())
    assert {left.name: left.reason[:35] for left in sim.summary().left} == {
        "div": "computed from integers or flags alo",
        "sin": "computed from integers or flags alo",
    }
    assert "sin.output" in sim.quantizers()


@pytest.mark.parametrize("target", ["default", "onnxruntime", "tensorrt"])
@pytest.mark.parametrize(
    "added",
    [
        lambda m, scores, padding: scores + m.hidden * -100.0,  # Swin
        lambda m, scores, padding: scores * (1 - m.hidden) + -1e4 * m.hidden,  # the first GPT
        lambda m, scores, padding: scores * (1 - m.hidden) + -1e4 * m.hidden + padding,
        lambda m, scores, padding: scores + m.bias + m.hidden * -1e4,
    ],
    ids=["-100", "-10000", "two masks", "beside positions"],
)
def test_constants_that_hide_scores_are_no_numbers_of_a_grid(added, target):
    torch.manual_seed(0)

    def forward(m, ids, attention):
        x = m.e(ids)
        padding = (1.0 - attention[:, None].to(x.dtype)) * -10000.0
        return m.head(torch.softmax(added(m, m.q(x) @ m.k(x).mT / 4, padding), -1) @ m.v(x))

    layers = {name: nn.Linear(16, 16) for name in ("q", "k", "v", "head")}
    m = Forward(forward, e=nn.Embedding(50, 16), **layers).eval()
    m.bias = nn.Parameter(torch.randn(10, 10))
    m.register_buffer("hidden", torch.triu(torch.ones(10, 10), 1))
    sim = simulated(m, IDS, PADDED, config=qsim.int8(target=target))
    assert not any(float(q.encoding.min) < -60 for q in sim.quantizers().values() if q.encoding is not None and q.encoding.min.numel() == 1)
    with torch.no_grad():
        assert decibels(sim(IDS, PADDED), m(IDS, PADDED)) > 28
    minmax = qsim.int16().override("*", activation={"method": "minmax"})
    with torch.no_grad():
        assert decibels(simulated(m, IDS, PADDED, config=minmax)(IDS, PADDED), m(IDS, PADDED)) > 70


def test_numbers_below_zero_are_no_mask_by_themselves():
    """Such as a bias of distances: it is quantized as constants are."""
    torch.manual_seed(0)
    distance = -(torch.arange(10)[:, None] - torch.arange(10)).abs() * 10.0

    def forward(m, x):
        return m.head(torch.softmax(m.q(x) @ m.k(x).mT + distance, -1) @ x)

    m = Forward(forward, **{name: nn.Linear(16, 16) for name in ("q", "k", "head")}).eval()
    sim = simulated(m, torch.randn(4, 10, 16), config=qsim.int8())
    assert "add.output" in sim.quantizers()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_is_a_mask(dtype):
    """Infinite, or as low as the lowest number, beside a NaN too; empty and float8 ones are none."""
    made = {True: [(1, -math.inf), (math.nan, -math.inf), (torch.finfo(dtype).min, 0)], False: [(1, 2), (math.nan, 1), (-6e4, 0), ()]}
    for expected, every in made.items():
        for values in every:
            t = torch.tensor(values, dtype=dtype)
            assert [is_mask(t), is_mask(torch.stack([t, t], 1).T)] == [expected, expected], values
    assert not is_mask(torch.zeros(2).to(torch.float8_e4m3fn))
    huge = torch.finfo(dtype).max
    for values in ([-huge, 0, huge], [-math.inf, math.inf], [math.nan, -math.inf, math.inf], [-huge, math.inf]):
        assert not is_mask(torch.tensor(values, dtype=dtype))
    hiding = {True: [(0, -100), (-0.0, -math.inf, -60)], False: [(0, 0), (-100, -100), (0, -100, -1), (0, -100, math.nan), (0, 1, -100)]}
    for expected, every in hiding.items():
        for values in every:
            assert is_mask(torch.tensor(values, dtype=dtype), added=True) == expected, values


def test_activations_that_explode_are_no_mask():
    """Of a network whose statistics were never set, for instance: as high as they are low."""
    torch.manual_seed(0)
    m = Forward(lambda m, x: m.c(m.a(x) + m.b(x)), a=nn.Conv2d(3, 8, 3), b=nn.Conv2d(3, 8, 3), c=nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(4, 3, 12, 12)
    expected = set(simulated(m, x, config=qsim.int8(target="onnxruntime")).quantizers())
    with torch.no_grad():
        for layer in (m.a, m.b):
            layer.weight *= 1e13
    sim = simulated(m, x, config=qsim.int8(target="onnxruntime"))
    assert set(sim.quantizers()) == expected
    with torch.no_grad():
        assert decibels(sim(x), m(x)) > 30
