"""Models of transformers without a table of names: every type trains and travels, or is refused.

The reference is transformers' model on each sequence alone. Rows of the batch share prefixes, so
that packed types also run on a prefix tree.
"""

import json
import sys
from functools import partial

import pytest
import torch
from batches import ppo_batch
from role_models import check_recomputed, check_reference, check_resumed, updated, write_tokenizer
from safetensors.torch import load_file, save_file
from settings import parsed
from tiny_transformers import model_types, tiny_config
from transformers import AutoModelForCausalLM
from variants import extended_except

from aligner.algorithms.run.startup import describe_model_of
from aligner.architecture import GPTArchitecture, TransformersArchitecture
from aligner.checkpoint.canonical import expected_shapes
from aligner.checkpoint.hf.any_model import FileWeights, read_any, require_megatron, save_any
from aligner.checkpoint.model_source import open_model
from aligner.config import LoraConfig, OptimConfig, ParallelConfig
from aligner.errors import CheckpointError, ConfigError, LayoutError
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.build import build_whole
from aligner.models.gpt.dtensor.critic import DTensorCriticModel, DTensorRewardModel
from aligner.models.gpt.dtensor.plan import check_backend
from aligner.models.gpt.role.reward import saved_attributes
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

LENGTHS, WIDTH = (11, 7, 13, 9), 13
# Windows, soft caps, sinks, latent attention, experts, state space, biased head, no plan.
EVERY_TIME = (
    *("gemma3_text", "gemma2", "gpt_oss", "deepseek_v3", "mixtral", "mamba2", "phi", "bloom"),
    "cohere2",
)
# Types that pack by transformers' masks, and types of which packed sequences affect each other.
PACKED_BY_TRANSFORMERS = ("codegen", "doge", "gpt_neo", "gpt_neox_japanese", "gptj")
_ROWS = """
    axk2 bailing_hybrid bamba bloom deepseek_v32 deepseek_v4 falcon falcon_h1 falcon_mamba
    glm_moe_dsa granitemoehybrid hy_v4 inkling2_text inkling_text jamba kimi_linear lfm2 lfm2_moe
    lfm3 mamba mamba2 minimax mpt nemotron_h olmo_hybrid openai-gpt qwen3_5_moe_text qwen3_5_text
    qwen3_next qwen4_exp_text recurrent_gemma rwkv xglm xlstm zamba zamba2 zaya
"""
ROWS = _ROWS.split()
# transformers sets the embedding of the padding token to 0 when it loads the type.
WITHOUT_PADDING = ("youtu",)
NO_POLICY = ("modernbert-decoder",)


def rest(types, without=NO_POLICY):
    every_type = [kind for kind in model_types() if kind not in without]
    return extended_except(types, sorted({*types, *every_type}))


def make_batch():
    prompts = [1] * len(LENGTHS)
    batch = ppo_batch(LENGTHS, prompts, seed=0)
    ids = batch["input_ids"].remainder(117) + 3
    ids[1, :5], ids[2, :3] = ids[0, :5], ids[0, :3]
    inside = torch.arange(WIDTH) < batch["input_lengths"][:, None]
    return {**batch, "input_ids": torch.where(inside, ids, 0)}


def load(folder, kind=DTensorActorModel, **changes):
    defaults = {"optim": OptimConfig(lr=1e-3), "micro_batch_size": 4, "sequence_packing": "auto"}
    settings = RoleSettings(**{**defaults, **changes})
    return kind(read_any(folder), settings, initialize_parallel(), None)


def update(role, loss):
    (report,) = updated(role, loss, make_batch())
    role.prepare_for_inference()
    return report


def save(role, folder):
    save_any(folder, role.whole_weights(), role.architecture, {}, role.nemo_keys())
    return folder


@torch.no_grad()
def expected_logprobs(model):
    batch = make_batch()
    expected = torch.zeros(len(LENGTHS), WIDTH)
    for row, length in enumerate(LENGTHS):
        ids = batch["input_ids"][row : row + 1, :length]
        logprobs = model.eval()(input_ids=ids, use_cache=False).logits[0].float().log_softmax(-1)
        expected[row, 1:length] = logprobs[:-1].gather(1, ids[0, 1:, None])[:, 0]
    return expected


