"""Every Hugging Face family: in, the same numbers as transformers; out, the same file."""

import copy
import dataclasses
import json
import runpy
import sys

import pytest
import torch
from documented import ROOT
from hf_models import CASES, LLAMA_SIZES, save_random_model
from safetensors.torch import load_file, save_file
from test_nemo_kinds import assert_same, gpt_and_logits
from variants import extended_except

from aligner.checkpoint.canonical import merge
from aligner.checkpoint.convert import convert
from aligner.checkpoint.gpt_weights import model_parameters
from aligner.checkpoint.hf import model_folder as hf
from aligner.checkpoint.hf.families import architecture_from_hf, config_to_hf
from aligner.checkpoint.hf.model_folder import read_hf, save_hf
from aligner.checkpoint.hf.tensors import HuggingFaceView
from aligner.checkpoint.nemo.model_file import open_nemo, save_nemo
from aligner.config import LengthParams, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import CheckpointError, CheckpointNotFoundError, ConfigError, StorageError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.forward.schedule import _forward
from aligner.models.gpt.megatron.build import scaled_inverse_frequencies
from aligner.models.gpt.role.settings import RoleSettings

# Cases that differ from the others in biases or in one setting.
FURTHER = {
    *("nemotron_biases", "starcoder2_plain", "stablelm_biases", "arcee_biases"),
    *("smollm3_biases", "ernie4_5_biases", "olmo3", "gemma3_scaled", "glm4_moe_plain"),
    *("gpt_oss_plain_rope", "deepseek_v3_plain"),
}


@pytest.fixture(scope="module", params=extended_except(CASES.keys() - FURTHER, CASES))
def model_folder(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param) / "model"
    return save_random_model(*CASES[request.param], folder), folder


@pytest.mark.integration
def test_logits_equal_transformers(model_folder):
    model, folder = model_folder
    tokens = torch.randint(259, (2, 24), generator=torch.Generator().manual_seed(1))
    found = read_hf(folder)
    with torch.no_grad():
        expected = model(tokens).logits
    _, logits = gpt_and_logits(found.weights, found.architecture, tokens)
    assert (logits - expected).abs().max() < 1e-4


@pytest.fixture(scope="module")
def role(model_folder):
    """The model as a policy that packs sequences and shares their prefixes."""
    settings = RoleSettings(sequence_packing=True, dropout=0.0)
    return load_from_nemo(MegatronGPTActorModel, settings, restore_path=model_folder[1])


def reference_logprobs(model, ids):
    """Log-probs of transformers, one padded row per sequence."""
    logits = model(ids).logits.log_softmax(-1)
    return torch.nn.functional.pad(logits[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2), (1, 0))


@pytest.mark.integration
def test_packed_and_shared_prefixes_equal_transformers(model_folder, role, tmp_path):
    """Log-probs, and the gradients of a sum of them."""
    model, generator = copy.deepcopy(model_folder[0]), torch.Generator().manual_seed(2)
    ids = torch.randint(259, (6, 46), generator=generator)
    ids[1:3, :40] = ids[0, :40]
    lengths = torch.tensor([46, 44, 42, 46, 9, 30])
    inside = torch.arange(46) < lengths[:, None]
    batch = {"input_ids": ids, "input_lengths": lengths, "token_mask": inside.float()}
    [microbatch] = role.split(batch, 6)
    assert microbatch.layout.input_ids.numel() == lengths.sum() - 2 * 40
    hidden = _forward(microbatch, role.gpt)
    actual = role.token_outputs(role.gpt, hidden, microbatch, False)[0]
    expected = reference_logprobs(model, ids)
    assert (actual - expected)[inside].abs().max() < 1e-4

    factors = torch.randn(6, 46, generator=generator) * inside
    role.gpt.zero_grad()
    for logprobs in (actual, expected):
        (logprobs * factors).sum().backward()
    for parameter in model.parameters():
        parameter.data = parameter.grad
    model.save_pretrained(tmp_path)
    merged = {
        name: merge(name, [parameter.grad], role.architecture)
        for name, parameter in model_parameters(role.gpt).items()
        if parameter.grad is not None
    }
    table = config_to_hf(role.architecture)[0].table
    gradients = HuggingFaceView(merged, table, role.architecture)
    expected = load_file(tmp_path / "model.safetensors")
    assert all(name.endswith("e_score_correction_bias") for name in expected.keys() - {*gradients})
    for name in gradients:
        gradient = expected[name]
        largest = gradient.abs().max().clamp(min=1e-3)
        assert (gradients[name] - gradient).abs().max() < 1e-3 * largest, name


