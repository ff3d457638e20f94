"""Small mixtures of experts of transformers, with random weights, and what simulates them."""

import torch
import transformers

import qsim

EXAMPLE = {"input_ids": torch.randint(64, (2, 33), generator=torch.Generator().manual_seed(0))}
FAMILIES = {
    "mixtral": (transformers.MixtralConfig, {"intermediate_size": 96, "num_local_experts": 4}),
    "qwen3": (transformers.Qwen3MoeConfig, {"intermediate_size": 96, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16}),
    "olmoe": (transformers.OlmoeConfig, {"intermediate_size": 32, "num_experts": 4, "eos_token_id": None}),
    "deepseek": (
        transformers.DeepseekV3Config,
        {
            "intermediate_size": 96,
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "n_group": 2,
            "topk_group": 1,
            "num_key_value_heads": 4,
            "first_k_dense_replace": 1,
            "q_lora_rank": 32,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
    "granite": (transformers.GraniteMoeConfig, {"intermediate_size": 96, "num_local_experts": 4}),
}


def mixture(family, how="grouped_mm", seed=0):
    """`how` experts are computed: "grouped_mm", "batched_mm" or "eager"."""
    torch.manual_seed(seed)
    kind, own = FAMILIES[family]
    sizes = {"vocab_size": 64, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = kind(**{**sizes, "num_experts_per_tok": 2, "tie_word_embeddings": False, **own})
    config._attn_implementation, config._experts_implementation = "sdpa", how
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def simulated(model, config):
    """Calibrated; routers and the head are in float, as published checkpoints have them."""
    for name in ("*.gate.linear", "*.router.*", "lm_head"):
        config = config.override(name, weight=None, activation=None)
    sim = qsim.QuantSim(model, EXAMPLE, config)
    sim.calibrate([EXAMPLE], progress=False)
    return sim
