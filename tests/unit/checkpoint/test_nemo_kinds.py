"""Kinds of `.nemo` that the given files do not show, written by the format's description."""

import dataclasses
import os
from functools import partial
from pathlib import Path

import nemo_writers as writers
import pytest
import torch
from reference_gpt import reference_logits

from aligner.architecture import GPTArchitecture
from aligner.checkpoint.canonical import expected_shapes
from aligner.checkpoint.gpt_weights import GatheredWeights, load_weights
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.errors import CheckpointError
from aligner.models.gpt.megatron.build import build_gpt
from aligner.parallel.groups import initialize_parallel

LLAMA = GPTArchitecture(
    num_layers=4,
    hidden_size=16,
    ffn_hidden_size=24,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=4,
    vocab_size=21,
    max_position_embeddings=32,
    make_vocab_size_divisible_by=8,
)
GPT = dataclasses.replace(
    LLAMA,
    num_query_groups=4,
    activation="gelu",
    normalization="layernorm",
    position_embedding="learned_absolute",
    bias_linear=True,
    tie_embeddings=True,
)
NEMOTRON = dataclasses.replace(
    LLAMA, activation="squared_relu", normalization="layernorm1p", rotary_percent=0.5
)
LLAMA_KEYS = {
    "num_layers": 4,
    "hidden_size": 16,
    "ffn_hidden_size": 24,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "encoder_seq_length": 32,
    "max_position_embeddings": "${.encoder_seq_length}",
    "make_vocab_size_divisible_by": 8,
    "activation": "fast-swiglu",
    "normalization": "rmsnorm",
    "position_embedding_type": "rope",
    "bias": False,
    "share_embeddings_and_output_weights": False,
}
GPT_KEYS = LLAMA_KEYS | {
    "num_query_groups": None,
    "activation": "gelu",
    "normalization": "layernorm",
    "position_embedding_type": "learned_absolute",
    "bias": True,
    "share_embeddings_and_output_weights": True,
}
NEMOTRON_KEYS = LLAMA_KEYS | {
    "activation": "squared-relu",
    "normalization": "layernorm1p",
    "rotary_percentage": 0.5,
}

WIDE = 0.6  # weights wide enough that the two GELUs can be told apart


def distinct_weights(architecture, dtype=torch.float32, scale=0.3):
    """Random, biases and norms too, so that no tensor can stand for another."""
    generator = torch.Generator().manual_seed(5)
    return {
        name: (torch.randn(shape, generator=generator) * scale).to(dtype)
        for name, shape in expected_shapes(architecture).items()
    }


def read_back(folder, members, mode="w"):
    path, config = folder / "m.nemo", writers.config_members(21, **LLAMA_KEYS)
    writers.write_archive(path, config | members, mode=mode)
    with open_nemo(path) as nemo:
        return nemo.architecture, {name: nemo.weights[name] for name in nemo.weights}


def assert_same(found, expected):
    assert set(found) == set(expected)
    for name in expected:
        assert found[name].dtype == expected[name].dtype, name
        assert torch.equal(found[name], expected[name]), name


def gpt_and_logits(weights, architecture, tokens):
    """The model with these weights, and its logits of the vocabulary."""
    initialize_parallel()
    gpt = build_gpt(architecture).eval()
    load_weights(gpt, weights, architecture)
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return gpt, gpt(tokens, positions, None)[..., : architecture.vocab_size]


RANKS = partial(writers.rank_files, architecture=LLAMA, tp=2)
ZARR = partial(writers.zarr_members, architecture=LLAMA)
KINDS = {
    "local": (writers.single_file, torch.float32),
    "te": (partial(writers.single_file, names=writers.TE_NAMES), torch.float32),
    "legacy": (writers.legacy_single_file, torch.float32),
    "legacy_unfused_gate": (partial(writers.legacy_single_file, unfused_gate=True), torch.float32),
    "amp_o2": (partial(writers.single_file, prefix="model.module."), torch.float32),
    "mp_rank": (partial(RANKS, pp=1, style="mp_rank"), torch.float32),
    "tp_rank": (partial(RANKS, pp=2), torch.bfloat16),
    "zarr": (partial(ZARR, row_chunks=1), torch.float32),
    # The chunks do not divide 64 rows: the last chunk reaches beyond the tensor.
    "zarr_3_chunks": (partial(ZARR, row_chunks=3), torch.float32),
    "zarr_bfloat16": (partial(ZARR, row_chunks=2), torch.bfloat16),
}


