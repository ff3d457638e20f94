import copy
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from levels import LEVELS, assert_same_output

import qsim
from qsim.training.clip_grad import _clip

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.float64]
NORMS = [2.0, 1.0, math.inf, 0.5, 3.0]


def gradients(shapes, dtypes, seed=0, scale=1.0, broken=0.0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for i, shape in enumerate(shapes):
        x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        values = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)
        special = values[torch.randint(3, shape, generator=generator)]
        made.append(torch.where(torch.rand(shape, generator=generator) < broken, special, x).to(dtypes[i % len(dtypes)]))
    return made


def parameters(grads):
    made = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in grads]
    for parameter, grad in zip(made, grads, strict=True):
        parameter.grad = grad
    return made


def check(grads, max_norm, norm_type=2.0, nonfinite="skip"):
    expected_grads = copy.deepcopy(grads)
    norm, counts = qsim.ops.clip_grad_(grads, max_norm, norm_type=norm_type, nonfinite=nonfinite)
    expected, expected_counts = qsim.reference.clip_grad_(expected_grads, max_norm, norm_type=norm_type, nonfinite=nonfinite)
    assert torch.equal(counts, expected_counts)
    torch.testing.assert_close(norm, expected, rtol=2e-7 if norm.dtype == torch.float32 else 1e-13, atol=0, equal_nan=True)
    for got, wanted in zip(grads, expected_grads, strict=True):
        # The coefficients may differ in the last place of float64, so a product may round to the neighbour.
        rtol = 1e-12 if got.dtype == torch.float64 else torch.finfo(got.dtype).eps
        torch.testing.assert_close(got, wanted, rtol=rtol, atol=torch.finfo(got.dtype).smallest_normal * rtol, equal_nan=True)


@given(
    st.lists(st.lists(st.integers(0, 30), max_size=3), min_size=1, max_size=5),
    st.permutations(DTYPES),
    st.sampled_from([0.0, 0.1, 1.0, 1e9, math.inf]),
    st.sampled_from(NORMS),
    st.sampled_from(["skip", "zero", "raise"]),
    st.sampled_from([0.0, 0.0, 0.001, 0.5]),
    st.integers(0, 1000),
)
def test_matches_reference(shapes, dtypes, max_norm, norm_type, nonfinite, broken, seed):
    check(gradients(shapes, dtypes, seed, broken=broken), max_norm, norm_type, nonfinite)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("norm_type", NORMS)
def test_large_gradients(dtype, norm_type):
    shapes = [(16384,), (3, 16385), (200, 300), (), (7,), (0, 4)]
    for broken in [0.0, 1e-4]:
        for nonfinite in ["skip", "zero"]:
            check(gradients(shapes, [dtype], broken=broken), 0.5, norm_type, nonfinite)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("coefficient", [1 / 3, 0.5, 1e-3, 0.999])
def test_every_half_value_is_rounded_to_the_nearest(dtype, coefficient):
    x = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(dtype)
    largest = torch.finfo(dtype).max
    grad, max_norm = x.clone(), coefficient * largest
    qsim.ops.clip_grad_([grad], max_norm, norm_type=math.inf, nonfinite="zero")
    factor = torch.tensor(max_norm / (largest + 1e-6), dtype=torch.float64).float()
    expected = (torch.where(x.isfinite(), x, 0).float() * factor).to(dtype)
    assert torch.equal(grad.view(torch.int16), expected.view(torch.int16))


@pytest.mark.parametrize("norm_type", NORMS)
@pytest.mark.parametrize("max_norm", [0.1, 1e6])
def test_equals_torch_on_finite_gradients(norm_type, max_norm):
    mine = parameters(gradients([(50, 60), (70,), (), (3, 3, 3, 3)], [torch.float32], seed=3))
    theirs = copy.deepcopy(mine)
    for parameter, original in zip(theirs, mine, strict=True):
        parameter.grad = original.grad.clone()
    got = qsim.clip_grad_norm_(mine, max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=0)
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-9)


def test_norms_beyond_float32_squares():
    grads = [torch.full((1000,), 1e30), torch.full((1000,), 3e38)]
    norm, _ = qsim.ops.clip_grad_(grads, 1.0)
    assert norm == torch.inf  # 9.5e39 is no float32, but the gradients are clipped to norm 1 all the same
    # The coefficient, 1e-40, is subnormal in float32.
    assert math.isclose(torch.cat(grads).double().norm().item(), 1.0, rel_tol=1e-5)
    small = [torch.full((100,), 1e-30)]
    norm, _ = qsim.ops.clip_grad_(small, 1.0)
    assert math.isclose(norm.item(), 1e-29, rel_tol=1e-6)
    assert small[0][0] == torch.tensor(1e-30)


def test_untouched_below_the_limit():
    grads = gradients([(1000,)], [torch.float32])
    before = [grad.clone() for grad in grads]
    qsim.ops.clip_grad_(grads, 1e3)
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