def logprobs_of_folder(folder):
    return expected_logprobs(AutoModelForCausalLM.from_pretrained(folder))


@pytest.mark.parametrize("model_type", rest(EVERY_TIME))
def test_a_type_scores_trains_and_travels(model_type, folder_of, tmp_path):
    folder = folder_of(model_type)
    expected = logprobs_of_folder(folder)
    role = load(folder)
    by_transformers = "transformers" if model_type in PACKED_BY_TRANSFORMERS else "aligner"
    assert role.form.way == ("rows" if model_type in ROWS else by_transformers), role.form.faults
    torch.testing.assert_close(role.get_logprobs(make_batch()), expected, atol=1e-4, rtol=0)
    padded = load(folder, sequence_packing=False, shared_prefixes=False)
    torch.testing.assert_close(padded.get_logprobs(make_batch()), expected, atol=1e-4, rtol=0)
    # The same update in both layouts, and files with the trained weights.
    reports = [update(each, PPOPolicyLoss(entropy_bonus=0.01)) for each in (role, padded)]
    assert reports[0]["grad_norm"] == pytest.approx(reports[1]["grad_norm"], rel=1e-3)
    trained = role.get_logprobs(make_batch())
    assert (trained - expected).abs().max() > 1e-3
    again = load(save(role, tmp_path / "again"))
    limit = 1e-4 if model_type in WITHOUT_PADDING else 1e-5
    torch.testing.assert_close(again.get_logprobs(make_batch()), trained, atol=limit, rtol=0)
    theirs = logprobs_of_folder(tmp_path / "again")
    torch.testing.assert_close(theirs, trained, atol=1e-4, rtol=0)


@pytest.mark.parametrize("model_type", ["olmo2", "mamba2", "modernbert-decoder"])
def test_a_critic_of_any_type_travels_with_its_head(model_type, folder_of, tmp_path):
    folder = folder_of(model_type)
    critic = load(folder, DTensorCriticModel)
    assert critic.get_values(make_batch()).abs().max() == 0
    assert update(critic, PPOValueLoss(value_clip=None))["grad_norm"] > 0
    values = critic.get_values(make_batch())
    assert values.abs().max() > 0
    saved = save(critic, tmp_path / "critic")
    again = load(saved, DTensorCriticModel)
    torch.testing.assert_close(again.get_values(make_batch()), values, atol=1e-6, rtol=0)
    with pytest.raises(CheckpointError, match=r"does not contain lm_head\."):
        load(saved)  # a critic is no policy


@pytest.mark.parametrize("attributes", [(), ("helpful", "brief")])
def test_a_reward_model_travels_with_its_keys(attributes, folder_of, tmp_path):
    def open_role(folder, **changes):
        settings = RoleSettings(sequence_packing="auto", **changes)
        return DTensorRewardModel.from_checkpoint(
            read_any(folder), settings=settings, tokenizer=None
        )

    folder = folder_of("gemma3_text")
    assert saved_attributes(read_any(folder)) is None
    role = open_role(folder, attributes=attributes)
    for shard in role.shards:
        if shard.name == "score.weight":
            shard.local.normal_(generator=torch.Generator().manual_seed(3))
    role.standardize(0.5, 2.0)
    rewards = role.infer(make_batch())
    assert rewards.shape == (4, 2) if attributes else (4,)
    body = role.infer(make_batch(), standardize=False)
    torch.testing.assert_close(rewards, (body - 0.5) / 2.0)
    saved = save(role, tmp_path / "reward")
    source = read_any(saved)
    assert saved_attributes(source) == attributes
    assert "model" not in vars(source.weights)  # the keys were read without the weights
    assert torch.equal(open_role(saved).infer(make_batch()), rewards)


