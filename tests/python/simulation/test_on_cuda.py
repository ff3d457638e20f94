"""Whole simulations on a GPU: the numbers of the CPU, training in half precision, graphs, compilation, reports, files.

The operators alone are tests/python/ops/test_cuda.py's. Products are a GPU's own, and where a value lies next to a rounding boundary the
integer differs by one: outputs are compared with the noise of the quantization itself. Without a GPU everything here is skipped.
"""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from models import Calls, ConvNet, seeded
from torch import nn

import qsim

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.fixture(autouse=True)
def _products_in_float32(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


class Tower(nn.Module):
    """Normalization, attention with a mask and a residual: what a transformer does."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 64)
        self.norm, self.norm2 = nn.LayerNorm(64), nn.LayerNorm(64)
        self.qkv, self.proj = nn.Linear(64, 192), nn.Linear(64, 64)
        self.up, self.down = nn.Linear(64, 256), nn.Linear(256, 64)
        self.head = nn.Linear(64, 50)

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, 4, 16)).permute(2, 0, 3, 1, 4)
        hidden = torch.full((ids.shape[1],) * 2, -torch.inf, device=ids.device, dtype=x.dtype).triu(1)
        scores = q @ k.transpose(-2, -1) / 4 + hidden
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return self.head(x + self.down(F.gelu(self.up(self.norm2(x)))))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 24, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(48, 10)

    def forward(self, x):
        return self.head(self.lstm(x)[0])


MODELS = {
    "convolutions": (ConvNet, lambda: torch.randn(8, 1, 8, 8)),
    "transformer": (Tower, lambda: torch.randint(50, (4, 12))),
    "recurrent": (Recurrent, lambda: torch.randn(4, 9, 16)),
}
PRESETS = [
    "int8",
    "int16",
    "int4",
    "fp16",
    "bf16",
    "fp8",
    "fp8_dynamic",
    "w4a8",
    "w8a8_dynamic",
    "w8a8_static",
    "w4a16",
    "mxfp8",
    "mxfp4",
    "nvfp4",
]


def made(name):
    build, draw = MODELS[name]
    return seeded(build), draw()


def on_cpu(name, config=None):
    model, x = made(name)
    sim = qsim.QuantSim(model, x, config)
    sim.calibrate([x], progress=False)
    return sim, x


def noise(y, expected):
    return (y.cpu().double() - expected.cpu().double()).square().sum()


def differs_less_than_it_is_quantized(got, expected, in_float):
    assert noise(got, expected) <= noise(expected, in_float) / 10 + 1e-9 * expected.double().square().sum()


def configured(preset):
    return getattr(qsim, preset)()


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_a_simulation_that_is_moved_computes_what_it_did(name, preset):
    sim, x = on_cpu(name, configured(preset))
    with torch.no_grad():
        expected, in_float = sim(x), made(name)[0](x)
        got = sim.cuda()(x.cuda())
        assert got.is_cuda
        differs_less_than_it_is_quantized(got, expected, in_float)
        assert torch.equal(sim.cpu()(x), expected)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", MODELS)
def test_calibrated_there_it_has_the_ranges_of_the_cpu(name, preset):
    expected, x = on_cpu(name, configured(preset))
    sim = qsim.QuantSim(made(name)[0].cuda(), x.cuda(), configured(preset))
    sim.calibrate([x.cuda()], progress=False)
    assert not [name for name, t in sim.state_dict().items() if isinstance(t, torch.Tensor) and not t.is_cuda]
    for key, encoding in expected.encodings().items():
        there = sim.encodings()[key]
        torch.testing.assert_close(there.scale.cpu(), encoding.scale.cpu(), rtol=0.02, atol=1e-8, msg=key)
    with torch.no_grad():
        assert noise(sim(x.cuda()), expected(x)) <= noise(expected(x), made(name)[0](x)) * 2 + 1e-9 * expected(x).square().sum()


@pytest.mark.parametrize("name", MODELS)
def test_states_and_encodings_travel(name, tmp_path):
    sim, x = on_cpu(name)
    there = qsim.QuantSim(made(name)[0].cuda(), x.cuda())
    there.load_state_dict(sim.state_dict())
    moved = copy.deepcopy(sim).cuda()
    with torch.no_grad():
        assert torch.equal(there(x.cuda()), moved(x.cuda()))
        sim.save_encodings(tmp_path / "encodings.json")
        again = qsim.QuantSim(made(name)[0].cuda(), x.cuda())
        again.load_encodings(tmp_path / "encodings.json")
        assert torch.equal(again(x.cuda()), moved(x.cuda()))
        torch.save(moved.state_dict(), tmp_path / "state.pt")
        sim.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        assert torch.equal(sim(x), on_cpu(name)[0](x))


@pytest.mark.parametrize("name", MODELS)
def test_training_takes_the_steps_of_the_cpu(name):
    losses = {}
    for device in ("cpu", "cuda"):
        sim, x = on_cpu(name)
        sim.to(device).train()
        for m in sim.modules():
            if isinstance(m, nn.Dropout):
                m.p = 0.0
        optimizer = torch.optim.SGD(sim.parameters(), 0.05)
        found = []
        for _ in range(6):
            optimizer.zero_grad()
            y = sim(x.to(device))
            loss = F.cross_entropy(y.flatten(0, -2), torch.zeros(y.shape[:-1], dtype=torch.int64, device=device).flatten())
            loss.backward()
            optimizer.step()
            found.append(loss.item())
        losses[device] = found
    assert losses["cuda"][-1] < losses["cuda"][0]
    assert losses["cuda"] == pytest.approx(losses["cpu"], rel=0.05)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_training_under_autocast(name, dtype):
    sim, x = on_cpu(name)
    sim.cuda().train()
    optimizer = torch.optim.SGD(sim.parameters(), 0.05)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16, init_scale=128.0)
    losses = []
    for _ in range(8):
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype):
            y = sim(x.cuda())
            loss = F.cross_entropy(y.flatten(0, -2).float(), torch.zeros(y.shape[:-1], dtype=torch.int64, device="cuda").flatten())
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    assert all(p.grad is None or p.grad.isfinite().all() for p in sim.parameters())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_models_in_half_precision(name, dtype):
    model, x = made(name)
    model = model.cuda().to(dtype)
    x = x.cuda() if x.dtype == torch.int64 else x.cuda().to(dtype)
    for preset in ("int8", "w4a16", "fp8", "w8a8_dynamic"):
        sim = qsim.QuantSim(copy.deepcopy(model), x, configured(preset))
        sim.calibrate([x], progress=False)
        with torch.no_grad():
            y, expected = sim(x).float(), model(x).float()
        assert y.isfinite().all()
        assert noise(y, expected) <= expected.double().square().sum().cpu() / 10, preset


@pytest.mark.parametrize("name", MODELS)
def test_in_a_cuda_graph(name):
    sim, x = on_cpu(name)
    sim.cuda()
    x, other = x.cuda(), x.cuda().flip(0).contiguous()
    with torch.no_grad():
        expected = sim(other)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                sim(x)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sim(x)
        x.copy_(other)
        graph.replay()
    assert torch.equal(y, expected)


@pytest.mark.parametrize("name", MODELS)
def test_compiled(name):
    sim, x = on_cpu(name)
    sim.cuda()
    x = x.cuda()
    expected = sim(x)
    got = torch.compile(sim)(x)
    differs_less_than_it_is_quantized(got.detach(), expected.detach(), made(name)[0](x.cpu()).detach())
    got.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in sim.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_integers(name):
    sim, x = on_cpu(name)
    with torch.no_grad(), sim.integer():
        expected = sim(x)
    sim.cuda()
    with torch.no_grad(), sim.integer():
        got = sim(x.cuda())
    assert torch.equal(got.cpu(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_what_is_exported_there_is_what_is_exported_here(name, tmp_path):
    pytest.importorskip("onnxruntime")
    sim, x = on_cpu(name)
    sim.export(tmp_path / "cpu.onnx", verify=[x])
    moved = sim.cuda()
    moved.export(tmp_path / "cuda.onnx", verify=[x.cuda()])
    assert (tmp_path / "cpu.onnx").read_bytes() == (tmp_path / "cuda.onnx").read_bytes()


@pytest.mark.parametrize("name", MODELS)
def test_reports(name):
    sim, x = on_cpu(name)
    expected = sim.compare(x)
    here, there = (re.sub(r"[\d.]+ s\b", "", str(qsim.doctor(made(name)[0].to(d), [x.to(d)]))) for d in ("cpu", "cuda"))
    assert here == there
    sim.cuda()
    for here, there in zip(expected.rows, sim.compare(x.cuda()).rows, strict=True):
        assert here.key == there.key
        assert there.local.sqnr == pytest.approx(here.local.sqnr, abs=1.0)
    worst = [sim.to(d).sensitivity([x.to(d)], progress=False).ranked()[0].name for d in ("cpu", "cuda")]
    assert worst[0] == worst[1]


@pytest.mark.parametrize(
    "won_back", [lambda s, d: s.restore(d, steps=20), lambda s, d: s.learn_rounding(d, steps=50)], ids=["restore", "learn"]
)
@pytest.mark.parametrize("name", ["convolutions", "transformer"])
def test_accuracy_is_won_back_there(name, won_back):
    model, x = made(name)
    config = qsim.int8()
    ends = {}
    for device in ("cpu", "cuda"):
        net, data = copy.deepcopy(model).to(device), [x.to(device)]
        sim = qsim.QuantSim(net, data[0], config)
        sim.calibrate(data, progress=False)
        won_back(sim, data)
        with torch.no_grad():
            ends[device] = noise(sim(data[0]), model(x))
    assert ends["cuda"] <= ends["cpu"] * 1.5


def test_data_of_the_cpu_for_a_model_on_the_gpu():
    """As the float model: the person's loader moves batches, or their forward does."""
    model, x = made("convolutions")
    sim = qsim.QuantSim(model.cuda(), x.cuda())
    sim.calibrate([x], lambda m, batch: m(batch.cuda()), progress=False)
    with pytest.raises(ValueError, match="expected one device"):
        sim(x)
    assert sim(x.cuda()).is_cuda


@pytest.mark.parametrize("preset", ["int8", "fp16"])
def test_a_model_without_parameters(preset):
    """Where it lies its inputs tell."""
    model, x = Calls(lambda x: (x.exp() / x.exp().sum(-1, keepdim=True)).log()), torch.randn(4, 8)
    found = {}
    for device in ("cpu", "cuda"):
        sim = qsim.QuantSim(model, x.to(device), configured(preset))
        sim.calibrate([x.to(device)], progress=False)
        found[device] = sim(x.to(device)).cpu()
        assert qsim.doctor(model, [x.to(device)]).plan is not None
    torch.testing.assert_close(found["cuda"], found["cpu"], rtol=1e-2, atol=0.05)


def test_random_numbers_are_left_alone():
    """Those of the device too, of which a model without parameters says nothing."""
    torch.manual_seed(7)
    expected = torch.rand(3, device="cuda")
    torch.manual_seed(7)
    sim = qsim.QuantSim(Calls(lambda x: F.dropout(x.softmax(-1)) ** 2), torch.randn(4, 8, device="cuda", generator=torch.Generator("cuda")))
    torch.testing.assert_close(torch.rand(3, device="cuda"), expected, rtol=0, atol=0)
    assert sim.quantizers()


class Split(nn.Module):
    """The first half on the CPU, the second wherever it is put: as `device_map` spreads a model over devices."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x):
        x = F.relu(self.first(x)).to(self.second.weight.device)
        return self.last(F.relu(self.second(x) + x))


def test_a_model_on_two_devices():
    x, found = torch.randn(32, 8), {}
    for device in ("cpu", "cuda"):
        model = seeded(Split)
        model.second.to(device)
        model.last.to(device)
        sim = qsim.QuantSim(model, x)
        sim.calibrate([x], progress=False)
        found[device] = sim(x).detach()
        assert qsim.doctor(model, [x]).plan is not None
    assert {q.scale.device.type for q in sim.quantizers().values()} == {"cpu", "cuda"}
    differs_less_than_it_is_quantized(found["cuda"], found["cpu"], seeded(Split)(x).detach())


def test_arguments_that_belong_on_the_cpu_stay_there():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 2)

        def forward(self, x, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.head(nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)[0])

    batch = torch.randn(3, 5, 4, device="cuda"), torch.tensor([5, 3, 2])
    sim = qsim.QuantSim(seeded(Packed).cuda(), batch)
    sim.calibrate([batch], progress=False)
    assert sim(*batch).is_cuda


def test_replicas():
    sim, x = on_cpu("convolutions")
    sim.cuda()
    with torch.no_grad():
        expected = sim(x.cuda())
        assert torch.equal(nn.DataParallel(sim, device_ids=[0])(x.cuda()), expected)


def test_memory_of_an_evaluation_is_the_model_s():
    peaks = {}
    model, x = seeded(ConvNet).cuda(), torch.randn(64, 1, 128, 128, device="cuda")
    sim = qsim.QuantSim(copy.deepcopy(model), x[:2])
    sim.calibrate([x[:2]], progress=False)
    for name, net in (("float", model), ("sim", sim)):
        for _ in range(2):
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            with torch.no_grad():
                net(x)
            peaks[name] = torch.cuda.max_memory_allocated() - before
    assert peaks["sim"] <= peaks["float"] * 1.25
