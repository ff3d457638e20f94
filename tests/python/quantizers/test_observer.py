import copy
import math
import pickle

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import qsim
from qsim import CalibrationError, Observer, TensorSpec
from qsim.quantizers.observer import Counts

INF, NAN = math.inf, math.nan
GRANULARITIES = [(None, None), (0, None), (1, None), (-1, None), (1, 2), (-2, 3)]


def batches(seed=0, count=3):
    """Batches with every kind of value; the shape is that of a small image batch."""
    generator = torch.Generator().manual_seed(seed)
    made = [torch.randn(2, 5, 4, generator=generator) * 10**i for i in range(count)]
    for i, special in enumerate([NAN, INF, -INF, -0.0, 3e38, -3e38, 1e-45]):
        made[i % count].view(-1)[7 * i : 7 * i + 2] = special
    return made


def state(observer):
    return {name: tensor.clone() for name, tensor in observer.state_dict().items()}


def assert_same_state(a, b):
    a, b = state(a), state(b)
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert torch.equal(tensor, b[name]), name
        assert tensor.dtype == b[name].dtype


def expected_ranges(x, axis, block_size):
    """Brute force: the finite minimum and maximum of each slice, and for blocks of each line of each slice."""
    lines = np.moveaxis(x.numpy(), axis, 0)
    if block_size is None:
        groups = [line.ravel() for line in lines]
        shape = lines.shape[:1]
    else:
        rest = lines.reshape(len(lines), -1)
        starts = range(0, len(lines), block_size)
        groups = [rest[start : start + block_size, column] for start in starts for column in range(rest.shape[1])]
        shape = (len(starts), *lines.shape[1:])
    ends = [[end([v for v in group if np.isfinite(v)], default=empty) for group in groups] for end, empty in ((min, INF), (max, -INF))]
    ranges = [np.array(values, np.float32).reshape(shape) for values in ends]
    return [torch.from_numpy(r if block_size is None else np.moveaxis(r, 0, axis).copy()) for r in ranges]


def test_counts_and_range_of_a_tensor():
    observer = Observer()
    x = torch.tensor([[NAN, 2.0, INF], [-3e38, -INF, -INF]])
    assert observer(x) is x
    assert observer.counts == Counts(elements=6, nans=1, positive_infs=1, negative_infs=2)
    assert observer.counts.nonfinite == 4
    assert (observer.min.item(), observer.max.item()) == (torch.tensor(-3e38).item(), 2.0)
    assert observer.sketch.sum() == 2


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES[1:])
def test_ranges_per_channel_and_block(axis, block_size):
    observer = Observer(axis, block_size)
    for x in batches():
        observer(x)
    expected = [expected_ranges(x, axis, block_size) for x in batches()]
    assert torch.equal(observer.min, torch.stack([low for low, _ in expected]).amin(0))
    assert torch.equal(observer.max, torch.stack([high for _, high in expected]).amax(0))


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
def test_merging_is_exact_and_order_free(axis, block_size):
    whole, parts = Observer(axis, block_size), []
    for x in batches():
        whole(x)
        parts.append(Observer(axis, block_size))
        parts[-1](x)
    parts.append(Observer(axis, block_size))  # one that saw nothing
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        merged = copy.deepcopy(parts[order[0]])
        for i in order[1:]:
            merged.merge(parts[i])
        assert_same_state(merged, whole)


@given(st.lists(st.floats(width=32), max_size=50), st.integers(0, 50))
def test_cutting_into_batches_changes_nothing(values, cut):
    x = torch.tensor(values, dtype=torch.float32)
    whole, cut_up = Observer(), Observer()
    whole(x)
    for part in (x[:cut], x[cut:]):
        cut_up(part)
    assert_same_state(whole, cut_up)


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_dtypes_are_seen_as_their_float32_values(axis, block_size, dtype):
    x = batches()[0].to(dtype)
    observed, expected = Observer(axis, block_size), Observer(axis, block_size)
    observed(x)
    expected(x.float())
    assert_same_state(observed, expected)


def test_does_not_take_part_in_autograd():
    x = torch.randn(3, requires_grad=True)
    y = Observer()(x)
    assert y is x
    y.sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda o: pickle.loads(pickle.dumps(o))])
