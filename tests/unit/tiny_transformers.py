"""Tiny random models of the decoder-only language model types of transformers.

`tiny_model` builds a float32 model on the CPU. `_SIZES` sets sizes under the names that
configurations commonly use. `_OVERRIDES` has what a type needs besides, and multipliers and caps at
values whose omission changes the logits.
"""

import inspect
from typing import Any

import torch
from torch import nn

LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, WINDOW = 4, 64, 4, 2, 16, 128, 8


def _named(names: str, value: Any) -> dict[str, Any]:
    return dict.fromkeys(names.split(), value)


_SIZES: dict[str, Any] = {
    # Depth and width.
    **_named("num_hidden_layers n_layer n_layers num_layers", LAYERS),
    **_named("hidden_size d_model n_embd dim word_embed_proj_dim embedding_size", HIDDEN),
    **_named("intermediate_size ffn_dim n_inner ffn_hidden_size", 96),
    **_named("num_attention_heads n_head n_heads attention_heads num_heads", HEADS),
    **_named("num_key_value_heads num_kv_heads n_head_kv", KV_HEADS),
    **_named("head_dim attention_head_dim global_head_dim swa_head_dim", HEAD_DIM),
    # Vocabulary and positions.
    **_named("vocab_size vocab_size_per_layer_input", VOCAB),
    **_named("max_position_embeddings n_positions n_ctx max_seq_len", 256),
    **_named("sliding_window sliding_window_size attention_window_size", WINDOW),
    "attention_chunk_size": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    # Experts.
    **_named("num_experts num_local_experts n_routed_experts moe_num_experts", 4),
    **_named("num_experts_per_tok moe_topk moe_k top_k_experts", 2),
    **_named("moe_intermediate_size expert_ffn_hidden_size shared_expert_intermediate_size", 32),
    **_named("moe_shared_expert_intermediate_size shared_intermediate_size", 32),
    **_named("n_shared_experts num_shared_experts num_shared_expert moe_num_shared_experts", 1),
    **_named("n_group topk_group", 1),
    **_named("first_k_dense_replace num_dense_layers moe_layer_start_index", 1),
    # Latent attention, and its indexers.
    **_named("q_lora_rank kv_lora_rank", 24),
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    **_named("index_n_heads index_head_dim", 4),
    "index_topk": 64,
    # Linear attention and state spaces.
    **_named("linear_num_key_heads linear_num_value_heads", 4),
    **_named("linear_key_head_dim linear_value_head_dim", 16),
    **_named("mamba_n_heads mamba_num_heads n_mamba_heads", 8),
    **_named("mamba_d_head mamba_head_dim mamba_headdim", 16),
    **_named("mamba_d_state ssm_state_size state_size", 16),
    **_named("mamba_n_groups n_groups mamba_ngroups", 1),
    **_named("mamba_chunk_size chunk_size", 16),
    **_named("mamba_d_ssm", 128),
    **_named("mamba_dt_rank time_step_rank", 4),
    **_named("lru_width conv_dim conv_dim_out", HIDDEN),
    # Nothing random in training.
    **_named("attention_dropout hidden_dropout resid_pdrop embd_pdrop attn_pdrop dropout", 0.0),
    **_named("activation_dropout layerdrop residual_dropout embedding_dropout", 0.0),
    **_named("resid_dropout embed_dropout input_jitter_noise router_jitter_noise", 0.0),
    **_named("summary_first_dropout classifier_dropout hidden_dropout_prob", 0.0),
    "attention_probs_dropout_prob": 0.0,
    # Larger than the usual 0.02, so that attention and experts change the logits.
    **_named("initializer_range init_std init_method_std", 0.125),
    "use_cache": True,
}

