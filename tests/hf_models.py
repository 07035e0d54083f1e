"""Tiny random models of every Hugging Face family.

Norms and biases are random too, so that no tensor can stand for another.
"""

import torch

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

LLAMA_SIZES = {
    **{"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48},
    **{"num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 259, "max_position_embeddings": 64},
    **dict.fromkeys(["pad_token_id", "bos_token_id", "eos_token_id"], 2),
}
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3_ROPE |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 16}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 300.0}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 1e4, "factor": 8.0}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "attention_factor": 1.3}
YARN_ROPE |= {"beta_fast": 4.0, "beta_slow": 0.5, "original_max_position_embeddings": 32}
LONGROPE = {
    "rope_parameters": {"rope_type": "longrope", "rope_theta": 500.0, "partial_rotary_factor": 0.75}
    | {"short_factor": [1.0, 1.1, 1.5], "long_factor": [2.0, 3.0, 4.0]},
    **{"original_max_position_embeddings": 48, "max_position_embeddings": 96},
}
MIXTRAL = {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {"head_dim": 8, "num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SIGMOID_MOE = {"n_routed_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
SIGMOID_MOE |= {"num_hidden_layers": 4, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5}
SIGMOID_MOE |= {"n_group": 3, "topk_group": 2, "n_shared_experts": 2}
LATENT = {**SIGMOID_MOE, "q_lora_rank": 20, "kv_lora_rank": 12, "v_head_dim": 10}
LATENT |= {"qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "num_key_value_heads": 4}
DEEPSEEK_YARN = {"rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "beta_fast": 4.0}
DEEPSEEK_YARN |= {"beta_slow": 0.5, "original_max_position_embeddings": 32}
DEEPSEEK_YARN |= {"mscale": 0.7, "mscale_all_dim": 1.2}
BIASES = {"attention_bias": True, "mlp_bias": True}
CASES = {
    "llama2": ("llama", {"num_key_value_heads": 4}),
    "llama3": ("llama", {"rope_parameters": LLAMA3_ROPE}),
    "llama_linear_rope": ("llama", {"rope_parameters": {**LINEAR_ROPE, "factor": 2.0}}),
    "llama_biases": ("llama", BIASES),
    "smollm": ("llama", {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}),
    "mistral": ("mistral", {"sliding_window": None, "head_dim": 16}),
    "mistral_window": ("mistral", {"sliding_window": 5}),
    "qwen2": ("qwen2", {}),
    "qwen2_tied": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 16}),
    "qwen3_tied": ("qwen3", {"head_dim": 8, "tie_word_embeddings": True}),
    "mixtral": ("mixtral", MIXTRAL),
    "mixtral_window": ("mixtral", {**MIXTRAL, "num_local_experts": 3, "sliding_window": 5}),
    "qwen3_moe": ("qwen3_moe", QWEN3_MOE),
    "qwen3_moe_normed": ("qwen3_moe", {**QWEN3_MOE, "norm_topk_prob": True}),
    "nemotron": ("nemotron", {"head_dim": 12}),
    "nemotron_biases": ("nemotron", BIASES),
    "starcoder2": ("starcoder2", {"sliding_window": 5, "norm_epsilon": 1e-3}),
    "starcoder2_plain": ("starcoder2", {"use_bias": False, "tie_word_embeddings": False}),
    "phi3": ("phi3", {"sliding_window": 5}),
    "phi4_mini": ("phi3", {**LONGROPE, "tie_word_embeddings": True}),
    "stablelm": ("stablelm", {}),
    "stablelm_biases": ("stablelm", {"use_qkv_bias": True, "partial_rotary_factor": 0.5}),
    "seed_oss": ("seed_oss", {"head_dim": 12}),
    "arcee": ("arcee", {"rope_parameters": YARN_ROPE}),
    "arcee_biases": ("arcee", BIASES),
    "smollm3": ("smollm3", {"num_hidden_layers": 4}),
    "smollm3_biases": ("smollm3", {"no_rope_layers": [0, 1], **BIASES}),
    "glm": ("glm", {"head_dim": 12}),
    "ernie4_5": ("ernie4_5", {"head_dim": 8}),
    "ernie4_5_biases": ("ernie4_5", {"head_dim": 8, "use_bias": True}),
    "helium": ("helium", {"head_dim": 8}),
    "glm4": ("glm4", {"head_dim": 12}),
    "olmo2": ("olmo2", {}),
    "granite": (
        "granite",
        {"attention_multiplier": 0.3, "logits_scaling": 0.7}
        | {"embedding_multiplier": 1.7, "residual_multiplier": 0.6},
    ),
    "gemma": ("gemma", {"head_dim": 12, "tie_word_embeddings": True}),
    "olmo3": ("olmo3", {"num_hidden_layers": 4, "sliding_window": 5}),
    "olmo3_yarn": (
        "olmo3",
        {"sliding_window": 5, "layer_types": ["full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": YARN_ROPE, "sliding_attention": PLAIN_ROPE}},
    ),
    "gemma2": (
        "gemma2",
        {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 5, "query_pre_attn_scalar": 7}
        | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        {"head_dim": 12, "num_hidden_layers": 4, "sliding_window": 5, "query_pre_attn_scalar": 7}
        | {"layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 2]},
    ),
    "gemma3_scaled": (
        "gemma3_text",
        {"head_dim": 8, "layer_types": ["full_attention", "sliding_attention"]}
        | {"rope_parameters": {"full_attention": LINEAR_ROPE, "sliding_attention": PLAIN_ROPE}},
    ),
    "qwen2_moe": (
        "qwen2_moe",
        {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 24}
        | {"shared_expert_intermediate_size": 20},
    ),
    "glm4_moe": (
        "glm4_moe",
        {**SIGMOID_MOE, "head_dim": 12, "use_qk_norm": True, "attention_bias": True},
    ),
    "glm4_moe_plain": (
        "glm4_moe",
        {**SIGMOID_MOE, "n_group": 1, "topk_group": 1, "norm_topk_prob": False},
    ),
    "gpt_oss": (
        "gpt_oss",
        {"head_dim": 12, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 5}
        | {"swiglu_limit": 0.6, "rope_parameters": {**YARN_ROPE, "truncate": False}},
    ),
    "gpt_oss_plain_rope": (
        "gpt_oss",
        {"head_dim": 8, "num_local_experts": 3, "num_experts_per_tok": 2}
        | {"rope_parameters": PLAIN_ROPE},
    ),
    "deepseek_v3": ("deepseek_v3", {**LATENT, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3_plain": ("deepseek_v3", {**LATENT, "q_lora_rank": None, "v_head_dim": 12}),
    "gpt2": ("gpt2", {}),
    "gpt2_erf": ("gpt2", {"activation_function": "gelu"}),
    "gpt2_n_inner": ("gpt2", {"n_inner": 40}),
}
GPT2_SIZES = {
    **{"n_layer": 2, "n_embd": 32, "n_head": 4, "vocab_size": 259, "n_positions": 64},
    **dict.fromkeys(["attn_pdrop", "resid_pdrop", "embd_pdrop"], 0.0),
}


def random_model(model_type, changes):
    """A transformers model with every parameter random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes = GPT2_SIZES if model_type == "gpt2" else LLAMA_SIZES
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(sizes | changes)))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        corrections = [b for name, b in model.named_buffers() if "e_score_correction" in name]
        for parameter in (*model.parameters(), *corrections):
            noise = torch.empty(parameter.shape).normal_(0, 0.2, generator=generator)
            parameter.copy_(noise + (1.0 if parameter.dim() == 1 else 0.0))
    return model.eval()


def save_random_model(model_type, changes, folder):
    """Write `random_model` with a tokenizer, and return it."""
    model = random_model(model_type, changes)
    model.save_pretrained(folder)
    for name, content in byte_level_tokenizer().files().items():
        (folder / name).write_bytes(content)
    return model
