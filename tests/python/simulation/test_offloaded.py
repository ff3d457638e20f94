"""Models that accelerate offloads, with the real accelerate: the same numbers as without, in the memory of what runs."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
from torch import nn

import qsim
from qsim.runs.mapped import MappedParameter

accelerate = pytest.importorskip("accelerate")
transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
EXAMPLE = {"input_ids": IDS, "use_cache": False}
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama(tied=True):
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, tie_word_embeddings=tied)).eval()


def in_memory(model, folder):
    return accelerate.cpu_offload(model, execution_device=CPU)


def on_disk(model, folder):
    return accelerate.disk_offload(model, str(folder), execution_device=CPU)


def all_buffers_too(model, folder):
    return accelerate.disk_offload(model, str(folder), execution_device=CPU, offload_buffers=True)


def whole_blocks(model, folder):
    return accelerate.disk_offload(model, str(folder), execution_device=CPU, preload_module_classes=["LlamaMLP"])


def dispatched(model, folder):
    places = {"model.embed_tokens": "cpu", "model.norm": "disk", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    places |= {"model.layers.0": "disk", "model.layers.1": "cpu"}
    return accelerate.dispatch_model(model, places, offload_dir=str(folder), main_device="cpu")


def loaded(model, folder):
    """As `from_pretrained` maps safetensors."""
    model.save_pretrained(folder / "saved")
    places = {"model": "disk", "lm_head": "disk"}
    return transformers.LlamaForCausalLM.from_pretrained(folder / "saved", device_map=places, offload_folder=str(folder / "off")).eval()


WAYS = [in_memory, on_disk, all_buffers_too, whole_blocks, dispatched, loaded]


def simulated(model, config="w8a8_dynamic", inplace=False):
    sim = qsim.QuantSim(model, EXAMPLE, config, inplace=inplace)
    sim.calibrate([EXAMPLE], progress=False)
    return sim


@pytest.mark.parametrize(
    ("way", "tied", "inplace"),
    [
        *((way, True, False) for way in WAYS),
        (in_memory, False, True),
        (on_disk, True, True),
        (dispatched, True, True),
        (loaded, False, False),
    ],
)
def test_numbers_are_those_of_the_model_that_is_not_offloaded(way, tied, inplace, tmp_path):
    config = qsim.Config(qsim.TensorSpec(bits=4, axis=1, block_size=32), qsim.TensorSpec())
    with torch.no_grad():
        expected, float_logits = simulated(llama(tied), config), llama(tied)(**EXAMPLE).logits
        model = way(llama(tied), tmp_path)
        assert any(p.is_meta for p in model.parameters())
        sim = simulated(model, config, inplace)
        assert any(p.is_meta for p in model.parameters()) == (not inplace)
        assert list(sim.quantizers()) == list(expected.quantizers())
        assert all(torch.equal(a.scale, b.scale) for a, b in zip(sim.quantizers().values(), expected.quantizers().values(), strict=True))
        assert torch.equal(sim(**EXAMPLE).logits, expected(**EXAMPLE).logits)
        with sim.in_float():
            assert torch.equal(sim(**EXAMPLE).logits, float_logits)
        assert torch.equal(model(**EXAMPLE).logits, float_logits if not inplace else expected(**EXAMPLE).logits)
        options = {"max_new_tokens": 5, "do_sample": False}
        assert torch.equal(sim.generate(IDS, **options), expected.generate(IDS, **options))
    state, wanted = sim.state_dict(), expected.state_dict()
    assert state.keys() == wanted.keys()
    assert all(torch.equal(state[name], wanted[name]) for name in state)


def test_a_file_of_another_type_is_converted_once(tmp_path):
    """It holds bfloat16, the model float32: nothing can be mapped from it as it is."""
    llama().to(torch.bfloat16).save_pretrained(tmp_path / "saved")
    read = transformers.LlamaForCausalLM.from_pretrained
    plain = read(tmp_path / "saved", dtype=torch.float32)
    model = read(tmp_path / "saved", dtype=torch.float32, device_map={"": "disk"}, offload_folder=str(tmp_path / "off"))
    with torch.no_grad():
        assert torch.equal(simulated(model)(**EXAMPLE).logits, simulated(plain)(**EXAMPLE).logits)


def test_what_is_made_of_a_simulation_is_the_same(tmp_path):
    plain, sim = (simulated(m, qsim.w4a16(group=32)) for m in (llama(), on_disk(llama(), tmp_path / "off")))
    with torch.no_grad():
        expected = plain(**EXAMPLE).logits
        assert torch.equal(sim.bake()(**EXAMPLE).logits, plain.bake()(**EXAMPLE).logits)
        assert torch.equal(copy.deepcopy(sim)(**EXAMPLE).logits, expected)
        torch.save(sim, tmp_path / "sim.pt")
        assert torch.equal(torch.load(tmp_path / "sim.pt", weights_only=False)(**EXAMPLE).logits, expected)
    ours, theirs = sim.compare(EXAMPLE), plain.compare(EXAMPLE)
    assert [(row.key, row.local.sqnr, row.accumulated.sqnr) for row in ours.rows] == [
        (row.key, row.local.sqnr, row.accumulated.sqnr) for row in theirs.rows
    ]
    state, wanted = sim.integer_state_dict(), plain.integer_state_dict()
    assert all(torch.equal(state[name], wanted[name]) for name in wanted)
    sim.save_compressed(tmp_path / "a")
    plain.save_compressed(tmp_path / "b")
    assert (tmp_path / "a" / "model.safetensors").read_bytes() == (tmp_path / "b" / "model.safetensors").read_bytes()
    sim.restore([EXAMPLE], progress=False)
    plain.restore([EXAMPLE], progress=False)
    with torch.no_grad():
        assert torch.equal(sim(**EXAMPLE).logits, plain(**EXAMPLE).logits)


@pytest.mark.parametrize("way", [in_memory, on_disk])
def test_the_doctor_and_equalize_work_on_it(way, tmp_path):
    plain, model = llama(), way(llama(), tmp_path)
    found, wanted = (qsim.doctor(m, [EXAMPLE], progress=False) for m in (model, plain))
    assert [(f.code, f.op, f.evidence) for f in found.findings] == [(f.code, f.op, f.evidence) for f in wanted.findings]
    assert any(p.is_meta for p in model.parameters()), "the doctor leaves it as it was"
    changed, expected = (qsim.equalize(m, EXAMPLE, [EXAMPLE], methods=["smooth_quant"]) for m in (model, plain))
    assert changed.changes
    assert changed.changes == expected.changes
    with torch.no_grad():
        assert torch.equal(model(**EXAMPLE).logits, plain(**EXAMPLE).logits)
    del model
    gc.collect()
    if way is on_disk:  # the files are as they were
        again = accelerate.disk_offload(llama(), str(tmp_path), execution_device=CPU)
        with torch.no_grad():
            assert torch.equal(again(**EXAMPLE).logits, llama()(**EXAMPLE).logits)


def test_training_writes_to_memory_and_not_to_the_files(tmp_path):
    sim, plain = simulated(on_disk(llama(), tmp_path)), simulated(llama())
    for each in (sim, plain):
        each.train()
        optimizer = torch.optim.SGD(each.parameters(), 0.1)
        for _ in range(2):
            optimizer.zero_grad()
            each(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()
        each.eval()
    with torch.no_grad():
        assert torch.equal(sim(**EXAMPLE).logits, plain(**EXAMPLE).logits)
        again = accelerate.disk_offload(llama(), str(tmp_path), execution_device=CPU)
        assert torch.equal(again(**EXAMPLE).logits, llama()(**EXAMPLE).logits)


def test_equalizing_is_undone_where_outputs_would_change(tmp_path):
    class Odd(nn.Module):
        """What it computes depends on more than the product of its weights."""

        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x):
            return self.b(torch.relu(self.a(x))) * self.a.weight.detach().sum().item()

    torch.manual_seed(0)
    model, x = Odd().eval(), torch.randn(4, 8)
    expected = {name: t.clone() for name, t in model.state_dict().items()}
    on_disk(model, tmp_path)
    qsim.equalize(model, x)
    assert all(torch.equal(t, expected[name]) for name, t in model.state_dict().items())


def test_a_model_that_runs_elsewhere_is_refused_with_what_to_do():
    model = llama()
    accelerate.cpu_offload(model, execution_device=torch.device("meta"))
    with pytest.raises(ValueError, match=r"brings the parameters of 'model\.embed_tokens' to meta.*execution_device='cpu'"):
        qsim.QuantSim(model, EXAMPLE, "w4a16")


def test_hooks_of_others_stay(tmp_path):
    class Counting(accelerate.hooks.ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            type(self).calls += 1
            return args, kwargs

    model = llama()
    on_disk(model, tmp_path)
    accelerate.hooks.add_hook_to_module(model.model.layers[0].mlp.up_proj, Counting(), append=True)
    with torch.no_grad():
        sim = simulated(model, "w4a16")
        before = Counting.calls
        assert torch.equal(sim(**EXAMPLE).logits, simulated(llama(), "w4a16")(**EXAMPLE).logits)
    assert Counting.calls == before + 1


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages were written")
def test_what_was_written_is_not_given_back(tmp_path):
    sim = simulated(on_disk(llama(), tmp_path), "w4a16")
    weight = sim.model.model.layers[0].mlp.up_proj.weight
    assert isinstance(weight, MappedParameter)
    kept = weight.detach().clone()
    weight.release()
    assert torch.equal(weight, kept)
    assert not weight.is_written()
    weight.data[3, 5] = 7  # no version counts it
    kept[3, 5] = 7
    assert weight.is_written()
    weight.release()
    assert torch.equal(weight, kept)
    assert torch.equal(copy.deepcopy(weight), kept)
    weight.data = torch.zeros_like(kept)
    weight.release()
    assert torch.equal(weight, torch.zeros_like(kept))


BLOCK = """
import sys, torch, accelerate
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(width, 2 * width), nn.Linear(2 * width, width), nn.LayerNorm(width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))

def offloaded(width, folder):
    model = nn.Sequential(*[Block(width) for _ in range(12)]).eval()
    return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
"""
MEMORY = """
import resource, qsim

def peak(width, folder):
    x = torch.randn(4, width)
    sim = qsim.QuantSim(offloaded(width, folder), x, qsim.Config(qsim.TensorSpec(bits=4, axis=0, method="minmax"), qsim.TensorSpec()))
    sim.calibrate([x], progress=False)
    with torch.no_grad():
        sim(x)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10

with accelerate.init_empty_weights(include_buffers=False):  # what the libraries take, and what the model takes
    print(peak(32, sys.argv[1]), peak(1024, sys.argv[2]))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells which pages were written")
def test_memory_is_that_of_the_biggest_module(tmp_path):
    folders, names = [str(tmp_path / "small"), str(tmp_path / "large")], {}
    exec(BLOCK, names)
    for width, folder in zip((32, 1024), folders, strict=True):
        names["offloaded"](width, folder)
    command = [sys.executable, "-W", "ignore", "-c", BLOCK + MEMORY, *folders]
    small, large = map(int, subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    model = 12 * 2 * 2 * 1024**2 * 4 >> 20
    assert large - small < model // 2
