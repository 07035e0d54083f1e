"""What model files say of themselves: names that become paths, sizes, values of a wrong kind."""

import json
import pickle
import re
import shutil
import signal

import nemo_writers as writers
import pytest
import torch
import yaml
from hf_models import LLAMA_SIZES, save_random_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from aligner.checkpoint.hf.families import architecture_from_hf
from aligner.checkpoint.hf.model_folder import read_hf, save_hf
from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.checkpoint.nemo.torch_dist import read_metadata
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.errors import CheckpointError, TokenizerError


@pytest.fixture
def no_hang():
    """Half a minute at most: what hangs here hangs in C or in a loop without an end."""

    def stop(number, frame):
        raise AssertionError("did not end within 30 s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(30)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous)


@pytest.fixture
def unpacked(tiny_nemo, tmp_path):
    """``unpacked(change)``: the tiny model as a directory, its configuration changed in place."""

    def make(change=lambda config: None):
        folder = tmp_path / "unpacked"
        shutil.unpack_archive(tiny_nemo, folder, "tar")
        path = folder / "model_config.yaml"
        config = yaml.safe_load(path.read_text())
        change(config)
        path.write_text(yaml.safe_dump(config))
        (folder / "checksums.json").unlink(missing_ok=True)  # a stranger's file has none, or fits
        return folder

    return make


@pytest.mark.parametrize(
    "name",
    [
        *("../../planted", "/planted", "", "a\\b", "tokenizer.json/x"),
        *(".bashrc", "config.json", "../x.model"),
    ],
)
def test_a_tokenizer_file_of_another_name_is_refused(unpacked, tmp_path, name):

    def change(config):
        files = config["tokenizer"]["files"]
        files[name if name != "/planted" else str(tmp_path / "planted")] = files["tokenizer.json"]

    before = unpacked(change)
    output = tmp_path / "a" / "b"
    with (
        pytest.raises(CheckpointError, match=r"lists '.*as a tokenizer file"),
        open_nemo(before) as nemo,
    ):
        save_hf(output, nemo.weights, nemo.architecture, nemo.tokenizer_files)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["unpacked"]


def test_nothing_is_written_under_a_name_from_elsewhere(tiny_nemo, tmp_path):
    with open_nemo(tiny_nemo) as nemo:
        files = {**nemo.tokenizer_files, "../planted": b"x"}
        with pytest.raises(CheckpointError, match="is not the name"):
            save_hf(tmp_path / "hf", nemo.weights, nemo.architecture, files)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("files", "message"),
    [("tokenizer.json", r"tokenizer\.files .* is a str"), ({5: "nemo:x"}, "lists '5'")],
)
def test_tokenizer_files_of_a_wrong_kind(unpacked, files, message):
    folder = unpacked(lambda config: config["tokenizer"].update(files=files))
    with pytest.raises(CheckpointError, match=message), open_nemo(folder):
        pass


