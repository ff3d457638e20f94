"""Hugging Face's generation and Trainer on a simulation, with the real library, where it is installed."""

import copy
import dataclasses
import re
import warnings
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import qsim

transformers = pytest.importorskip("transformers")

import mixtures  # noqa: E402

IDS = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.ones_like(IDS)
SIZES = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def llama():
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**SIZES))


def gpt2():
    sizes = {"vocab_size": 128, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "bos_token_id": 1, "eos_token_id": 2}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))


def t5():
    sizes = {"vocab_size": 128, "d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8, "decoder_start_token_id": 0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


WAYS = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "temperature": 1.5},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
}


def simulated(make, config):
    torch.manual_seed(0)
    model = make().eval()
    example = {"input_ids": IDS, "attention_mask": MASK, **({"decoder_input_ids": IDS[:, :4]} if model.config.is_encoder_decoder else {})}
    sim = qsim.QuantSim(model, example, config)
    sim.calibrate([example], progress=False)
    return sim


def generated(model, way, count=64, **options):
    torch.manual_seed(7)
    length = {"max_new_tokens": count, "min_new_tokens": count, "pad_token_id": 0}
    return model.generate(IDS, attention_mask=MASK, output_logits=True, return_dict_in_generate=True, **length, **WAYS[way], **options)


def test_a_simulation_drafts_for_another_model():
    sim, large = simulated(llama, qsim.int4()), llama().eval()
    options = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = large.generate(IDS[:1], **options)
    assert torch.equal(large.generate(IDS[:1], assistant_model=sim, **options), expected)


@pytest.mark.filterwarnings("ignore:QuantSim")
@pytest.mark.parametrize("make", [llama, qwen2, gpt2, t5])
def test_weights_are_quantized_on_every_path(make):
    """The baked model, which has them on their grids, is the simulation written by hand."""
    sim = simulated(make, qsim.Config(qsim.TensorSpec(bits=4, axis=1, block_size=16), None))
    baked = sim.bake().requires_grad_(False)  # torch chooses another kernel for a weight that requires a gradient
    for way in WAYS:
        ours, theirs = generated(sim, way), generated(baked, way)
        assert torch.equal(ours.sequences, theirs.sequences), way
        assert all(map(torch.equal, ours.logits, theirs.logits)), way
    with sim.in_float():
        assert not torch.equal(generated(sim, "greedy").logits[0], theirs.logits[0])


@pytest.mark.filterwarnings("ignore:QuantSim")
@pytest.mark.parametrize("make", [llama, gpt2])
def test_generation_is_a_loop_over_the_simulation(make):
    sim = simulated(make, qsim.int8())
    for way, cache in (("greedy", None), ("static cache", transformers.StaticCache(config=sim.model.config, max_cache_len=80))):
        tokens, mask, steps = IDS, MASK, []
        with torch.no_grad():
            for _ in range(64):
                out = sim(input_ids=tokens, attention_mask=mask, past_key_values=cache, logits_to_keep=1)
                cache = out.past_key_values
                steps.append(out.logits[:, -1].argmax(-1, keepdim=True))
                tokens, mask = steps[-1], torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], 1)
        assert torch.equal(generated(sim, way).sequences[:, IDS.shape[1] :], torch.cat(steps, 1)), way


def written(cache, bits):
    """A cache of the library's, quantized where it is written."""

    class Written(cache):
        def update(self, keys, values, *args, **kwargs):
            low, high = -(1 << bits - 1), (1 << bits - 1) - 1
            keys, values = (qsim.reference.fake_quantize_dynamic(x, low, high, axis=-1) for x in (keys, values))
            return super().update(keys, values, *args, **kwargs)

    return Written


def by_hand(module, query, key, value, mask, **options):
    """The library's own attention, on keys and values of 4 bits."""
    key, value = (qsim.reference.fake_quantize_dynamic(x, -8, 7, axis=-1) for x in (key, value))
    return transformers.AttentionInterface()["sdpa"](module, query, key, value, mask, **options)


@pytest.mark.filterwarnings("ignore:QuantSim")
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("make", [llama, qwen2, gpt2])
def test_caches_are_quantized_where_they_are_written(make, attention):
    """64 tokens and their logits, to the bit, with every cache and without."""
    torch.manual_seed(0)
    model = make().eval()
    model.set_attn_implementation(attention)
    example = {"input_ids": IDS, "attention_mask": MASK}
    sim = qsim.QuantSim(model, example, dataclasses.replace(qsim.w4a16(kv_cache=4), weight=None))
    for cache, sizes in ((transformers.DynamicCache, {}), (transformers.StaticCache, {"max_cache_len": 80})):
        ours = generated(sim, "greedy", past_key_values=cache(config=model.config, **sizes))
        theirs = generated(model, "greedy", past_key_values=written(cache, 4)(config=model.config, **sizes))
        assert torch.equal(ours.sequences, theirs.sequences), cache
        assert all(map(torch.equal, ours.logits, theirs.logits)), cache
    in_float = generated(model, "greedy")
    assert not torch.equal(in_float.logits[0], ours.logits[0])
    if attention == "sdpa":
        transformers.AttentionInterface.register("by_hand", by_hand)
        transformers.AttentionMaskInterface.register("by_hand", transformers.AttentionMaskInterface()["sdpa"])
        model.set_attn_implementation("by_hand")
        ours, theirs = generated(sim, "no cache"), generated(model, "no cache")
        assert torch.equal(ours.sequences, theirs.sequences)
        assert all(map(torch.equal, ours.logits, theirs.logits))


