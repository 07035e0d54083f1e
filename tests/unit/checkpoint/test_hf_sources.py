"""Directories of Hugging Face: a file that contradicts its configuration, and equal spellings."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.hf.model_folder import read_hf
from aligner.checkpoint.model_source import open_model
from aligner.errors import CheckpointError

pytestmark = pytest.mark.integration

SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "vocab_size": 64,
}


def directory(folder, **changes):
    config = AutoConfig.for_model("llama", **SIZES, tie_word_embeddings=True, **changes)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("same", [True, False])
def test_an_output_matrix_beside_tied_embeddings_is_the_embedding_or_refused(tmp_path, same):
    file = directory(tmp_path) / "model.safetensors"
    state = load_file(file)
    output = state["model.embed_tokens.weight"].clone()
    save_file({**state, "lm_head.weight": output if same else output + 1}, file, {"format": "pt"})
    if same:
        assert "output_layer.weight" not in read_hf(tmp_path).weights
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
            read_hf(tmp_path)


def test_spellings_that_transformers_takes_for_the_same():
    llama = {**SIZES, "model_type": "llama", "num_key_value_heads": 4}
    assert architecture_from_hf({**llama, "hidden_act": "swish"}) == architecture_from_hf(llama)
    with pytest.raises(CheckpointError, match="hidden_act='gelu'"):
        architecture_from_hf({**llama, "hidden_act": "gelu"})
    moe = {**SIZES, "model_type": "qwen3_moe", "mlp_only_layers": None}
    assert architecture_from_hf(moe).num_moe_experts == 128


def test_a_config_file_in_place_of_its_directory_and_with_a_byte_order_mark(tmp_path):
    path = directory(tmp_path) / "config.json"
    message = re.escape(f"Give its directory, {str(tmp_path)!r}")
    with pytest.raises(CheckpointError, match=message), open_model(path):
        pass
    path = directory(tmp_path) / "config.json"
    plain = read_hf(tmp_path).architecture
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(json.loads(path.read_bytes())).encode())
    assert read_hf(tmp_path).architecture == plain
    assert torch.is_tensor(read_hf(tmp_path).weights["embedding.word_embeddings.weight"])


def sharded(folder, **more):
    """The directory of an index that lists all tensors but ``more``; returns the tensors."""
    directory(folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({**state, **more}, folder / "shard.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


def test_a_tensor_that_the_index_does_not_list(tmp_path):
    assert len(sharded(tmp_path / "listed")) == len(read_hf(tmp_path / "listed").weights._state)
    sharded(tmp_path / "more", extra=torch.ones(2))
    with pytest.raises(CheckpointError, match=r"shard\.safetensors' contains extra, but"):
        read_hf(tmp_path / "more")


def test_one_file_precedes_an_index_as_in_transformers(tmp_path):
    state = sharded(tmp_path)
    other = {name: tensor + 1 for name, tensor in state.items()}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight
    assert torch.equal(read_hf(tmp_path).weights["embedding.word_embeddings.weight"], theirs)


def test_integers_are_refused(tmp_path):
    file = directory(tmp_path) / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.weight"
    whole = torch.ones(32, 48, dtype=torch.int8)
    save_file({**load_file(file), name: whole}, file, {"format": "pt"})
    weights = read_hf(tmp_path).weights
    with pytest.raises(CheckpointError, match=rf"{name} of .* has torch\.int8"):
        dict(weights)