@pytest.mark.parametrize(("write", "dtype"), KINDS.values(), ids=KINDS)
def test_every_kind_is_read_as_it_was_written(tmp_path, write, dtype):
    weights = distinct_weights(LLAMA, dtype)
    mode = "w:gz" if write is writers.single_file else "w"
    architecture, found = read_back(tmp_path, write(writers.padded(weights, 8)), mode)
    assert architecture == LLAMA
    assert_same(found, weights)


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    members = RANKS(distinct_weights(LLAMA), pp=2)
    del members["tp_rank_01_pp_rank_000/model_weights.ckpt"]
    with pytest.raises(CheckpointError, match="tp 1 pp 0"):
        read_back(tmp_path, members)
    weights = distinct_weights(dataclasses.replace(LLAMA, vocab_size=20))
    with pytest.raises(CheckpointError, match="20 rows, fewer than the tokenizer's 21"):
        read_back(tmp_path, writers.single_file(weights))
    weights = distinct_weights(LLAMA)
    narrow = {**weights, "decoder.final_layernorm.weight": torch.zeros(15)}
    members = writers.single_file(writers.padded(narrow, 8))
    with pytest.raises(CheckpointError, match=r"final_layernorm\.weight has shape \[15\].*\[16\]"):
        read_back(tmp_path, members)
    del weights["decoder.layers.2.mlp.linear_fc2.weight"]
    weights["decoder.layers.0.mlp.linear_fc2.bias"] = torch.zeros(16)
    members = writers.single_file(writers.padded(weights, 8))
    with pytest.raises(CheckpointError) as caught:
        read_back(tmp_path, members)
    assert "missing decoder.layers.2.mlp.linear_fc2.weight" in str(caught.value)
    assert "unexpected decoder.layers.0.mlp.linear_fc2.bias" in str(caught.value)


HEAD = {"rm_head.weight": torch.ones(1, 16) / 3, "rm_head.bias": torch.ones(1) / 7}


def test_reward_model(tmp_path):
    weights = distinct_weights(LLAMA) | HEAD
    single = writers.single_file(writers.padded(weights, 8))
    for members in (single, RANKS(weights, pp=2)):
        assert_same(read_back(tmp_path, members)[1], weights)
    # A critic has no output layer.
    del weights["output_layer.weight"]
    save_nemo(tmp_path / "critic.nemo", weights, LLAMA, {})
    with open_nemo(tmp_path / "critic.nemo") as nemo:
        assert_same(nemo.weights, weights)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("base", "keys", "activation"),
    [
        (GPT, GPT_KEYS, "gelu"),
        (GPT, GPT_KEYS | {"bias_activation_fusion": True}, "gelu_tanh"),
        (GPT, GPT_KEYS | {"openai_gelu": True}, "gelu_tanh"),
        (NEMOTRON, NEMOTRON_KEYS, "squared_relu"),
        (LLAMA, LLAMA_KEYS, "swiglu"),
    ],
)
def test_log_probs_equal_a_float64_reference(tmp_path, base, keys, activation):
    expected = dataclasses.replace(base, activation=activation)
    weights = distinct_weights(expected, scale=WIDE if base is GPT else 0.3)
    members = writers.single_file(writers.padded(weights, 8))
    writers.write_archive(tmp_path / "m.nemo", writers.config_members(21, **keys) | members)
    tokens = torch.randint(21, (2, 13), generator=torch.Generator().manual_seed(1))
    with open_nemo(tmp_path / "m.nemo") as nemo:
        assert nemo.architecture == expected
        gpt, logits = gpt_and_logits(nemo.weights, nemo.architecture, tokens)
    wanted = reference_logits(weights, expected, tokens)
    gap = (logits.double().log_softmax(-1) - wanted.log_softmax(-1)).abs().max()
    assert gap < 5e-5  # float32 rounding; the wrong GELU shows at 3e-4
    assert_same(GatheredWeights(gpt, expected).on_rank_zero(), weights)


SHARED = Path(os.environ.get("ALIGNER_SHARED", Path(__file__).parents[4] / "shared"))
FILES = ["01_llama_torchdist", "03_gpt_singlefile", "04_llama_tp2", "05_llama_te_torchdist"]


@pytest.mark.integration
@pytest.mark.parametrize("name", FILES)
def test_log_probs_equal_the_writers(name):
    folder = SHARED / "data" / "nemo"
    if not (folder / f"{name}.nemo").exists():
        pytest.skip(f"needs {name}.nemo and .ref.pt in data/nemo of $ALIGNER_SHARED ({SHARED})")
    reference = torch.load(folder / f"{name}.ref.pt", weights_only=True)
    with open_nemo(folder / f"{name}.nemo") as nemo:
        vocabulary = nemo.architecture.vocab_size
        assert nemo.tokenizer.vocab_size == vocabulary
        _, logits = gpt_and_logits(nemo.weights, nemo.architecture, reference["tokens"])
    assert reference["logits"].shape[-1] == vocabulary
    gap = (logits.log_softmax(-1) - reference["logits"].log_softmax(-1)).abs().max()
    assert gap < 2e-4


@pytest.mark.integration
def test_the_same_model_in_three_layouts_is_the_same_weights():
    paths = [SHARED / "data" / "nemo" / f"{name}.nemo" for name in FILES if "llama" in name]
    if not all(path.exists() for path in paths):
        pytest.skip(f"needs the Llama files in data/nemo of $ALIGNER_SHARED ({SHARED})")
    with open_nemo(paths[0]) as one, open_nemo(paths[1]) as two, open_nemo(paths[2]) as three:
        for name in one.weights:
            assert torch.equal(one.weights[name], two.weights[name]), name
            assert torch.equal(one.weights[name], three.weights[name]), name