@pytest.mark.integration
def test_generated_tokens_are_those_of_transformers(model_folder, role):
    model, _ = model_folder
    prompts = torch.randint(259, (5, 9), generator=torch.Generator().manual_seed(4))
    lengths = torch.tensor([9, 4, 1, 7, 9])
    length, sampling = LengthParams(max_length=14), SamplingParams(use_greedy=True)
    options = {"eos_ids": (), "pad_id": 0, "max_batch_size": 3}
    generator = Generator(role.gpt, role.architecture, length=length, sampling=sampling, **options)
    output = generator.sample(prompts, lengths, torch.arange(5), seed=1)
    with torch.no_grad():
        expected = reference_logprobs(model, output.tokens)
    sampled = torch.arange(output.tokens.shape[1])
    sampled = (sampled >= lengths[:, None]) & (sampled < output.lengths[:, None])
    assert sampled.sum() == 5 * 14
    assert (output.logprobs - expected)[sampled].abs().max() < 1e-4
    with torch.no_grad():
        best = model(output.tokens).logits.log_softmax(-1).amax(-1)[:, :-1]
    assert (output.logprobs[:, 1:] - best)[sampled[:, 1:]].abs().max() < 1e-4


@pytest.mark.integration
def test_round_trip_through_nemo_is_exact(model_folder, tmp_path):
    from transformers import AutoConfig, AutoModelForCausalLM

    model, folder = model_folder
    source, back = tmp_path / "source", tmp_path / "back"
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(source)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((folder / name).read_bytes())

    read = read_hf(source)
    save_nemo(tmp_path / "m.nemo", read.weights, read.architecture, read.tokenizer_files)
    with open_nemo(tmp_path / "m.nemo") as nemo:
        padded = dataclasses.replace(read.architecture, make_vocab_size_divisible_by=128)
        assert nemo.architecture == padded
        save_hf(back, nemo.weights, nemo.architecture, nemo.tokenizer_files)

    before, after = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert torch.bfloat16 in {tensor.dtype for tensor in before.values()}
    assert_same(after, before)
    tokenizers = [(folder / "tokenizer.json").read_bytes() for folder in (source, back)]
    assert tokenizers[0] == tokenizers[1]
    original, returned = (AutoConfig.from_pretrained(folder) for folder in (source, back))
    for key in read_keys(original):
        assert getattr(returned, key) == getattr(original, key), key
    again = AutoModelForCausalLM.from_pretrained(back)
    assert again.dtype == torch.bfloat16
    state = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(state[name], tensor.to(state[name].dtype)), name


def read_keys(config):
    """What decides a model's numbers in a transformers configuration."""
    names = [
        *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads"),
        *("num_key_value_heads", "head_dim", "vocab_size", "max_position_embeddings"),
        *("rms_norm_eps", "layer_norm_epsilon", "rope_parameters", "sliding_window", "hidden_act"),
        *("norm_eps", "norm_epsilon", "layer_norm_eps", "use_bias", "use_qkv_bias"),
        *("no_rope_layers", "attention_out_bias", "original_max_position_embeddings"),
        *("activation_function", "tie_word_embeddings", "attention_bias", "mlp_bias"),
        *("initializer_range", "n_layer", "n_head", "n_positions"),
        *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
        *("layer_types", "swiglu_limit"),
        *("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob"),
        *("n_shared_experts", "first_k_dense_replace", "n_group", "topk_group"),
        *("routed_scaling_factor", "use_qk_norm", "q_lora_rank", "kv_lora_rank", "v_head_dim"),
        *("qk_rope_head_dim", "qk_nope_head_dim"),
    ]
    return [name for name in names if hasattr(config, name)]


