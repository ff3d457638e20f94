"""Each target's profile on blocks of well-known architectures, judged by the values that reach ATen's operations."""

import copy
import pickle

import pytest
import torch
from blocks import BLOCKS, Ran, Transformer, grids, watched
from by_hand import decibels
from models import Calls, trained
from torch import Tensor, nn

import qsim
from qsim.config.profile import PROFILES, Profile
from qsim.numbers.range_methods import SEARCHES
from qsim.trace.runtimes import RUNTIMES

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TARGETS = [*RUNTIMES]
PRODUCTS = {"convolution": 2, "addmm": 3, "mm": 2, "bmm": 2}  # and how many operands are no bias
POOLS = ("mean", "avg_pool2d", "adaptive_avg_pool2d")


def calibrated(name: str, config: qsim.Config) -> qsim.QuantSim:
    torch.manual_seed(1)
    sim = qsim.QuantSim(trained(BLOCKS[name]()), X, config)
    sim.calibrate([X], progress=False)
    return sim


def run(sim: qsim.QuantSim) -> tuple[list[Ran], Tensor]:
    with watched() as ran:
        result = sim(X)
    return ran, result


def factors(ran: Ran) -> list[Tensor]:
    """The operands that are multiplied: addmm has its bias first, a convolution last."""
    return ran.read[1:] if ran.name == "addmm" else ran.read[:2]


def is_weight(sim: qsim.QuantSim, t: Tensor) -> bool:
    return any(key.endswith("weight") for key in grids(sim, t))


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("name", BLOCKS)
def test_off_it_is_the_model_and_on_it_trains(name, target):
    torch.manual_seed(1)
    model = trained(BLOCKS[name]())
    sim = qsim.QuantSim(model, X, qsim.int8(target=target))
    folded = copy.deepcopy(model)
    qsim.fold_batch_norms(folded, X)
    with sim.in_float():
        assert torch.equal(sim(X), folded(X))
    sim.calibrate([X], progress=False)
    assert (sim(X) - folded(X)).square().mean() < 0.01 * folded(X).var()
    sim.train()
    sim(X).square().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in sim.model.parameters())
    assert set(folded.state_dict()) <= set(sim.model.state_dict())
    twin = pickle.loads(pickle.dumps(sim.eval()))
    assert twin.config == sim.config
    assert torch.equal(twin(X), sim(X))


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("name", BLOCKS)
def test_products_take_quantized_operands_only(name, target):
    sim = calibrated(name, qsim.int8(target=target))
    ran, _ = run(sim)
    found = [r for r in ran if r.name in PRODUCTS]
    assert len(found) >= 4
    for r in found:
        if target == "executorch" and not any(is_weight(sim, t) for t in factors(r)):
            continue  # XNNPACK multiplies two activations in float
        assert all(grids(sim, t) for t in factors(r)), r.name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", BLOCKS)
def test_grids_are_those_of_the_target(name, target):
    sim = calibrated(name, qsim.int8(target=target))
    signed = target in ("tensorrt", "coreml", "executorch")
    for key, encoding in sim.encodings().items():
        weight = sim.decisions.quantizers[key].role == "weight"
        symmetric = weight or target in ("tensorrt", "coreml")
        assert encoding.dtype == ("int8" if weight or signed else "uint8")
        assert encoding.axis is None or weight
        assert bool((encoding.zero_point == 0).all()) >= symmetric, key
        assert weight or target in ("tensorrt", "coreml") or not sim.quantizers()[key].spec.symmetric
    assert bool(sim.decisions.biases) == (target in ("onnxruntime", "executorch"))


@pytest.mark.parametrize("name", BLOCKS)
def test_onnxruntime_has_quantizers_on_both_sides_of_every_kernel(name):
    sim = calibrated(name, qsim.int8(target="onnxruntime"))
    ran, result = run(sim)
    assert grids(sim, result)
    for r in ran:
        if name == "transformer" and not (r.wrote.is_floating_point() and grids(sim, r.wrote)):
            continue  # a sum that normalizations alone read needs no kernel
        if r.name in ("add", "mul", "cat", *POOLS) and r.wrote.dim() > 1:  # a scale of a bias is a product too
            assert all(grids(sim, t) for t in r.read), r.name
        if r.name in ("silu", "softmax", "sigmoid"):  # no kernel takes them over: they have a quantizer before them
            assert grids(sim, r.read[0]), r.name
        if r.name == "gelu":  # in float, and so is what the product before it makes
            assert not grids(sim, r.read[0]), r.name