@pytest.mark.filterwarnings("ignore:QuantSim")
def test_a_cache_given_as_an_example_stays_as_it_is():
    torch.manual_seed(0)
    model = llama().eval()
    for cache in (transformers.DynamicCache(config=model.config), transformers.StaticCache(config=model.config, max_cache_len=20)):
        model(input_ids=IDS, past_key_values=cache)  # with gradients: what is in it is part of a graph
        kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]
        decode = {"input_ids": IDS[:, :1], "past_key_values": cache}
        sim = qsim.QuantSim(model, [{"input_ids": IDS}, decode], qsim.w4a16(16, kv_cache=8))
        sim.calibrate([{"input_ids": IDS}], progress=False)
        sim.bake()
        assert cache.get_seq_length() == IDS.shape[1]
        assert all(torch.equal(layer.keys, k) and torch.equal(layer.values, v) for layer, (k, v) in zip(cache.layers, kept, strict=True))


@pytest.mark.filterwarnings("ignore:QuantSim")
def test_trainer_trains_a_simulation(tmp_path):
    pytest.importorskip("accelerate")
    sim = simulated(llama, qsim.int8())
    twin = copy.deepcopy(sim)
    data = [{"input_ids": row, "labels": row, "no argument of the model": 1} for row in torch.randint(3, 128, (8, 12))]
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_steps": 1, "save_strategy": "no"}
    arguments = transformers.TrainingArguments(str(tmp_path), max_steps=4, per_device_train_batch_size=8, learning_rate=1e-2, **options)
    trainer = transformers.Trainer(model=sim, args=arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    logged = [entry for entry in trainer.state.log_history if "loss" in entry]
    ids = torch.stack([row["input_ids"] for row in data])
    logits = twin.train()(input_ids=ids, use_cache=False).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in twin.parameters() if p.grad is not None])
    assert logged[0]["loss"] == pytest.approx(loss.item(), rel=1e-3)
    assert logged[0]["grad_norm"] == pytest.approx(norm.item(), rel=1e-2)
    assert logged[-1]["loss"] < logged[0]["loss"] - 0.1
    assert trainer.evaluate()["eval_loss"] < logged[0]["loss"]


def test_trainer_knows_a_simulation_for_what_its_model_is(tmp_path):
    """It shifts the labels of causal models, which it tells by their name."""
    pytest.importorskip("accelerate")
    sim = simulated(llama, qsim.int8())
    model = llama()
    model.load_state_dict(sim.model.state_dict())
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 128, (8, 12))]
    options = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "save_strategy": "no", "label_smoothing_factor": 0.1}
    arguments = transformers.TrainingArguments(str(tmp_path), **options)

    def loss(module):
        return transformers.Trainer(model=module, args=arguments, eval_dataset=data).evaluate()["eval_loss"]

    with sim.in_float():
        assert loss(sim) == loss(model)


@pytest.mark.filterwarnings("ignore:QuantSim")
def test_the_page_on_language_models(tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    page = Path(__file__).parents[3] / "docs" / "language_models.md"
    blocks = re.findall(r"```py\n(.*?)```", page.read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    names = {}
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)
    assert names["tokens"].shape[1] <= 32
    assert (tmp_path / "sim.pt").exists()


def test_experts_are_the_same_weights_whichever_function_multiplies_with_them():
    """In compiled code transformers' grouped products are an operator of its own."""
    sizes = {**SIZES, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 8, "num_hidden_layers": 1}
    logits = {}
    for how in ("grouped_mm", "batched_mm", "eager"):
        torch.manual_seed(0)
        model = transformers.Qwen3MoeForCausalLM(transformers.Qwen3MoeConfig(**sizes)).eval()
        model.set_experts_implementation(how)
        example = {"input_ids": IDS, "use_cache": False}
        sim = qsim.QuantSim(model, example, qsim.w4a16(group=32))
        sim.calibrate([example], progress=False)
        assert sum(sim.weights()[key].dim() == 3 for key in sim.weights()) == 2
        with torch.no_grad():
            logits[how] = sim(**example).logits
            assert torch.equal(sim.bake()(**example).logits, logits[how])
            if how == "grouped_mm":
                assert torch.equal(torch.compile(sim, backend="aot_eager", fullgraph=True)(**example).logits, logits[how])
    for found in logits.values():
        torch.testing.assert_close(found, logits["eager"], atol=1e-6, rtol=0)


def test_compiled_experts_have_every_quantizer_and_no_warning():
    """Eager mode calls a function that no mode meets, whose result is quantized where it is read; compiled code an operator."""
    sim = mixtures.simulated(mixtures.mixture("mixtral"), qsim.int8())
    graphs = []
    compiled = torch.compile(sim, backend=lambda graph, inputs: graphs.append(graph) or graph.forward, fullgraph=True)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert torch.equal(compiled(**mixtures.EXAMPLE).logits, sim(**mixtures.EXAMPLE).logits)
    called = [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]
    products = [at for at, name in enumerate(called) if "grouped_mm" in name]
    assert len(products) == 4
    assert all("fake_quantize" in called[at + 1] for at in products)


def test_hooks_that_leave_parameters_where_they_are_are_simulated():
    """As `dispatch_model` and a `device_map` of one device put them: they replace forward, around the model's own."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, example = llama().eval(), {"input_ids": IDS, "use_cache": False}
    expected = simulated_outputs(model, example)
    assert torch.equal(simulated_outputs(accelerate.dispatch_model(model, {"": "cpu"}, force_hooks=True), example), expected)
    for module in model.modules():
        accelerate.hooks.add_hook_to_module(module, accelerate.hooks.AlignDevicesHook(io_same_device=True))
    assert torch.equal(simulated_outputs(model, example), expected)


def simulated_outputs(model, example):
    sim = qsim.QuantSim(model, example, qsim.w4a16(group=32))
    sim.calibrate([example], progress=False)
    with torch.no_grad():
        return sim(**example).logits