@pytest.mark.parametrize("model_type", ["gemma2", "phi"])
def test_a_teacher_gives_the_likeliest_tokens(model_type, folder_of):
    """With a soft cap, and with a biased output layer."""
    folder, batch = folder_of(model_type), make_batch()
    logits, ids = load(folder).get_topk_logits(batch, 5, 100)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    with torch.no_grad():
        for row, length in enumerate(LENGTHS):
            whole = model(batch["input_ids"][row : row + 1, :length], use_cache=False).logits[0]
            best = whole[:-1, :100].topk(5)
            torch.testing.assert_close(logits[row, 1:length], best.values, atol=1e-4, rtol=0)
            assert ids[row, 1:length].equal(best.indices)


@pytest.mark.parametrize("mode", ["keep", "swap"])
def test_the_reference_keeps_the_initial_weights(mode, folder_of):
    check_reference(load(folder_of("deepseek_v3")), make_batch(), mode)  # a buffer of the routers


@pytest.mark.parametrize(
    ("model_type", "recompute"), [("gpt_oss", "full"), ("gpt_oss", "selective"), ("mamba2", "full")]
)
def test_recomputed_activations_give_the_same_update(model_type, recompute, folder_of):
    sgd = OptimConfig(name="sgd", lr=1e-2)
    learner = partial(load, folder_of(model_type), optim=sgd)
    check_recomputed(learner, PPOPolicyLoss(), make_batch(), recompute)


@pytest.mark.parametrize(
    "model_type",
    extended_except(["deepseek_v32"], ["deepseek_v32", "gemma3_text", "gpt_oss", "qwen3_next"]),
)
def test_a_run_state_continues_bit_for_bit(model_type, folder_of):
    """Also with weights that get no gradient, such as the indexers of deepseek_v32."""
    folder = folder_of(model_type)
    check_resumed(load(folder), load(folder), make_batch())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "olmo22"}, r"olmo22.*transformers 5.*olmo2"),
        ({"model_type": "mine", "auto_map": {"AutoModel": "m.M"}}, r"mine.*auto_map.*trust_remote"),
        ({"model_type": "t5"}, r"t5.*decoder-only"),
        ({"is_encoder_decoder": True}, r"olmo2.*decoder-only"),
        (
            {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}},
            r"gemma3.*text_config\.model_type=gemma3_text",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, r"quantised \(fp8\)"),
        ({"hidden_size": "wide"}, r"config\.json.*damaged"),
    ],
)
def test_a_directory_that_cannot_be_trained_is_refused_before_weights(changes, message, tmp_path):
    tiny_config("olmo2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(CheckpointError, match=message):
        read_any(tmp_path)


def test_a_tokenizer_larger_than_the_model_is_refused(tmp_path):
    tiny_config("olmo2").save_pretrained(tmp_path)
    write_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokens, but vocab_size=128"):
        read_any(tmp_path)


def test_missing_and_surplus_tensors_are_named(folder_of):
    folder = folder_of("olmo2")
    file = folder / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.9.x"] = tensors.pop("model.norm.weight")
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=r"missing model\.norm\.weight.*model\.layers\.9\.x"):
        load(folder)


@pytest.mark.parametrize(
    ("model_type", "changes", "error", "message"),
    [
        ("modernbert-decoder", {}, CheckpointError, r"modernbert-decoder.*A policy needs.*critic"),
        ("bert", {}, CheckpointError, "later tokens"),
        # With the difference that was measured.
        (
            "mamba2",
            {"sequence_packing": True},
            ConfigError,
            r"sequence_packing\.enabled=true.*one sequence in each row.*differ by \d",
        ),
        ("mamba2", {"dropout": 0.1}, ConfigError, r"model\.dropout=0\.1.*mamba2"),
        ("mamba2", {"recompute": "selective"}, ConfigError, r"granularity=selective.*mamba2"),
        ("ctrl", {"recompute": "full"}, ConfigError, r"granularity=full.*ctrl"),
    ],
)
def test_what_a_type_cannot_do_is_refused(model_type, changes, error, message, folder_of):
    with pytest.raises(error, match=message):
        load(folder_of(model_type), **changes)