@pytest.mark.parametrize("method", SEARCHES)
@pytest.mark.parametrize("name", ["resnet", "concat", "squeeze"])
def test_the_zero_point_after_a_rectifier_is_the_smallest_integer(name, method):
    sim = calibrated(name, qsim.int8(target="onnxruntime"))
    sim.set_method(method)
    rectified = [key for key, planned in sim.decisions.quantizers.items() if planned.op.endswith(("relu", "relu6"))]
    assert rectified
    for key in rectified:
        encoding = sim.encodings()[key]
        assert encoding.zero_point == encoding.quant_min


def test_known_ranges_need_no_data():
    torch.manual_seed(1)
    sim = qsim.QuantSim(trained(BLOCKS["squeeze"]()), X, qsim.int8(target="onnxruntime"))
    found = {key: (e.min.item(), e.max.item()) for key, e in sim.encodings().items()}
    assert found == {"silu.gate": (0, pytest.approx(1))}
    sim.calibrate([X * 100], progress=False)
    sim.set_method("minmax")
    assert {key: (e.min.item(), e.max.item()) for key, e in sim.encodings().items() if key in found} == found


@pytest.mark.parametrize("method", ["minmax", "ema"])
def test_a_known_range_does_not_run(method):
    config = qsim.int8(target=Profile("own", ranges=(("Softmax", 0.0, 1.0),))).override(activation={"method": method})
    sim = calibrated("transformer", config)
    sim.train()(X)
    assert sim.encodings()["softmax.output"].max.item() == pytest.approx(1)


@pytest.mark.parametrize("target", ["onnxruntime", "coreml"])
def test_a_softmax_over_many_tokens_keeps_its_bits(target):
    x = torch.randn(2, 300, 8, generator=torch.Generator().manual_seed(0))
    sim = qsim.QuantSim(Calls(lambda x: torch.softmax(x @ x.mT / 8, -1) @ x), x, qsim.int8(target=target))
    sim.calibrate([x], progress=False)
    assert sim.encodings()["softmax.output"].max.item() < 0.5
    assert decibels(sim(x), torch.softmax(x @ x.mT / 8, -1) @ x) > 30


def test_a_soft_cap_of_small_values_keeps_them():
    """As in Gemma 2: a grid over all that a tanh may return would round them to nothing."""
    x = 0.02 * torch.randn(64, 16)
    sim = qsim.QuantSim(Calls(lambda x: torch.tanh(x / 30) * 30), x, qsim.int8(target="onnxruntime"))
    sim.calibrate([x], progress=False)
    assert decibels(sim(x), x) > 35


@pytest.mark.parametrize("name", BLOCKS)
def test_tensorrt_quantizes_operands_and_no_results(name):
    sim = calibrated(name, qsim.int8(target="tensorrt"))
    ran, result = run(sim)
    assert not grids(sim, result)
    assert not any(key.endswith(".output") for key in sim.quantizers())
    for r in ran:
        if r.name in ("softmax", "gelu", "silu", "sigmoid", "mul", *POOLS):
            assert not any(grids(sim, t) for t in r.read), r.name


def test_tensorrt_quantizes_the_branch_that_no_convolution_hands_over():
    sim = calibrated("resnet", qsim.int8(target="tensorrt"))
    adds = [r for r in run(sim)[0] if r.name == "add"]
    assert [[bool(grids(sim, t)) for t in r.read] for r in adds] == [[False, True], [False, True]]
    assert grids(sim, adds[0].read[1]) == {"layer1.conv1.input[0]"}  # the block's input, quantized once for both of its readers
    reader = calibrated("transformer", qsim.int8(target="tensorrt"))
    adds = [r for r in run(reader)[0] if r.name == "add"]
    assert len(adds) == 2
    assert not any(grids(reader, t) for r in adds for t in r.read)


