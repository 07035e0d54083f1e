"""Writing a `.nemo`: what others can read, the same bytes every time, whole or not at all."""

import dataclasses
import json
import tarfile
import warnings

import pytest
import torch
from omegaconf import OmegaConf
from test_nemo_kinds import GPT, LLAMA, NEMOTRON, assert_same, distinct_weights
from test_run_state import size_limit

from aligner.architecture import RopeScaling
from aligner.checkpoint.nemo.config import architecture_from_config, config_from_architecture
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import CheckpointError, StorageError
from aligner.examples.tasks.tiny_model import write_tiny_nemo
from aligner.models.gpt.megatron.build import transformer_config
from aligner.parallel.groups import initialize_parallel

MOE = dataclasses.replace(LLAMA, num_moe_experts=3, moe_ffn_hidden_size=12)
ARCHITECTURES = {"llama": LLAMA, "gpt": GPT, "nemotron": NEMOTRON, "moe": MOE}


@pytest.mark.parametrize(
    ("name", "dtype"),
    [*dict.fromkeys(ARCHITECTURES, torch.float32).items(), ("moe", torch.bfloat16)],
)
def test_round_trip_is_exact(tmp_path, name, dtype):
    architecture = ARCHITECTURES[name]
    weights = distinct_weights(architecture, dtype)
    files = byte_level_tokenizer().files()
    save_nemo(tmp_path / "m.nemo", weights, architecture, files, {"seed": 7, "hidden_size": 1})
    with open_nemo(tmp_path / "m.nemo") as nemo:
        assert nemo.architecture == architecture
        assert nemo.config["seed"] == 7
        assert nemo.tokenizer_files == files
        assert_same(nemo.weights, weights)


def test_the_same_model_gives_the_same_bytes(tmp_path):
    for name in ("a.nemo", "b.nemo"):
        write_tiny_nemo(tmp_path / name)
    write_tiny_nemo(tmp_path / "c.nemo", seed=1)
    contents = [(tmp_path / f"{name}.nemo").read_bytes() for name in "abc"]
    assert contents[0] == contents[1] != contents[2]


def test_incomplete_weights_are_refused_before_anything_is_written(tmp_path):
    weights = distinct_weights(LLAMA)
    del weights["decoder.layers.3.mlp.linear_fc1.weight"]
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.linear_fc1"):
        save_nemo(tmp_path / "m.nemo", weights, LLAMA, {})
    assert list(tmp_path.iterdir()) == []


def test_members_are_named_as_nemo_names_them(tmp_path):
    save_nemo(tmp_path / "m.nemo", distinct_weights(LLAMA), LLAMA, {"tokenizer.model": b"x"})
    with tarfile.open(tmp_path / "m.nemo") as tar:
        names = tar.getnames()
        metadata = json.load(tar.extractfile("./model_weights/metadata.json"))
    assert names[0] == "."
    assert all(name.startswith("./") for name in names[1:])
    assert metadata["sharded_backend"] == "torch_dist"
    with open_nemo(tmp_path / "m.nemo") as nemo:
        section = nemo.config["tokenizer"]
        assert section["library"] == "sentencepiece"
        assert f"./{section['model'].removeprefix('nemo:')}" in names


@pytest.mark.integration
@pytest.mark.parametrize("name", ["llama", "gpt"])
def test_megatron_core_reads_what_we_write(tmp_path, name):
    """Its own `dist_checkpointing.load` into the sharded state dict of its own layer spec."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    architecture = ARCHITECTURES[name]
    weights = distinct_weights(architecture)
    save_nemo(tmp_path / "m.nemo", weights, architecture, {})
    with tarfile.open(tmp_path / "m.nemo") as tar:
        tar.extractall(tmp_path, filter="data")
    initialize_parallel()
    config = transformer_config(architecture)
    gpt = GPTModel(
        config=config,
        transformer_layer_spec=get_gpt_layer_local_spec(normalization=config.normalization),
        vocab_size=architecture.padded_vocab_size(),
        max_sequence_length=architecture.max_position_embeddings,
        share_embeddings_and_output_weights=architecture.tie_embeddings,
        position_embedding_type=architecture.position_embedding,
    )
    wanted = gpt.sharded_state_dict(prefix="model.")
    wanted = {key: value for key, value in wanted.items() if "_extra_state" not in key}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loaded = dist_checkpointing.load(wanted, str(tmp_path / "model_weights"))
    tensors = {k.removeprefix("model."): v for k, v in loaded.items() if torch.is_tensor(v)}
    assert len(tensors) == len(list(gpt.parameters()))
    for key, tensor in tensors.items():
        expected = weights[key]
        assert torch.equal(tensor[: expected.shape[0]], expected), key


@pytest.mark.integration
def test_nemo_reads_the_configuration_and_unpacks_the_rest(tiny_nemo, tmp_path):
    from nemo.core import ModelPT
    from nemo.core.connectors.save_restore_connector import SaveRestoreConnector

    theirs = SaveRestoreConnector()
    found = theirs.restore_from(ModelPT, str(tiny_nemo), return_config=True)
    theirs._unpack_nemo_file(str(tiny_nemo), str(tmp_path))
    with open_nemo(tiny_nemo) as packed, open_nemo(tmp_path) as unpacked:
        assert OmegaConf.to_container(found) == packed.config
        assert_same(unpacked.weights, packed.weights)


@pytest.mark.parametrize(
    "architecture",
    [
        dataclasses.replace(GPT, activation="gelu_tanh"),
        dataclasses.replace(LLAMA, window_size=5, family="mistral"),
        dataclasses.replace(LLAMA, bias_qkv=True, family="qwen2"),
        dataclasses.replace(LLAMA, qk_layernorm=True, kv_channels=8),
        dataclasses.replace(LLAMA, rope_scaling=RopeScaling(8.0), rotary_base=5e5),
        dataclasses.replace(LLAMA, rope_scaling=RopeScaling(2.0, kind="linear")),
        dataclasses.replace(LLAMA, activation="geglu", position_embedding="none"),
    ],
)
def test_configuration_round_trip(architecture):
    assert architecture_from_config(config_from_architecture(architecture), None) == architecture


def test_nemo_defaults_and_switches():
    config = {"num_layers": 1, "hidden_size": 8, "num_attention_heads": 2, "encoder_seq_length": 4}
    architecture = architecture_from_config(config, 10)
    sizes = {"num_layers": 1, "hidden_size": 8, "ffn_hidden_size": 32, "max_position_embeddings": 4}
    sizes |= {"num_attention_heads": 2, "num_query_groups": 2, "kv_channels": 4, "vocab_size": 10}
    sizes |= {"make_vocab_size_divisible_by": 128, "attention_dropout": 0.1, "hidden_dropout": 0.1}
    assert architecture == dataclasses.replace(GPT, **sizes)
    scaled = architecture_from_config(config | {"scale_positional_embedding": True}, 10)
    assert scaled.rope_scaling == RopeScaling(8.0, 1.0, 4.0, 8192)
    windowed = architecture_from_config(config | {"window_size": [3, 0]}, 10)
    assert windowed.window_size == 4  # three tokens to the left and the token itself


def test_a_full_disk_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "m.nemo"
    path.write_bytes(b"old")
    with size_limit(10_000), pytest.raises(StorageError, match=r"m\.nemo.*Free some space"):
        save_nemo(path, distinct_weights(LLAMA), LLAMA, {})
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]
    with pytest.raises(StorageError, match="Make the directory writable"):
        save_nemo(path / "below_a_file.nemo", distinct_weights(LLAMA), LLAMA, {})