def test_an_artifact_in_a_folder_is_refused(unpacked, tmp_path):
    folder = unpacked(lambda config: config.update(mine="nemo:model_weights/common.pt"))
    (tmp_path / "out").mkdir()
    with (
        open_nemo(folder) as nemo,
        pytest.raises(CheckpointError, match=r"nemo:model_weights/common\.pt"),
    ):
        nemo.extract_artifacts(tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_layers": 10**9}, "num_layers=1000000000"),
        ({"num_layers": ".inf"}, "wrong type"),
        ({"num_moe_experts": 10**9}, "num_moe_experts=1000000000"),
        ({"num_moe_experts": "x"}, "num_moe_experts='x'"),
        ({"hidden_size": 0}, "hidden_size=0"),
        ({"num_attention_heads": 0}, "num_attention_heads"),
        ({"num_query_groups": 3}, "num_query_groups=3"),
        ({"vocab_size": "x"}, "vocab_size='x'"),
        ({"layernorm_epsilon": float("nan")}, "layernorm_epsilon=nan"),
        ({"rotary_percentage": 17.0}, r"rotary_percent=17\.0"),
        ({"rope_scaling": "x"}, "rope_scaling"),
        ({"rope_scaling": {"factor": "x"}}, "rope_scaling"),
        ({"window_size": [-5, 0]}, "window_size=-4"),
        ({"activation": ["swiglu"]}, "activation.*a list"),
        ({"activation": "reglu"}, "activation='reglu'"),
        ({"normalization": "groupnorm"}, "normalization='groupnorm'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type='alibi'"),
    ],
)
def test_a_nemo_configuration_that_no_model_has(unpacked, no_hang, changes, message):
    folder = unpacked(lambda config: config.update(changes))
    with pytest.raises(CheckpointError, match=message), open_nemo(folder) as nemo:
        dict(nemo.weights)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[1]", r"tokenizer_config\.json.*not a JSON object"),
        (b'{"eos_token": 5}', r"eos_token=5.*not a text"),
        (b'{"eos_token": {"text": "x"}}', r"eos_token=.*not a text"),
        (b'{"eos_token": "|", "chat_template": [{"a": 1}]}', "chat_template"),
        (b'{"eos_token": "|", "chat_template": 5}', "chat_template"),
        (b'{"eos_token": "|", "added_tokens_decoder": [1]}', "added_tokens_decoder"),
        (b'{"eos_token": "|", "added_tokens_decoder": {"a": {}}}', "added_tokens_decoder"),
        (b"[" * 100_000, r"tokenizer_config\.json is not JSON"),
    ],
)
def test_a_tokenizer_configuration_of_a_wrong_kind(tiny_nemo, content, message):
    with open_nemo(tiny_nemo) as nemo:
        files = {**nemo.tokenizer_files, "tokenizer_config.json": content}
    with pytest.raises(TokenizerError, match=message):
        tokenizer_from_files(files)


def test_keys_of_a_state_dict_that_are_no_text(tmp_path):
    members = writers.config_members(21, num_layers=1, hidden_size=8, num_attention_heads=2)
    members["model_config.yaml"] += b"encoder_seq_length: 8\n"
    members["model_weights.ckpt"] = writers.saved({3: torch.zeros(2), "a": {4: 1}})
    writers.write_archive(tmp_path / "keys.nemo", members)
    with (
        open_nemo(tmp_path / "keys.nemo") as nemo,
        pytest.raises(CheckpointError, match=r"model_weights\.ckpt.*key 3"),
    ):
        dict(nemo.weights)


@pytest.mark.parametrize("size", [[10**9, 64], []])
def test_a_stack_of_more_layers_than_the_model_has(unpacked, no_hang, size):
    folder = unpacked()
    path = folder / "model_weights" / ".metadata"
    metadata = read_metadata(path.read_bytes())
    key = "model.decoder.layers.self_attention.linear_qkv.layer_norm_weight"
    metadata.state_dict_metadata[key].size = torch.Size(size)
    path.write_bytes(pickle.dumps(metadata))
    message = r"unexpected decoder\.layers\.\d\.input_layernorm|expected a stack of layers"
    with open_nemo(folder) as nemo, pytest.raises(CheckpointError, match=message):
        dict(nemo.weights)