@pytest.mark.parametrize("target", ["tensorrt", "coreml"])
def test_what_a_concatenation_takes_has_one_scale(target):
    sim = calibrated("concat", qsim.int8(target=target))
    ran, _ = run(sim)
    cats = [r for r in ran if r.name == "cat"]
    assert len(cats) == 2
    for r in cats:
        assert set.intersection(*(grids(sim, t) for t in (*r.read, r.wrote))) == {"cat_2.input"}
    readers = [r for r in ran if r.name == "convolution" and r.read[1].shape in ((4, 8, 1, 1), (8, 4, 1, 1))]
    assert len(readers) == 2
    assert all("cat_2.input" in grids(sim, r.read[0]) for r in readers)
    widest = max(t.abs().max() for r in cats for t in r.read)
    sim.set_method("minmax")
    assert sim.encodings()["cat_2.input"].max.item() == pytest.approx(widest.item(), rel=0.3)
    assert sim.decisions.quantizers["cat_2.input"].op == "cat, one scale for a, b, c" or target == "coreml"
    assert "one scale for" in str(sim.summary())


def test_a_shared_scale_spans_all_that_shares_it():
    torch.manual_seed(1)
    model = trained(BLOCKS["concat"]())
    sim = qsim.QuantSim(model, X, qsim.int8(target="coreml").override(method="minmax"))
    sim.calibrate([X], progress=False)
    with torch.no_grad():
        parts = [torch.relu(model.a(X)), model.b(X), torch.tanh(model.c(X))]
    scale = max(max(part.max().item() / 127, -part.min().item() / 128) for part in parts)
    assert sim.encodings()["cat_2.input"].scale.item() == pytest.approx(scale, rel=1e-6)


def test_a_running_range_is_not_shared():
    """It would end at the average of the tensors' ranges."""
    config = qsim.int8(target="coreml")
    sim = calibrated("concat", config.override(activation={"method": "ema"}))
    still = calibrated("concat", config.override(method="minmax"))
    sim.train()
    sim(X)
    assert sim.encodings()["cat_2.input"].scale == still.encodings()["cat_2.input"].scale
    assert any("'cat_2.input' spans several tensors" in note for note in sim.summary().notes)


def test_a_constant_shares_the_scale_too():
    sim = calibrated("transformer", qsim.int8(target="coreml"))
    (cat,) = [r for r in run(sim)[0] if r.name == "cat"]
    assert all("cat.input" in grids(sim, t) for t in cat.read)
    assert "token" not in sim.quantizers()


def test_openvino_leaves_what_the_model_returns():
    for name in BLOCKS:
        sim = calibrated(name, qsim.int8(target="openvino"))
        assert not grids(sim, run(sim)[1])
        assert any(entry.reason == "target 'openvino' leaves what the model returns in float" for entry in sim.summary().left)


def test_openvino_quantizes_a_sum_and_not_what_a_convolution_hands_to_it():
    class Sums(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c, self.d = (nn.Conv2d(3, 3, 3, padding=1) for _ in range(4))

        def forward(self, x):
            x = torch.relu(self.a(x))  # read twice
            x = x + self.b(x)  # handed over
            x = torch.relu(self.c(x)) + x  # a ReLU stands between
            return self.d(x)

    sim = qsim.QuantSim(Sums(), torch.randn(1, 3, 8, 8), qsim.int8(target="openvino"))
    results = [key for key in sim.quantizers() if key.endswith("output")]
    assert results == ["a.output", "add.output", "c.output", "add_2.output"]
    (left,) = (row.reason for row in sim.summary().left if row.name == "b")
    assert "part of the operation" in left


@pytest.mark.parametrize("target", PROFILES)
@pytest.mark.parametrize("name", BLOCKS)
def test_whatever_stays_in_float_has_a_reason(name, target):
    """Every module with parameters, and every function called, is a quantizer's, or is listed."""
    sim = calibrated(name, qsim.int8(target=target))
    said = {entry.name for entry in sim.summary().left}
    quantized = " ".join(f"{key} {planned.parameter}" for key, planned in sim.decisions.quantizers.items())
    for path, module in sim.model.named_modules():
        for parameter, _ in module.named_parameters(path, recurse=False):
            biased = any(bias.parameter == parameter for bias in sim.decisions.biases)
            assert biased or parameter in quantized or parameter in said or parameter == "token", parameter
    assert all(entry.reason for entry in sim.summary().left)


@pytest.mark.parametrize("target", TARGETS)
def test_an_embedding(target):
    model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 4)).eval()
    sim = qsim.QuantSim(model, torch.arange(10), qsim.int8(target=target))
    sim.calibrate([torch.arange(10)], progress=False)
    if target in ("tensorrt", "executorch"):
        assert {entry.name: entry.reason for entry in sim.summary().left}[
            "0.weight"
        ] == f"target {target!r} leaves weights of Gather in float"
    else:
        assert sim.encodings()["0.weight"].axis == (None if target == "onnxruntime" else 0)


