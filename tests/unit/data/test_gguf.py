"""GGUF files: every key and tensor is used, or refused by name."""

import gguf
import numpy as np
import pytest
import torch
from hf_models import LINEAR_ROPE, LLAMA3_ROPE, LLAMA_SIZES
from transformers import AutoConfig, AutoModelForCausalLM

from aligner.checkpoint.hf.model_folder import read_hf, save_hf
from aligner.data.tokenizers.byte_tokenizer import _byte_characters
from aligner.data.tokenizers.loading import load_tokenizer
from aligner.errors import CheckpointError

pytestmark = pytest.mark.integration

SIZES = {**LLAMA_SIZES, "vocab_size": 300, "max_position_embeddings": 512}
PARTS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "mlp.gate": "ffn_gate_inp",
}
NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def random_model(kind="llama", **changes):
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **(SIZES | changes))
    model = AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def write(path, model, arch="llama", *, skip=(), keys=(), tensors=(), pre="gpt-2", merges=True):
    """Write ``model`` as llama.cpp's converter does: the rotations of q and k in turns."""
    config = model.config
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer = gguf.GGUFWriter(str(path), arch)
    told = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": head,
        "attention.value_length": head,
        "attention.layer_norm_rms_epsilon": float(config.rms_norm_eps),
        "rope.freq_base": 10000.0,
    }
    add = {str: writer.add_string, float: writer.add_float32, int: writer.add_uint32}
    for key, value in {**{f"{arch}.{k}": v for k, v in told.items()}, **dict(keys)}.items():
        add[type(value)](key, value)
    pairs = [("1", "2"), ("12", "3"), ("123", "4")]
    words = [*_byte_characters(), *(a + b for a, b in pairs)]
    words += [f"[unused{n}]" for n in range(config.vocab_size - 2 - len(words))]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list([*words, "<s>", "</s>"])
    writer.add_token_types([1] * len(words) + [3, 3])
    if merges:
        writer.add_token_merges([" ".join(pair) for pair in pairs])
    writer.add_bos_token_id(len(words))
    writer.add_eos_token_id(len(words) + 1)
    for key, value in model.state_dict().items():
        module, _, leaf = key.rpartition(".")
        if key == "lm_head.weight" and config.tie_word_embeddings:
            continue
        number, _, part = module.removeprefix("model.layers.").partition(".")
        target = NAMES.get(module) or f"blk.{number}.{PARTS.get(part, part)}"
        array = value.float().numpy()
        if arch == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
            heads = array.shape[0] // head
            halves = array.reshape(heads, 2, head // 2, *array.shape[1:])
            array = halves.swapaxes(1, 2).reshape(array.shape)
        if key.endswith("experts.gate_up_proj"):
            gate, up = np.split(array, 2, axis=1)
            writer.add_tensor(f"blk.{number}.ffn_gate_exps.weight", np.ascontiguousarray(gate))
            writer.add_tensor(f"blk.{number}.ffn_up_exps.weight", np.ascontiguousarray(up))
        elif key.endswith("experts.down_proj"):
            writer.add_tensor(f"blk.{number}.ffn_down_exps.weight", array)
        elif f"{target}.{leaf}" not in skip:
            writer.add_tensor(f"{target}.{leaf}", np.ascontiguousarray(array))
    for key, array in dict(tensors).items():
        writer.add_tensor(key, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def logits(model):
    with torch.no_grad():
        return model(torch.tensor([[(7 * i) % 256 for i in range(120)]])).logits


def rebuilt(path, folder):
    model = read_hf(path)
    save_hf(folder, model.weights, model.architecture, model.tokenizer_files)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


LLAMA3 = {**LLAMA3_ROPE, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
LINEAR = {**LINEAR_ROPE, "factor": 4.0}
MOE = {"num_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
MOE |= {"head_dim": 16, "norm_topk_prob": True}
MOE_KEYS = {"qwen3moe.expert_count": 4, "qwen3moe.expert_used_count": 2}
MOE_KEYS |= {"qwen3moe.expert_feed_forward_length": 24}
SCALED = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}


@pytest.mark.parametrize(
    ("kind", "arch", "changes", "keys"),
    [
        ("llama", "llama", {}, {}),
        ("llama", "llama", {"head_dim": 16, "tie_word_embeddings": True}, {}),
        ("llama", "llama", {"attention_bias": True, "mlp_bias": True}, {}),
        ("llama", "llama", {"rope_parameters": LINEAR}, SCALED),
        ("llama", "llama", {"rope_parameters": LINEAR}, {"llama.rope.scale_linear": 4.0}),
        ("llama", "llama", {"rope_parameters": LLAMA3}, {}),
        ("qwen2", "qwen2", {}, {}),
        ("qwen3", "qwen3", {"head_dim": 16}, {}),
        ("qwen3_moe", "qwen3moe", MOE, MOE_KEYS),
    ],
    ids=str,
)
def test_a_file_gives_the_model_it_was_written_from(tmp_path, kind, arch, changes, keys):
    model = random_model(kind, **changes)
    tensors = {}
    if changes.get("rope_parameters") is LLAMA3:
        plain = 1.0 / 10000.0 ** (np.arange(0, 8, 2) / 8)
        factors = plain / model.model.rotary_emb.inv_freq.numpy()
        tensors = {"rope_freqs.weight": factors.astype(np.float32)}
    path = write(tmp_path / "model.gguf", model, arch, keys=keys, tensors=tensors)
    found = rebuilt(path, tmp_path / "hf")
    torch.testing.assert_close(logits(found), logits(model), atol=1e-4, rtol=1e-4)


QUERY_KEY_VALUE = {
    f"blk.{layer}.attn_{part}.bias": np.ones(size, np.float32)
    for layer in (0, 1)
    for part, size in (("q", 32), ("k", 16), ("v", 16))
}
WINDOW = {"llama.attention.sliding_window": 64}
EXPERTS = {"blk.0.ffn_gate_exps.weight": np.ones((4, 48, 32), np.float32)}


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"skip": ["blk.1.ffn_up.weight"]}, "layers.1.mlp.up_proj"),
        ({"skip": ["token_embd.weight"]}, "token_embd.weight"),
        ({"keys": {"split.count": 2, "split.no": 0}}, "split.count=2"),
        ({"tensors": EXPERTS}, "ffn_gate_exps"),
        ({"keys": {"llama.expert_count": 4}}, "llama.expert_count=4"),
        ({"keys": {"llama.rope.scaling.type": "yarn"}}, "rope.scaling.type='yarn'"),
        ({"keys": {"llama.rope.dimension_count": 4}}, "rope.dimension_count"),
        ({"keys": {"llama.attention.clamp_kqv": 8.0}}, "clamp_kqv=8.0"),
        ({"tensors": {"rope_freqs.weight": np.array([1, 2, 5, 9], np.float32)}}, "rope_freqs"),
        ({"tensors": QUERY_KEY_VALUE}, r"blk\.0\.attn_q\.bias: "),
        ({"tensors": QUERY_KEY_VALUE, "keys": WINDOW}, "layers.0.self_attn.k_proj.bias"),
        ({"pre": "no-such-rule"}, "no-such-rule"),
        ({"merges": False}, "merges is missing"),
        ({"keys": {"tokenizer.ggml.precompiled_charsmap": "x"}}, "precompiled_charsmap"),
        ({"keys": {"general.type": "adapter"}}, "adapter"),
    ],
    ids=str,
)
def test_what_is_not_used_is_refused_by_name(tmp_path, options, named):
    path = write(tmp_path / "model.gguf", random_model(), **options)
    with pytest.raises(CheckpointError, match=named):
        read_hf(path)


@pytest.mark.parametrize(
    ("pre", "tokens"),
    [
        *((name, 4) for name in ("smollm", "deepseek-coder", "qwen2")),
        *(("llama-bpe", 2), (None, 1)),
    ],
)
def test_digits_are_split_by_the_named_rule(tmp_path, pre, tokens):
    path = write(tmp_path / "model.gguf", random_model(), pre=pre)
    assert len(load_tokenizer(path).encode("1234")) == tokens
    assert len(read_hf(path).tokenizer.encode("1234")) == tokens


def test_no_token_is_added_to_those_of_the_file(tmp_path):
    """The model has a row for each token of the file; transformers adds GPT-2's end token."""
    text = "1<|endoftext|>2</s>"
    for tokenizer in (
        read_hf(write(tmp_path / "model.gguf", random_model())).tokenizer,
        load_tokenizer(tmp_path / "model.gguf"),
    ):
        assert tokenizer.vocab_size == SIZES["vocab_size"]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert max(tokenizer.encode(text)) == tokenizer.eos_id == SIZES["vocab_size"] - 1