_ALTERNATING = ["sliding_attention", "full_attention"] * 2
_GRANITE = {
    "embedding_multiplier": 1.7,
    "logits_scaling": 0.7,
    "residual_multiplier": 0.6,
    "attention_multiplier": 0.3,
}
_INDEXER = {"index_head_dim": 16, "index_topk": 8}
# None omits the size of `_SIZES`.
_OVERRIDES: dict[str, dict[str, Any]] = {
    "axk2": _INDEXER,
    "bamba": {"layer_types": None, "attn_layer_indices": [1, 3]},
    "codegen": {"rotary_dim": 8},
    "cohere": {"logit_scale": 0.8},
    "cohere2": {"logit_scale": 0.8},
    "cohere2_moe": {"logit_scale": 0.8},
    "cohere_compass_text": {
        "layer_types": _ALTERNATING,
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _ALTERNATING[:2]
        },
        "logit_scale": 0.8,
    },
    "ctrl": {"dff": 96},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
        "ffn_config": {
            "hidden_size": HIDDEN,
            "ffn_hidden_size": 96,
            "moe_num_experts": 4,
            "moe_top_k": 2,
        },
    },
    "deepseek_v32": _INDEXER,
    "deepseek_v4": {
        "num_key_value_heads": 1,
        "o_groups": 2,
        "o_lora_rank": 16,
        "index_head_dim": 16,
    },
    "falcon_h1": {"layer_types": None, "lm_head_multiplier": 0.7, "key_multiplier": 0.8},
    "gemma2": {
        "final_logit_softcapping": 2.5,
        "attn_logit_softcapping": 1.5,
        "query_pre_attn_scalar": 16,
    },
    "gemma3_text": {"query_pre_attn_scalar": 16},
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 16,
        "laurel_rank": 8,
        "final_logit_softcapping": 2.5,
    },
    "gemma4_text": {"final_logit_softcapping": 2.5},
    "glm_moe_dsa": _INDEXER,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "gptj": {"rotary_dim": 8},
    "granite": _GRANITE,
    "granitemoe": _GRANITE,
    "granitemoehybrid": {
        "logits_scaling": 0.7,
        "layer_types": ["linear_attention", "full_attention"] * 2,
    },
    "hy_v4": _INDEXER,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2, "num_layers": 2},
    "mamba2": {"num_heads": 8},
    "minicpm3": {"dim_model_base": 48},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 64,
        "indexer_compress_ratio": 4,
        "ple_embed_dim": 16,
        "ngram_vocab_size_base": 256,
        "hc_lowrank": 8,
        "split_ngram_parts": 1,
    },
    "recurrent_gemma": {"layer_types": None, "logits_soft_cap": 2.5},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "attention_head_dim": None},
    "zaya": {"num_experts_per_tok": 1, "router_hidden_size": 16},
}

# Types of `AutoModelForCausalLM` that are not decoder-only language models: encoders, decoders of
# encoder-decoder models, and models of images or sound, whose language models are types too. The
# last two lines are aliases, and types without a small configuration.
_OTHERS = """
    bart bert bert-generation big_bird bigbird_pegasus blenderbot blenderbot-small blt camembert
    data2vec-text electra ernie marian mbart megatron-bert mvp pegasus plbart prophetnet reformer
    rembert roberta roberta-prelayernorm roc_bert roformer trocr whisper xlm xlm-roberta
    xlm-roberta-xl xlnet xmod
    dots3_note emu3 fuyu gemma3 gemma3n gemma4 gemma4_assistant gemma4_unified
    gemma4_unified_assistant git got_ocr2 llama4 mllama moshi moss_transcribe_diarize musicgen
    musicgen_melody phi4_multimodal qwen3_5 qwen3_5_moe qwen4_exp
    gpt-sw3 internlm3 iquestcoder
    cpmant dots3_note_text
"""


def model_types() -> list[str]:
    """Return the decoder-only types of `AutoModelForCausalLM`."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - set(_OTHERS.split()))


def tiny_config(model_type: str, **more: Any) -> Any:
    """Return a configuration of a type with small sizes. ``more``: further keys."""
    from transformers import AutoConfig

    full = AutoConfig.for_model(model_type)
    aliases = getattr(type(full), "attribute_map", {})
    known = {*full.to_dict(), *inspect.signature(type(full).__init__).parameters, *aliases}
    sizes = {name: value for name, value in _SIZES.items() if name in known}
    for alias, name in aliases.items():
        if name in sizes:
            sizes.pop(alias, None)
    if "qk_rope_head_dim" in known:
        sizes |= {"head_dim": sizes["qk_rope_head_dim"], "num_key_value_heads": HEADS}
    # One layer of each kind, in turn.
    for key in ("layer_types", "mlp_layer_types"):
        kinds = list(dict.fromkeys(getattr(full, key, None) or ()))
        if key in known and kinds:
            sizes[key] = [kinds[index % len(kinds)] for index in range(LAYERS)]
    sizes |= _OVERRIDES.get(model_type, {}) | more
    used = {name: value for name, value in sizes.items() if value is not None}
    return AutoConfig.for_model(model_type, **used)


def tiny_model(
    model_type: str, *, seed: int = 0, attention: str | None = None, **more: Any
) -> nn.Module:
    """Build a float32 causal language model in evaluation mode, in which every part matters.

    ``attention``: name of the attention function, default: the model's own. ``more``: see
    `tiny_config`.
    """
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    options = {} if attention is None else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_config(
        tiny_config(model_type, **more), dtype=torch.float32, **options
    )
    # Biases of 0 and scales of 1 would hide faults.
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()