def test_copies_go_on_alone(axis, block_size, duplicate):
    first, second = batches()[:2]
    observer = Observer(axis, block_size)
    observer(first)
    twin = duplicate(observer)
    before = state(observer)
    twin(second)
    assert all(torch.equal(tensor, before[name]) for name, tensor in observer.state_dict().items())
    observer(second)
    assert_same_state(observer, twin)


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
def test_state_dict_is_stable_from_construction(axis, block_size):
    observer = Observer(axis, block_size)
    names = list(observer.state_dict())
    assert names == ["lowest", "highest", "counters", *(["sketch", "low_bits"] if axis is None else [])]
    observer(batches()[0])
    assert list(observer.state_dict()) == names
    fresh = Observer(axis, block_size)
    fresh.load_state_dict(observer.state_dict())
    assert_same_state(fresh, observer)
    observer.load_state_dict(Observer(axis, block_size).state_dict())
    assert observer.counts == Counts()
    fresh(batches()[1])


def test_shape_makes_the_state_known():
    assert Observer(1, shape=(-1, 5, -1)).min.shape == (5,)
    assert Observer(1, 2, shape=(2, 5, 4)).min.shape == (2, 3, 4)
    observer = Observer(1, shape=(2, 5, 4))
    other = Observer(1)
    other(torch.zeros(2, 3, 4))
    with pytest.raises(RuntimeError, match=r"lowest has shape \(3,\); expected \(5,\)"):
        observer.load_state_dict(other.state_dict())


def test_a_state_per_channel_does_not_load_into_one_per_tensor():
    """nn.Module itself would take the first channel."""
    per_channel = Observer(1)
    per_channel(torch.zeros(2, 3))
    with pytest.raises(RuntimeError, match=r"lowest has shape \(3,\); expected \(\)"):
        Observer().load_state_dict(per_channel.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=r"lowest has shape \(\); expected \(0,\)"):
        Observer(1).load_state_dict(Observer().state_dict(), strict=False)


def test_reset_forgets():
    observer = Observer(0)
    observer(batches()[0])
    observer.reset()
    assert_same_state(observer, Observer(0, shape=(2,)))
    per_tensor = Observer()
    per_tensor(batches()[0])
    per_tensor.reset()
    assert_same_state(per_tensor, Observer())


def test_the_state_keeps_its_dtypes():
    observer = torch.nn.Sequential(Observer())
    before = {name: tensor.dtype for name, tensor in observer.state_dict().items()}
    for change in (lambda m: m.half(), lambda m: m.to(torch.bfloat16), lambda m: m.double(), lambda m: m.to("cpu", torch.float16)):
        assert {name: tensor.dtype for name, tensor in change(observer).state_dict().items()} == before
    observer[0](torch.tensor([1e30, 3.0]))
    observer.half()
    assert observer[0].max.item() == torch.tensor(1e30).item()
    assert observer.to("meta")[0].lowest.is_meta


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
def test_compiles_without_graph_breaks(axis, block_size):
    eager, compiled = Observer(axis, block_size, shape=(2, 5, 4)), Observer(axis, block_size, shape=(2, 5, 4))
    run = torch.compile(lambda x: compiled(x) * 2, fullgraph=True, backend="aot_eager")
    for x in batches():
        assert torch.equal(run(x).nan_to_num(), (eager(x) * 2).nan_to_num())
    assert_same_state(compiled, eager)


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("symmetric", [False, True])
def test_minmax_spans_the_observed_range(axis, block_size, symmetric):
    observer = Observer(axis, block_size)
    x = torch.randn(2, 5, 4)
    observer(x)
    spec = TensorSpec(bits=6, axis=axis, block_size=block_size, symmetric=symmetric)
    encoding = observer.encoding(spec, method="minmax")
    scale, zero_point = qsim.reference.choose_qparams(observer.min, observer.max, -32, 31, symmetric=symmetric)
    assert torch.equal(encoding.scale, scale)
    assert torch.equal(encoding.zero_point, zero_point)
    assert (encoding.axis, encoding.block_size, encoding.dtype) == (axis, block_size, "int6")