YARN = {"rope_type": "yarn", "rope_theta": 5e3, "original_max_position_embeddings": 16}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [4.0] * 4}
SHORT = {"short_factor": [1.0], "long_factor": [1.0]}
WINDOWS = {
    "layer_types": ["full_attention", "sliding_attention"],
    "rope_parameters": {"sliding_attention": YARN},
}
LONG = {"rope_type": "longrope", "rope_theta": 1e4, **FACTORS}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, r"'mamba'.*llama, .*qwen3, mixtral, qwen3_moe, gpt2"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
        ({"attention_bias": True}, "attention_bias=True and mlp_bias="),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope type 'dynamic'"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "gpt2", "scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse"),
        ({"model_type": "qwen3_moe", "decoder_sparse_step": 2}, "decoder_sparse_step=2"),
        ({"hidden_size": None}, "incomplete"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({"model_type": "phi3", "rope_scaling": SHORT}, r"short_factor=\(1\.0,\), .* 4 numbers"),
        ({"model_type": "stablelm", "use_parallel_residual": True}, "use_parallel_residual=True"),
        ({"model_type": "stablelm", "qk_layernorm": True}, "qk_layernorm=True"),
        ({"model_type": "seed_oss", "attention_out_bias": True}, "attention_out_bias=True"),
        ({"model_type": "smollm3", "use_sliding_window": True}, "use_sliding_window=True"),
        ({"model_type": "helium", "mlp_bias": True}, "mlp_bias=True"),
        ({"model_type": "nemotron", "mlp_bias": True}, "mlp_bias=True in config.json differ"),
        ({"model_type": "arcee", "hidden_act": "silu"}, "hidden_act='silu'"),
        ({"model_type": "nemotron", "hidden_act": "swish"}, "hidden_act='swish'"),
        ({"model_type": "starcoder2", "hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"model_type": "olmo2", "attention_bias": True}, "attention_bias=True"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "bidirectional_attention"),
        ({"model_type": "gemma3_text", "attn_logit_softcapping": 5.0}, r"softcapping=5\.0"),
        ({"model_type": "olmo3", **WINDOWS}, "rope type 'yarn' of sliding_attention layers"),
        ({"model_type": "qwen2_moe", "qkv_bias": False}, "qkv_bias=False"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, r"swiglu_alpha=1\.0"),
        (
            {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}},
            r"quantised \(mxfp4\)",
        ),
        ({"model_type": "glm4_moe", "n_group": 3}, "moe_router_groups=3"),
    ],
)
def test_unsupported_configurations_are_named(changes, message):
    with pytest.raises(CheckpointError, match=message):
        architecture_from_hf({"model_type": "llama", **LLAMA_SIZES, **changes})


@pytest.mark.parametrize(
    "scaling",
    [
        {**YARN, "factor": 4.0},
        {**YARN, "factor": 4.0, "mscale": 0.5, "mscale_all_dim": 2.0},
        {**YARN, "factor": 4.0, "beta_fast": 0.1, "beta_slow": 0.1},
        {**YARN, "factor": 4.0, "truncate": False},
        LONG,
        {**LONG, "factor": 9.0},
    ],
    ids=["yarn", "two scales", "no ramp", "not rounded", "longrope", "longrope with a factor"],
)
def test_rotation_is_that_of_transformers_there_and_back(scaling):
    from transformers import AutoConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    is_yarn = scaling["rope_type"] == "yarn"
    kind = {"model_type": "llama"}
    if not is_yarn:
        kind = {"model_type": "phi3", "original_max_position_embeddings": 16}
    given = {**kind, **LLAMA_SIZES, "rope_scaling": scaling}
    found = architecture_from_hf(given)
    inverse = 1.0 / found.rotary_base ** (torch.arange(4) / 4)
    scaled = scaled_inverse_frequencies(inverse, found.rope_scaling, found.rotary_base)
    for values in (given, config_to_hf(found)[1]):
        config = AutoConfig.for_model(**values)
        rope_type = config.rope_parameters["rope_type"]
        expected, factor = ROPE_INIT_FUNCTIONS[rope_type](config, "cpu")
        torch.testing.assert_close(scaled, expected)
        assert found.rope_concentration == pytest.approx(factor)
    assert found.max_position_embeddings == (64 if is_yarn else 16)