def test_strided_gradients():
    base = torch.randn(40, 50)
    kept = base.clone()
    views = [base[::2, ::3], base[1::2].t()]
    expected = [view.clone() for view in views]
    norm, _ = qsim.ops.clip_grad_(views, 0.1)
    expected_norm, _ = qsim.reference.clip_grad_(expected, 0.1)
    torch.testing.assert_close(norm, expected_norm, rtol=1e-6, atol=0)
    torch.testing.assert_close(views, expected, rtol=1e-6, atol=0)
    assert torch.equal(base[::2, 1::3], kept[::2, 1::3])
    with pytest.raises(ValueError, match="share memory"):
        qsim.ops.clip_grad_([torch.ones(1).expand(5)], 0.1)


def test_threads_do_not_matter():
    threads, results = torch.get_num_threads(), []
    try:
        for count in [1, 2, 5]:
            torch.set_num_threads(count)
            for norm_type in NORMS:
                grads = gradients([(300, 301), (70001,), (5,)], [torch.float64, torch.float32])
                results.append([norm_type, *qsim.ops.clip_grad_(grads, 0.3, norm_type=norm_type), *grads])
    finally:
        torch.set_num_threads(threads)
    for result in results:
        first = next(other for other in results if other[0] == result[0])
        assert all(torch.equal(a, b) for a, b in zip(result[1:], first[1:], strict=True))


_DIGEST = """
import hashlib, math, torch, qsim
torch.manual_seed(0)
digest = hashlib.sha256()
for dtype in [torch.float32, torch.float16, torch.bfloat16, torch.float64]:
    for p in [2.0, 1.0, math.inf]:
        grads = [torch.randn(n, dtype=torch.float64).to(dtype) for n in (5, 50, 70001)]
        grads[1][7] = torch.nan
        norm, counts = qsim.ops.clip_grad_(grads, 0.7, norm_type=p, nonfinite="zero")
        for tensor in [norm, counts, *grads]:
            digest.update(tensor.reshape(-1).contiguous().view(torch.uint8).numpy())
print(digest.hexdigest())
"""


@pytest.mark.parametrize("level", LEVELS[1:])
def test_every_level_gives_the_same_bits(level):
    assert_same_output(level, _DIGEST)


def test_accepts_what_torch_accepts():
    weight = torch.nn.Parameter(torch.ones(4))
    unused = torch.nn.Parameter(torch.ones(4))
    model = torch.nn.Linear(3, 2)
    for given_parameters in [weight, [weight, unused], (p for p in [unused, weight]), [("a", unused), ("b", weight)]]:
        weight.grad = torch.full((4,), 2.0)
        assert qsim.clip_grad_norm_(given_parameters, 1.0) == 4
        torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))
    assert qsim.clip_grad_norm_(model.parameters(), 1.0) == 0
    assert qsim.clip_grad_norm_([], 1.0) == 0
    model(torch.ones(1, 3)).sum().backward()
    assert qsim.clip_grad_norm_(model.named_parameters(), 1e-3) > 1e-3


def test_policies():
    def grads():
        return gradients([(10, 20), (30,)], [torch.float32], broken=0.05)

    skipped = parameters(grads())
    assert qsim.clip_grad_norm_(skipped, 1.0).isnan()
    assert all((parameter.grad == 0).all() for parameter in skipped)

    zeroed = parameters(grads())
    finite = torch.cat([grad.flatten() for grad in grads()])
    norm = qsim.clip_grad_norm_(zeroed, 1.0, nonfinite="zero")
    torch.testing.assert_close(norm, finite[finite.isfinite()].norm())
    assert all((parameter.grad[~grad.isfinite()] == 0).all() for parameter, grad in zip(zeroed, grads(), strict=True))

    raised = parameters(grads())
    with pytest.raises(RuntimeError, match=r"'weight': \d+ of 200 elements"):
        qsim.clip_grad_norm_([("weight", raised[0]), ("bias", raised[1])], 1.0, nonfinite="raise")
    with pytest.raises(RuntimeError, match=r"parameter 1 of shape \[30\]"):
        qsim.clip_grad_norm_(raised, 1.0, nonfinite="raise")
    for parameter, grad in zip(raised, grads(), strict=True):
        torch.testing.assert_close(parameter.grad, grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("norm_type", NORMS)
def test_norms_of_each_gradient(norm_type):
    grads = gradients([(300,), (40000,), (0,), (3, 5)], DTYPES, broken=0.01)
    finite = [grad[grad.isfinite()].double() for grad in grads]
    expected = [torch.linalg.vector_norm(x, norm_type).item() if x.numel() else 0.0 for x in finite]
    named = {f"layer{i}": p for i, p in enumerate(parameters(grads))}
    report = qsim.ClipReport()
    qsim.clip_grad_norm_(named.items(), 1.0, norm_type, nonfinite="zero", report=report)
    norms = report.per_parameter()
    assert list(norms) == [repr(name) for name in named]
    assert list(norms.values()) == pytest.approx(expected, rel=1e-12)
    assert report.norms.shape == (4,)


def test_groups_of_several_devices_join():
    for norm_type in NORMS:
        for nonfinite, broken in [("skip", 0.0), ("zero", 0.1), ("skip", 0.1)]:
            whole = gradients([(30,), (40,), (50,)], [torch.float32, torch.float64, torch.bfloat16], broken=broken)
            grouped = [grad.clone() for grad in whole]
            norm, counts = qsim.ops.clip_grad_(whole, 0.5, norm_type=norm_type, nonfinite=nonfinite)
            got, _, got_counts = _clip([grouped[:1], grouped[1:]], 0.5, norm_type, nonfinite)
            torch.testing.assert_close(got, norm, equal_nan=True)
            assert torch.equal(got_counts, counts)
            torch.testing.assert_close(grouped, whole)


@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16, torch.float64]])
@pytest.mark.parametrize("nonfinite", ["skip", "zero"])
def test_opcheck(dtypes, nonfinite):
    grads = gradients([(3, 4), (5,)], dtypes)
    torch.library.opcheck(torch.ops.qsim.clip_grad_.default, (grads, 0.5), {"nonfinite": nonfinite})
    torch.library.opcheck(torch.ops.qsim.grad_power_sum.default, (grads,), {"norm_type": 1.0})
    powers, counts = qsim.ops.grad_power_sum(grads)
    torch.library.opcheck(torch.ops.qsim.scale_grad_.default, (grads, powers, counts, 0.5))


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles(dynamic):
    def step(grads):
        norm, counts = qsim.ops.clip_grad_([grad * 2 for grad in grads], 1.0)
        return norm, counts, qsim.ops.clip_grad_(grads, 1.0)[0]

    compiled = torch.compile(step, fullgraph=True, dynamic=dynamic)
    for n in [3, 8]:
        grads, same = gradients([(n, 4), (5,)], [torch.float32]), gradients([(n, 4), (5,)], [torch.float32])
        torch.testing.assert_close(compiled(grads), step(same))
        torch.testing.assert_close(grads, same)


