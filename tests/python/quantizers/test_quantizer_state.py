import copy
import pickle

import pytest
import torch
from quantizers import GRANULARITIES, SHAPE, calibrated

from qsim import Encoding, NoEncodingError, Quantizer, TensorSpec
from qsim.quantizers.observer import Counts


@pytest.mark.parametrize(("axis", "block_size"), GRANULARITIES)
@pytest.mark.parametrize("learnable", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_state_dict_is_stable_from_construction(axis, block_size, learnable, known):
    spec = TensorSpec(axis=axis, block_size=block_size, method="minmax", learnable=learnable)
    x = torch.randn(SHAPE)
    make = lambda: Quantizer(spec, shape=SHAPE if known else None)  # noqa: E731
    names = list(make().state_dict())
    quantizer = calibrated(spec, x, shape=SHAPE if known else None)
    assert list(quantizer.state_dict()) == names
    assert {"scale", "zero_point", "observer.lowest", "observer.highest", "observer.counters"} <= set(names)
    fresh = make()
    fresh.load_state_dict(quantizer.state_dict())
    assert torch.equal(fresh(x), quantizer(x))
    assert fresh.encoding == quantizer.encoding
    assert fresh.compute_encoding() == quantizer.encoding  # what was observed came along
    assert [name for name, _ in fresh.named_parameters()] == (["scale"] if learnable else [])


def test_loading_an_uncalibrated_state_takes_the_encoding_away():
    quantizer = calibrated(TensorSpec(method="minmax"), torch.ones(3))
    quantizer.load_state_dict(Quantizer(TensorSpec()).state_dict())
    with pytest.raises(NoEncodingError):
        quantizer(torch.ones(3))


def test_a_partial_state_leaves_the_encoding():
    quantizer = calibrated(TensorSpec(method="minmax"), torch.ones(3))
    before = quantizer.encoding
    quantizer.load_state_dict({}, strict=False)
    assert quantizer.encoding == before


def test_states_of_other_granularity_are_an_error():
    per_channel = calibrated(TensorSpec(axis=0, method="minmax"), torch.randn(4, 3))
    with pytest.raises(RuntimeError, match=r"the state is of another spec.*\[-128.0, 127.0, 0.0\]"):
        Quantizer(TensorSpec()).load_state_dict(per_channel.state_dict(), strict=False)
    with pytest.raises(RuntimeError, match=r"scale has shape \(4,\); expected \(5,\)"):
        Quantizer(TensorSpec(axis=0), shape=(5, 3)).load_state_dict(per_channel.state_dict())


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"bits": 4}, {}),
        ({}, {"bits": 4}),
        ({"signed": False}, {}),
        ({"symmetric": True, "narrow": True}, {"symmetric": True}),
        ({"dtype": "float8_e4m3fn"}, {"dtype": "float8_e5m2"}),
        ({"dtype": "float16"}, {"dtype": "bfloat16"}),
        ({"axis": 0}, {"axis": 1}),
        ({"axis": (0, 1), "block_size": (2, 4)}, {"axis": (0, 1), "block_size": (4, 4)}),
        ({"axis": 1, "block_size": 4}, {"axis": 1, "block_size": 5}),
    ],
)
def test_a_state_of_another_grid_is_an_error(theirs, ours):
    x = torch.rand(4, 4)
    saved = calibrated(TensorSpec(**{"method": "minmax", **theirs}), x).state_dict()
    fresh = Quantizer(TensorSpec(**{"method": "minmax", **ours}), shape=(4, 4), name="fc.weight")
    before = {key: t.clone() for key, t in fresh.state_dict().items()}
    with pytest.raises(RuntimeError, match=r"'fc\.weight'.*the state is of another spec: its grid .* is \[.*\], and this quantizer's is"):
        fresh.load_state_dict(saved, strict=False)
    for key in ("scale", "zero_point", "grid"):
        assert torch.equal(getattr(fresh, key).nan_to_num(-1.0), before[key].nan_to_num(-1.0))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))])
@pytest.mark.parametrize("learnable", [False, True])
def test_copies_are_complete_and_independent(duplicate, learnable):
    x = torch.randn(4, 3)
    quantizer = calibrated(TensorSpec(axis=0, method="minmax", learnable=learnable), x)
    twin = duplicate(quantizer)
    assert torch.equal(twin(x), quantizer(x))
    before = quantizer.encoding
    twin.set_encoding(Encoding(torch.ones(4), torch.zeros(4, dtype=torch.int32), -128, 127, axis=0))
    assert quantizer.encoding == before
    assert twin.observer is not quantizer.observer


@pytest.mark.parametrize("learnable", [False, True])
def test_the_state_keeps_its_dtypes(learnable):
    x = torch.randn(10)
    quantizer = calibrated(TensorSpec(method="minmax", learnable=learnable), x)
    before = quantizer.encoding
    if learnable:
        quantizer(x).sum().backward()
    parameters = list(quantizer.parameters())
    quantizer.half().bfloat16().double()
    assert quantizer.encoding == before
    assert all(a is b for a, b in zip(quantizer.parameters(), parameters, strict=True))
    assert all(p.dtype == p.grad.dtype == torch.float32 for p in quantizer.parameters())
    assert quantizer(x.half()).dtype == torch.float16


def test_an_encoding_is_a_value_of_its_own():
    quantizer = calibrated(TensorSpec(method="minmax"), torch.ones(3))
    encoding = quantizer.encoding
    quantizer.set_encoding(Encoding(encoding.scale * 2, encoding.zero_point, -128, 127))
    assert torch.equal(quantizer.encoding.scale, 2 * encoding.scale)


@pytest.mark.parametrize(
    ("encoding", "message"),
    [
        (Encoding(torch.tensor(1.0), torch.tensor(0, dtype=torch.int32), 0, 255, dtype="uint8"), "quant_max=255, dtype='uint8'; its"),
        (Encoding(torch.ones(4), torch.zeros(4, dtype=torch.int32), -128, 127, axis=0), "has axis=0; its spec wants axis=None"),
        (Encoding(torch.ones(1), torch.zeros(1, dtype=torch.int32), -128, 127), r"shape \(1,\); expected \(\)"),
    ],
)
def test_encodings_that_do_not_fit_are_an_error(encoding, message):
    with pytest.raises(ValueError, match=message):
        Quantizer(TensorSpec()).set_encoding(encoding)


def test_merging_quantizers_merges_what_they_observed():
    a, b = torch.randn(10), torch.randn(7)
    first, second = (calibrated(TensorSpec(method="minmax"), x) for x in (a, b))
    first.merge(second)
    assert first.counts == Counts(17)
    assert first.compute_encoding() == calibrated(TensorSpec(method="minmax"), torch.cat([a, b])).encoding


@pytest.mark.parametrize("by", ["set_encoding", "load_state_dict"])
def test_an_optimizer_that_was_made_before_the_shape_was_known_trains_the_scale(by):
    spec = TensorSpec(symmetric=True, method="minmax", axis=1, learnable=True)
    quantizer, told = Quantizer(spec), Quantizer(spec, shape=(2, 3))
    optimizer = torch.optim.Adam(quantizer.parameters(), 0.1)
    x = torch.randn(4, 3)
    encoding = told.compute_encoding_from(x)
    if by == "set_encoding":
        quantizer.set_encoding(encoding)
    else:
        quantizer.load_state_dict(told.state_dict())
    assert torch.equal(quantizer(x), told(x))
    quantizer(x).square().sum().backward()
    optimizer.step()
    assert quantizer.scale.shape == (3,)
    assert bool((quantizer.scale != encoding.scale).all())