def test_what_no_family_can_express_is_refused():
    odd = dataclasses.replace(TINY_ARCHITECTURE, rotary_percent=0.5)
    with pytest.raises(CheckpointError, match=r"llama cannot express rotary_percent=0\.5"):
        config_to_hf(odd)


@pytest.mark.parametrize(
    ("changes", "family"),
    [
        ({}, "llama"),
        ({"window_size": 8}, "mistral"),
        ({"bias_qkv": True}, "qwen2"),
        ({"qk_layernorm": True}, "qwen3"),
        ({"num_moe_experts": 4}, "mixtral"),
        ({"normalization": "layernorm1p", "activation": "squared_relu"}, "nemotron"),
        ({"num_moe_experts": 4, "qk_layernorm": True}, "qwen3_moe"),
        ({"num_moe_experts": 4, "moe_router_sigmoid": True}, "glm4_moe"),
        (
            {"num_moe_experts": 4, "moe_router_sigmoid": True, "kv_lora_rank": 8}
            | {"value_channels": 8, "num_query_groups": TINY_ARCHITECTURE.num_attention_heads},
            "deepseek_v3",
        ),
    ],
)
def test_a_family_is_found_for_foreign_nemo_files(changes, family):
    architecture = dataclasses.replace(TINY_ARCHITECTURE, family=None, **changes)
    assert config_to_hf(architecture)[0].model_type == family


def test_damaged_directories(tmp_path):
    config = {"model_type": "llama", **LLAMA_SIZES}
    with pytest.raises(CheckpointNotFoundError, match="does not exist"):
        read_hf(tmp_path / "none")
    (tmp_path / "m").mkdir()
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        read_hf(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        read_hf(tmp_path / "m")
    (tmp_path / "m" / "model.safetensors").write_bytes(b"\x10" + bytes(30))
    with pytest.raises(CheckpointError, match="damaged"):
        read_hf(tmp_path / "m")
    save_file({"model.odd": torch.zeros(1)}, tmp_path / "m" / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"missing \['model\.embed_tokens.*'model\.odd'"):
        read_hf(tmp_path / "m")


def test_layers_that_predict_further_tokens_are_not_read(tmp_path):
    save_random_model(*CASES["glm4_moe"], tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    further = ("eh_proj.weight", "enorm.weight", "mlp.gate.e_score_correction_bias")
    more = {f"model.layers.4.{name}": torch.zeros(1) for name in further}
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    assert not any("layers.4." in name for name in read_hf(tmp_path).weights)
    more["model.layers.5.mlp.gate.weight"] = torch.zeros(1)
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=r"unexpected \['model\.layers\.5\.mlp\.gate\.weight'\]"
    ):
        read_hf(tmp_path)


def test_large_models_are_written_in_shards(tmp_path, monkeypatch):
    weights = random_weights(TINY_ARCHITECTURE)
    monkeypatch.setattr(hf, "_MAX_SHARD_BYTES", 200_000)
    save_hf(tmp_path / "m", weights, TINY_ARCHITECTURE, byte_level_tokenizer().files())
    assert len(list((tmp_path / "m").glob("model-*.safetensors"))) > 2
    found = read_hf(tmp_path / "m").weights
    assert all(torch.equal(found[name], tensor) for name, tensor in weights.items())


def test_nothing_is_overwritten_and_nothing_half_written(tmp_path):
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "mine").write_text("precious")
    weights = random_weights(TINY_ARCHITECTURE)
    with pytest.raises(StorageError, match="not empty"):
        save_hf(tmp_path / "m", weights, TINY_ARCHITECTURE, {})
    del weights["decoder.final_layernorm.weight"]
    with pytest.raises(CheckpointError, match="final_layernorm"):
        save_hf(tmp_path / "n", weights, TINY_ARCHITECTURE, {})
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def assert_same_model(one, other):
    """Two `.nemo` files have the same tokenizer files and weights."""
    with open_nemo(one) as first, open_nemo(other) as second:
        assert first.tokenizer_files == second.tokenizer_files
        assert all(torch.equal(first.weights[name], second.weights[name]) for name in first.weights)