@pytest.fixture
def hugging_face(tiny_nemo, tmp_path):
    folder = tmp_path / "hf"
    with open_nemo(tiny_nemo) as nemo:
        save_hf(folder, nemo.weights, nemo.architecture, nemo.tokenizer_files)
    return folder


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": None}, "num_layers=None"),
        ({"num_attention_heads": 0}, "config.json"),
        ({"hidden_size": "64"}, "config.json"),
        ({"rms_norm_eps": "x"}, "layernorm_epsilon='x'"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "x"}}, "config.json"),
        ({"rope_scaling": [1]}, "config.json"),
        ({"tie_word_embeddings": None}, "tie_embeddings=None"),
    ],
)
def test_a_hugging_face_configuration_that_no_model_has(hugging_face, no_hang, changes, message):
    config = json.loads((hugging_face / "config.json").read_text())
    config.pop("rope_parameters", None)
    (hugging_face / "config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        dict(read_hf(hugging_face).weights)


@pytest.mark.parametrize(
    ("index", "message"),
    [
        ({"a": 1}, "weight_map"),
        ({"weight_map": {"model.embed_tokens.weight": 5}}, "names the file 5"),
        ({"weight_map": {"model.embed_tokens.weight": "../../etc/passwd"}}, "names the file"),
        ({"weight_map": {"model.embed_tokens.weight": "/etc/passwd"}}, "names the file"),
    ],
)
def test_an_index_of_a_wrong_kind(hugging_face, index, message):
    (hugging_face / "model.safetensors").unlink()  # which would precede the index
    (hugging_face / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        dict(read_hf(hugging_face).weights)


TIED = {"tie_word_embeddings": True}


@pytest.mark.integration
@pytest.mark.parametrize("same", [True, False])
def test_an_output_matrix_beside_tied_embeddings_is_the_embedding_or_refused(tmp_path, same):
    save_random_model("llama", TIED, tmp_path)
    file = tmp_path / "model.safetensors"
    state = load_file(file)
    output = state["model.embed_tokens.weight"].clone()
    save_file({**state, "lm_head.weight": output if same else output + 1}, file, {"format": "pt"})
    if same:
        assert "output_layer.weight" not in read_hf(tmp_path).weights
    else:
        with pytest.raises(CheckpointError, match=r"lm_head\.weight differs.*tie_word_embeddings"):
            read_hf(tmp_path)


@pytest.mark.integration
def test_spellings_that_transformers_takes_for_the_same():
    llama = {**LLAMA_SIZES, "model_type": "llama"}
    assert architecture_from_hf({**llama, "hidden_act": "swish"}) == architecture_from_hf(llama)
    with pytest.raises(CheckpointError, match="hidden_act='gelu'"):
        architecture_from_hf({**llama, "hidden_act": "gelu"})
    moe = {**LLAMA_SIZES, "model_type": "qwen3_moe", "mlp_only_layers": None}
    assert architecture_from_hf(moe).num_moe_experts == 128


@pytest.mark.integration
def test_a_config_file_in_place_of_its_directory_and_with_a_byte_order_mark(tmp_path):
    save_random_model("llama", TIED, tmp_path)
    path = tmp_path / "config.json"
    message = re.escape(f"Give the model's directory, {str(tmp_path)!r}")
    with pytest.raises(CheckpointError, match=message), open_model(path):
        pass
    plain = read_hf(tmp_path).architecture
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(json.loads(path.read_bytes())).encode())
    assert read_hf(tmp_path).architecture == plain
    assert torch.is_tensor(read_hf(tmp_path).weights["embedding.word_embeddings.weight"])


def sharded(folder, **more):
    """The directory of an index that lists all tensors but ``more``; returns the tensors."""
    save_random_model("llama", TIED, folder)
    state = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    save_file({**state, **more}, folder / "shard.safetensors", {"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(state, "shard.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return state


@pytest.mark.integration
def test_a_tensor_that_the_index_does_not_list(tmp_path):
    assert len(sharded(tmp_path / "listed")) == len(read_hf(tmp_path / "listed").weights._state)
    sharded(tmp_path / "more", extra=torch.ones(2))
    with pytest.raises(CheckpointError, match=r"shard\.safetensors' contains extra, but"):
        read_hf(tmp_path / "more")


@pytest.mark.integration
def test_one_file_precedes_an_index_as_in_transformers(tmp_path):
    state = sharded(tmp_path)
    other = {name: tensor + 1 for name, tensor in state.items()}
    save_file(other, tmp_path / "model.safetensors", {"format": "pt"})
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path).model.embed_tokens.weight
    assert torch.equal(read_hf(tmp_path).weights["embedding.word_embeddings.weight"], theirs)


@pytest.mark.integration
def test_integers_are_refused(tmp_path):
    save_random_model("llama", TIED, tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.down_proj.weight"
    whole = torch.ones(32, 48, dtype=torch.int8)
    save_file({**load_file(file), name: whole}, file, {"format": "pt"})
    weights = read_hf(tmp_path).weights
    with pytest.raises(CheckpointError, match=rf"{name} of .* has dtype torch\.int8"):
        dict(weights)