@pytest.mark.parametrize("target", TARGETS)
def test_masks_stay_float(target):
    class Masked(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.softmax(x @ x.transpose(-1, -2) + torch.full((5, 5), -torch.inf).triu(1), -1) @ x

    x = torch.randn(2, 5, 4)
    sim = qsim.QuantSim(Masked(), x, qsim.int8(target=target))
    sim.calibrate([x], progress=False)
    assert sim(x).isfinite().all()
    assert (sim(x) - Masked()(x)).abs().max() < 0.1
    assert not any(row.op == "add" for row in sim.summary().rows)


def test_an_override_against_the_target_is_noted():
    config = qsim.int8(target="tensorrt").override("fc", activation={"symmetric": False})
    assert (
        "'fc.input[0]' has symmetric=False by an override; target 'tensorrt' takes symmetric=True"
        in calibrated("resnet", config).summary().notes
    )


def test_an_override_of_one_that_shares_is_noted_and_one_that_is_off_shares_nothing():
    sim = calibrated("concat", qsim.int8(target="coreml").override("b", activation={"bits": 4}))
    note = "'b' shares the scale of 'cat_2.input': what the config says of 'b' alone is not used"
    assert note in sim.summary().notes
    off = calibrated("concat", qsim.int8(target="coreml").override("cat*", off=True))
    assert {"a.output", "b.output", "c.output"} <= set(off.quantizers())
    assert not any("cat" in key for key in off.quantizers())


@pytest.mark.parametrize("target", TARGETS)
def test_the_position_of_a_layer(target):
    torch.manual_seed(1)
    config = qsim.int4(target=target).override(position="first", bits=8).override(position="last", weight=None)
    planned = qsim.QuantSim(trained(Transformer()), X, config).decisions.quantizers
    assert (planned["patches.weight"].spec.bits, planned["input"].spec.bits) == (8, 8)
    assert "down.weight" not in planned
    assert {planned[f"{name}.weight"].spec.bits for name in ("qkv", "proj", "up")} == {4}


@pytest.mark.parametrize("target", TARGETS)
def test_what_no_recording_sees_made_is_quantized_where_it_is_read(target):
    scripted = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    normed = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
    for model in (nn.Sequential(scripted, nn.Linear(4, 2)), nn.Sequential(normed, nn.ReLU(), nn.Linear(4, 2))):
        x = torch.randn(64, 4)
        sim = qsim.QuantSim(model.eval(), x, qsim.int8(target=target))
        sim.calibrate([x], progress=False)
        with torch.no_grad():
            got, expected = sim(x), model(x)
        assert 0 < (got - expected).square().mean() < 1e-3 * expected.square().mean()


@pytest.mark.parametrize("target", [*RUNTIMES, "tensorrt-fp16"])
@pytest.mark.parametrize("name", BLOCKS)
def test_in_half_precision_every_operation_rounds_on_every_target(name, target):
    sim, anywhere = calibrated(name, qsim.fp16(target=target)), calibrated(name, qsim.fp16())
    assert sim.quantizers().keys() == anywhere.quantizers().keys()
    assert not sim.summary().left
    assert sim.config.profile.half_accumulator == "float16" or torch.equal(sim(X), anywhere(X))


def formats(config: qsim.Config) -> dict[str, str]:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Linear(4, 2))
    return {key: q.spec.dtype for key, q in qsim.QuantSim(model, torch.randn(64, 4), config).quantizers().items()}


def test_tensorrt_casts_between_integers_and_half_precision():
    integers, half = qsim.int8(target="tensorrt"), qsim.fp16(target="tensorrt")
    assert formats(integers.override("2", dtype="fp16")) == formats(integers) | {"2.input[0]": "float16", "2.output": "float16"}
    mixed = formats(half.override("3", dtype="int8"))
    assert mixed.items() >= {"2.output": "float16", "3.input[0]": "int", "3.weight": "int"}.items()
    assert "3.output" not in mixed