@pytest.mark.extended
@pytest.mark.integration
def test_conversion_scripts(tmp_path, tiny_nemo, monkeypatch, capsys):
    def run(script, source, output):
        monkeypatch.setattr(sys, "argv", [script, "--input", str(source), "--output", str(output)])
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    folder = tmp_path / "hf"
    told = run("convert_nemo_to_hf.py", tiny_nemo, folder)
    # A person reads it: no dataclass of 25 fields.
    assert told.startswith(f"wrote {folder}: llama, ")
    assert len(told) < len(str(folder)) + 120
    run("convert_hf_to_nemo.py", folder, tmp_path / "again.nemo")
    assert_same_model(tiny_nemo, tmp_path / "again.nemo")
    with pytest.raises(SystemExit, match=r"^error: checkpoint"):
        run("convert_nemo_to_hf.py", tmp_path / "none.nemo", folder)


def test_convert_tells_the_direction_by_the_suffix(tmp_path, tiny_nemo):
    assert "wrote" in convert(tiny_nemo, tmp_path / "hf")
    convert(tmp_path / "hf", tmp_path / "again.nemo")
    assert_same_model(tiny_nemo, tmp_path / "again.nemo")
    with pytest.raises(ConfigError, match=r"both are a \.nemo"):
        convert(tiny_nemo, tmp_path / "b.nemo")
    with pytest.raises(ConfigError, match=r"neither is a \.nemo"):
        convert(tmp_path / "hf", tmp_path / "other")


@pytest.mark.integration
def test_a_directory_is_loaded_as_its_nemo_is(tmp_path, tiny_nemo):
    convert(tiny_nemo, tmp_path / "hf")
    tokens = torch.arange(3, 15).view(1, -1)
    roles = [
        load_from_nemo(MegatronGPTActorModel, restore_path=path)
        for path in (tiny_nemo, tmp_path / "hf")
    ]
    one, two = (role.get_inference_log_probs(tokens) for role in roles)
    assert torch.equal(one, two)
    assert roles[1].tokenizer.encode("12+3=") == roles[0].tokenizer.encode("12+3=")
    roles[1].save_to(str(tmp_path / "again.nemo"))
    assert_same_model(tiny_nemo, tmp_path / "again.nemo")
    with pytest.raises(CheckpointError, match=r"aligner convert --input .*hf --output FILE\.nemo"):
        open_nemo(tmp_path / "hf").__enter__()


@pytest.mark.smollm2
def test_smollm2_logits_equal_transformers(tmp_path):
    from transformers import AutoModelForCausalLM

    path = ROOT / "models" / "smollm2-135m-instruct.nemo"
    if not path.exists():
        pytest.skip("needs models/smollm2-135m-instruct.nemo; make it with `make` and that name")
    with open_nemo(path) as nemo:
        save_hf(tmp_path / "hf", nemo.weights, nemo.architecture, nemo.tokenizer_files)
        tokenizer = nemo.tokenizer
        assert (tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id) == (1, 2, 2)
        # Digits stand alone and take no space with them.
        assert tokenizer.encode("a  17") == tokenizer.encode("a  ") + tokenizer.encode("17")
        tokens = torch.tensor([tokenizer.encode("2+3=5\n7+4=11\n6+3=9\n" * 4)])
        _, found = gpt_and_logits(nemo.weights, nemo.architecture, tokens)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    with torch.no_grad():
        assert (model(tokens).logits - found).abs().max() < 1e-4