@pytest.mark.parametrize(
    ("model_type", "lora", "reason"),
    [
        ("gpt_oss", None, r"no tensor-parallel plan for gpt_oss"),
        ("mixtral", None, r"mixtral models uses moe_tp_experts, packed_colwise"),
        ("apertus", None, r"apertus models leaves out layers\.\*\.mlp\.act_fn\.alpha_n, "),
        ("doge", None, r"doge models leaves out layers\.\*\.self_attn\.A, "),
        ("llama", LoraConfig(), r"adapters \(model\.peft\.peft_scheme=lora\) are not split"),
    ],
)
def test_tensor_parallelism_that_is_not_exact_is_refused_without_weights(
    model_type, lora, reason, tmp_path
):
    tiny_config(model_type).save_pretrained(tmp_path)
    architecture = read_any(tmp_path).architecture
    check_backend(architecture, ParallelConfig(), lora)
    with pytest.raises(LayoutError, match=f"tensor_model_parallel_size=2: .*{reason}.*Set it to 1"):
        check_backend(architecture, ParallelConfig(tensor=2), lora)


def test_what_needs_a_table_of_tensors_is_refused(folder_of, tmp_path):
    architecture = read_any(folder_of("olmo2")).architecture
    with pytest.raises(CheckpointError, match=r"olmo2.*not supported for adapters"):
        expected_shapes(architecture)
    with pytest.raises(CheckpointError, match=r"olmo2.*policy\.backend=dtensor"):
        require_megatron(architecture)


# Sampling engines --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "model_type", rest(("gemma2", "mixtral", "gpt_neox", "deepseek_v3"), ("hrm_text",))
)
def test_engines_get_the_tensors_of_files(model_type, folder_of):
    """One name, a separate name, and experts, which are one tensor in the module."""
    folder = folder_of(model_type)
    source = read_any(folder)
    saved = load_file(folder / "model.safetensors")
    sent = FileWeights(source.weights, source.architecture)
    torch.testing.assert_close(dict(sent), saved, rtol=0.0, atol=0.0)


def test_models_that_engines_cannot_load_are_refused_without_weights(tmp_path):
    vocabulary = write_tokenizer(tmp_path).vocab_size
    tiny_config("hrm_text", vocab_size=vocabulary).save_pretrained(tmp_path)
    values = f"model.restore_from_path={tmp_path} policy.backend=dtensor cluster.engine=ray"
    describe_model_of(parsed(values))
    engine = f"generation.backend=vllm generation.vllm.python={sys.executable}"
    message = r"backend: .* hrm_text model, because its files join .*backend=megatron"
    with pytest.raises(ConfigError, match=message):
        describe_model_of(parsed(f"{values} {engine}"))


def test_dropout_of_the_configuration_is_not_applied(folder_of):
    role = load(folder_of("codegen", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5))
    role.setup_training()
    role.prepare_for_training()
    role.loss_fn = PPOPolicyLoss()
    assert "attn_pdrop=0.5" in role.way_in_words()
    losses = [role.get_loss_and_metrics(make_batch(), forward_only=True)[0] for _ in range(2)]
    assert losses[0] == losses[1]


@pytest.mark.parametrize("is_added", [True, False])
def test_auxiliary_losses_of_routers_are_left_out_and_reported(is_added, folder_of):
    """Also in the pass of a whole model, in which transformers would add the loss."""
    aux = {"output_router_logits": is_added, "router_aux_loss_coef": 0.25}
    role = load(folder_of("mixtral", **aux))
    assert ("router_aux_loss_coef=0.25" in role.way_in_words()) is is_added
    ids = make_batch()["input_ids"][:1]
    output = build_whole(role.architecture, role.whole_weights(), torch.float32)(
        input_ids=ids, labels=ids
    )
    expected = torch.nn.functional.cross_entropy(output.logits[0, :-1], ids[0, 1:])
    assert output.aux_loss is None
    assert torch.equal(output.loss, expected)


def test_a_directory_without_a_row_is_opened_by_its_type(folder_of):
    with open_model(folder_of("mamba2")) as source:
        assert isinstance(source.architecture, TransformersArchitecture)
        assert source.architecture.num_layers == 4
    mixtral = folder_of("mixtral")
    for backend, kind in (("megatron", GPTArchitecture), ("dtensor", TransformersArchitecture)):
        with open_model(mixtral, backend) as source:
            assert type(source.architecture) is kind