def test_public_function_compiles():
    weight = torch.nn.Parameter(torch.ones(4))
    weight.grad = torch.full((4,), 2.0)
    assert torch.compile(lambda: qsim.clip_grad_norm_([weight], 1.0), fullgraph=True)() == 4
    torch.testing.assert_close(weight.grad, torch.full((4,), 0.5))


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_versions_are_bumped(mode):
    grad = torch.ones(3)
    with mode():
        qsim.ops.clip_grad_([grad], 0.1)
    assert grad._version == 1


def test_errors_say_what_was_expected():
    grad = torch.ones(3)
    for keywords, message in [
        ({"max_norm": -1.0}, "max_norm is -1"),
        ({"max_norm": math.nan}, "max_norm is nan"),
        ({"norm_type": 0.0}, "norm_type is 0"),
        ({"nonfinite": "ignore"}, "expected 'skip', 'zero' or 'raise'"),
    ]:
        with pytest.raises(ValueError, match=message):
            qsim.ops.clip_grad_([grad], **{"max_norm": 1.0, **keywords})
    assert torch.equal(grad, torch.ones(3))
    with pytest.raises(TypeError, match="expected float32, float16"):
        qsim.ops.clip_grad_([torch.ones(3, dtype=torch.int64)], 1.0)
    with pytest.raises(RuntimeError, match="no_grad"):
        qsim.ops.clip_grad_([torch.ones(3, requires_grad=True)], 1.0)
    table = torch.nn.Embedding(5, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(TypeError, match=r"'weight' is torch.sparse_coo, expected a dense one"):
        qsim.clip_grad_norm_(table.named_parameters(), 1.0)


class TestReport:
    def test_names_what_was_not_finite_after_the_step(self):
        model, report = torch.nn.Linear(3, 2), qsim.ClipReport()
        model.weight.grad, model.bias.grad = torch.full((2, 3), math.nan), torch.ones(2)
        assert qsim.clip_grad_norm_(model.named_parameters(), 1.0, report=report).isnan()
        assert (report.labels, report.counts.tolist(), report.nonfinite()) == (("'weight'", "'bias'"), [6, 0], {"'weight'": 6})
        model.weight.grad = None
        qsim.clip_grad_norm_(model.parameters(), 1.0, report=report)
        assert (report.labels, report.nonfinite()) == (("parameter 1 of shape [2]",), {})

    def test_is_filled_before_an_error_and_emptied_without_gradients(self):
        parameter, report = torch.nn.Parameter(torch.ones(2)), qsim.ClipReport()
        parameter.grad = torch.tensor([math.inf, 1.0])
        with pytest.raises(RuntimeError, match="1 of 2 elements"):
            qsim.clip_grad_norm_([parameter], 1.0, nonfinite="raise", report=report)
        assert report.nonfinite() == {"parameter 0 of shape [2]": 1}
        parameter.grad = None
        assert qsim.clip_grad_norm_([parameter], 1.0, report=report) == 0
        assert (report.labels, report.counts, report.nonfinite()) == ((), None, {})

    def test_filling_it_reads_nothing_back(self):
        parameter = torch.nn.Parameter(torch.ones(2, device="meta"))
        parameter.grad = torch.ones(2, device="meta")  # a tensor without values: reading it would raise
        report = qsim.ClipReport()
        qsim.clip_grad_norm_([parameter], 1.0, report=report)
        assert report.counts.is_meta