@pytest.mark.parametrize("options", [{"percentile": 90.0}, {"percentile": 99.0}])
def test_percentile_and_its_option_reach_the_search(options):
    observer = Observer()
    x = torch.randn(10_000)
    observer(x)
    encoding = observer.encoding(TensorSpec(), method="percentile", **options)
    inside = ((x >= encoding.min) & (x <= encoding.max)).double().mean().item()
    assert abs(100 * inside - options["percentile"]) < 0.5


@pytest.mark.parametrize("method", ["mse", "tf_enhanced"])
def test_searched_ranges_clip_what_is_rare(method):
    """Independent of the search: at 4 bits its squared error is below that of the full range."""
    x = torch.distributions.StudentT(3.0).sample((20_000,))
    observer = Observer()
    observer(x)

    def error(encoding):
        q = (x / encoding.scale).round() + encoding.zero_point
        return (((q.clamp(-8, 7) - encoding.zero_point) * encoding.scale - x) ** 2).mean()

    spec = TensorSpec(bits=4)
    assert error(observer.encoding(spec, method)) < 0.8 * error(observer.encoding(spec, "minmax"))


def test_saturate_counts_infs_as_the_largest_finite_values():
    spec = TensorSpec(bits=4, method="mse", nonfinite="saturate")
    x = torch.tensor([-2.0, *torch.linspace(-1, 1, 50), 5.0])
    with_infs, explicit = Observer(), Observer()
    with_infs(torch.cat([x, torch.tensor([INF] * 30 + [-INF] * 20 + [NAN])]))
    explicit(torch.cat([x, torch.tensor([5.0] * 30 + [-2.0] * 20)]))
    assert with_infs.encoding(spec) == explicit.encoding(spec)
    assert with_infs.sketch.sum() == x.numel()  # what was collected is untouched


def test_negative_zero_shares_the_bin_of_zero():
    observer, explicit = Observer(), Observer()
    observer(torch.tensor([-0.0, -1.0, INF]))
    explicit(torch.tensor([0.0, -1.0, 0.0]))
    assert torch.equal(observer._sketch_with_infs(), explicit.sketch)


@pytest.mark.parametrize(
    ("observer", "data", "spec", "message"),
    [
        (Observer(name="fc.output"), [], TensorSpec(), "'fc.output' has no range: no batch reached it"),
        (Observer(name="fc.output"), [torch.empty(0)], TensorSpec(), "no batch reached it"),
        (Observer(), [torch.tensor([NAN, INF, INF])], TensorSpec(), "3 values, of which 1 NaN, 2 [+]Inf, 0 -Inf"),
        (Observer(), [torch.tensor([1.0, NAN])], TensorSpec(nonfinite="raise"), "2 values, of which 1 NaN.*nonfinite='raise'"),
        (Observer(0), [torch.tensor([[1.0], [NAN]])], TensorSpec(axis=0, method="minmax"), r"1 of 2 channels.*the first being \[1\]"),
        (Observer(0), [], TensorSpec(axis=0, method="minmax"), "no batch reached it"),
    ],
)
def test_without_a_range_the_error_says_why(observer, data, spec, message):
    for x in data:
        observer(x)
    before = state(observer)
    with pytest.raises(CalibrationError, match=message):
        observer.encoding(spec)
    assert all(torch.equal(tensor, before[name]) for name, tensor in observer.state_dict().items())


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda o: o.encoding(TensorSpec(axis=0, method="minmax")), "observed with axis=1.*axis=0"),
        (lambda o: o.encoding(TensorSpec(axis=1), method="mse"), "'mse' needs the sketch"),
        (lambda o: o.encoding(TensorSpec(axis=1), method="max"), "got method='max'"),
        (lambda o: o.merge(Observer(0)), "axis=0.*axis=1"),
        (lambda o: o.merge(Observer(1, shape=(2, 7))), r"shape \(7,\) into ranges of shape \(3,\)"),
        (lambda o: Observer(block_size=4), "got axis=None"),
        (lambda o: Observer(3)(torch.zeros(2, 2)), "no axis 3"),
    ],
)
def test_errors_say_what_was_got(call, message):
    observer = Observer(1)
    observer(torch.zeros(2, 3))
    with pytest.raises(ValueError, match=message):
        call(observer)
