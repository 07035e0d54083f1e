"""Actor, critic and reference on the real megatron-core model."""

import math
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from batches import ppo_batch
from role_models import check_reference, updated

from aligner.checkpoint.model_source import open_model
from aligner.config import LengthParams, OptimConfig, ParallelConfig, SamplingParams, SchedConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    ConfigError,
    LayoutError,
    NonFiniteError,
    training_step,
)
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.logprobs.output_layer import ValueHead, bypassed_output_layer
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTModel,
    MegatronGPTRewardModel,
    load_from_nemo,
)
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.gpt.role.training_state import learning_rate

pytestmark = pytest.mark.integration

LENGTHS = (9, 5, 12, 7)
PROMPTS = (4, 3, 6, 2)


def settings(**changes):
    return RoleSettings(**{"optim": OptimConfig(lr=1e-3), "micro_batch_size": 2, **changes})


def load(path, cls=MegatronGPTActorModel, **changes):
    return load_from_nemo(cls, settings(**changes), restore_path=path)


@pytest.fixture(scope="module")
def actor(tiny_nemo):
    return load(tiny_nemo)


def make_batch(width=None):
    return ppo_batch(LENGTHS, PROMPTS, seed=7, width=width)


def reference_hidden(model, ids):
    """Hidden states after the final norm, one sequence at a time, through megatron-core itself."""
    with torch.no_grad(), bypassed_output_layer(model.gpt):
        return model.gpt(ids[None], torch.arange(len(ids))[None], None)[0].double()


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_logprobs_equal_a_float64_softmax(temperature, tiny_nemo):
    actor = load(tiny_nemo, sampling_params=SamplingParams(temperature=temperature))
    batch = make_batch()
    actual = actor.get_logprobs(batch)
    weight = actor.gpt.output_layer.weight.detach().double()[: actor.architecture.vocab_size]
    for row, (prompt, length) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        ids = batch["input_ids"][row, :length]
        logprobs = (reference_hidden(actor, ids) @ weight.T / temperature).log_softmax(1)
        expected = logprobs[:-1].gather(1, ids[1:, None])[prompt - 1 :, 0]
        assert torch.allclose(actual[row, prompt:length].double(), expected, atol=1e-5)
        assert actual[row, :prompt].abs().sum() == 0
        assert actual[row, length:].abs().sum() == 0


def test_infer_returns_the_published_keys_and_draws_other_tokens_at_every_call(actor):
    actor.configure_generation(LengthParams(max_length=5), SamplingParams(), 8)
    text, lengths = make_batch()["input_ids"][:, :6], torch.tensor(PROMPTS)
    result, other = (actor.infer({"text": text, "length": lengths}) for _ in range(2))
    assert set(result) == {"response_tokens", "response_lengths", "prompt_lengths", "is_end"}
    assert torch.equal(result["prompt_lengths"], lengths)
    new = result["response_lengths"] - lengths
    assert ((new >= 1) & (new <= 5)).all()
    tokens = result["response_tokens"]
    for row, prompt in enumerate(PROMPTS):
        assert torch.equal(tokens[row, :prompt], text[row, :prompt])
    assert tokens.tolist() != other["response_tokens"].tolist()
    seeded = [actor.infer({"text": text, "length": lengths}, seed=5) for _ in range(2)]
    assert torch.equal(*(each["response_tokens"] for each in seeded))


def weights_of(role):
    if isinstance(role, DTensorCriticModel):
        return {shard.name: shard.local for shard in role.shards}
    return {name: parameter.detach() for name, parameter in role.gpt.named_parameters()}


def make_critic(path, backend="megatron", **changes):
    """A fresh head is zero and lets no gradient into the body."""
    kind = {"megatron": MegatronGPTCriticModel, "dtensor": DTensorCriticModel}[backend]
    with open_model(path) as source:
        tokenizer = source.tokenizer
        critic = kind.from_checkpoint(source, settings=settings(**changes), tokenizer=tokenizer)
    weights = weights_of(critic)
    head = "score" if backend == "dtensor" else "rm_head"
    weights[f"{head}.weight"].normal_(generator=torch.Generator().manual_seed(3))
    weights[f"{head}.bias"].fill_(0.25)
    return critic


def trained(role, loss, batch=None, updates=1):
    return updated(role, loss, batch or make_batch(), updates)


def test_values_are_of_the_state_before_the_token(tiny_nemo):
    critic = make_critic(tiny_nemo)
    batch = make_batch()
    values = critic.get_values(batch)
    head = critic.gpt.rm_head
    for row, length in enumerate(LENGTHS):
        hidden = reference_hidden(critic, batch["input_ids"][row, :length])
        raw = hidden @ head.weight.detach().double()[0] + head.bias.item()
        expected = torch.cat([torch.zeros(1).double(), raw[:-1]])
        assert torch.allclose(values[row, :length].double(), expected, atol=1e-5)


def test_a_fresh_head_values_everything_at_zero_on_the_device_of_the_body(tiny_nemo):
    critic = load(tiny_nemo, MegatronGPTCriticModel)
    assert critic.get_values(make_batch()).abs().max() == 0
    assert not any("output_layer" in name for name, _ in critic.gpt.named_parameters())
    head = ValueHead(4)
    assert head(torch.ones(2, 3, 4, dtype=torch.bfloat16)).dtype == torch.float32
    body = build_gpt(critic.architecture).to("meta")  # the one other device that every machine has
    critic.add_head(body)
    assert {p.device.type for p in body.rm_head.parameters()} == {"meta"}


ROLES = [
    (MegatronGPTActorModel, PPOPolicyLoss(entropy_bonus=0.01)),
    (MegatronGPTCriticModel, PPOValueLoss(value_clip=0.2)),
]


@pytest.mark.parametrize(("cls", "loss"), ROLES, ids=["actor", "critic"])
def test_the_loss_is_an_argument_and_by_default_the_roles_own(cls, loss, tiny_nemo):
    role, batch = load(tiny_nemo, cls), make_batch()
    with pytest.raises(ConfigError, match=f"loss_fn: the {role.role_name}"):
        role.get_loss_and_metrics(batch, forward_only=True)
    given = role.get_loss_and_metrics(batch, forward_only=True, loss_fn=loss)
    assert role.loss_fn is None  # a call leaves nothing behind
    role.loss_fn = loss
    assert role.get_loss_and_metrics(batch, forward_only=True) == given
    role.loss_fn = None
    role.prepare_for_training()
    assert role.training_update(batch, 0, loss)["loss"] == pytest.approx(given[0], rel=1e-5)


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_batch_of_which_nothing_counts_moves_nothing(backend, tiny_nemo):
    critic, loss = make_critic(tiny_nemo, backend), PPOValueLoss(value_clip=None)
    assert trained(critic, loss)[0]["empty"] == 0
    before = {name: weight.clone() for name, weight in weights_of(critic).items()}
    nothing = {**make_batch(), "sample_mask": torch.zeros(len(PROMPTS))}
    found = trained(critic, loss, nothing)[0]
    assert (found["empty"], found["skipped"], found["grad_norm"]) == (1, 0, 0)
    assert critic.optimizer.steps == 1
    assert all(torch.equal(before[name], new) for name, new in weights_of(critic).items())


@pytest.mark.parametrize("mode", ["skip", "stop"])
@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_what_is_not_finite_never_reaches_the_weights(backend, mode, tiny_nemo, tmp_path):
    critic = make_critic(tiny_nemo, backend, non_finite=mode, non_finite_dir=tmp_path)
    batch, loss = make_batch(), PPOValueLoss(value_clip=None)
    batch["returns"][1, PROMPTS[1]] = float("nan")
    before = {name: weight.clone() for name, weight in weights_of(critic).items()}
    if mode == "stop":
        expected = r"critic, step 7, mini-batch 0 .*non_finite=skip"
        with training_step(7), pytest.raises(NonFiniteError, match=expected):
            trained(critic, loss, batch)
    else:
        with training_step(7):
            assert trained(critic, loss, batch)[0]["skipped"] == 1
    assert all(torch.equal(before[name], new) for name, new in weights_of(critic).items())
    assert critic.optimizer.steps == 0
    (report,) = tmp_path.rglob("*.json")
    assert report.name == "step_000007_critic_update_000_rank_00000.json"
    assert '"row": 1' in report.read_text()


def test_the_reference_keeps_the_initial_weights(tiny_nemo):
    modes = ("keep", "swap")
    assert torch.equal(*(check_reference(load(tiny_nemo), make_batch(), mode) for mode in modes))


LEARNED = {
    **{"position_embedding": "learned_absolute", "normalization": "layernorm"},
    **{"activation": "gelu", "bias_linear": True, "bias_qkv": True, "tie_embeddings": True},
    "num_query_groups": 8,
}
FAMILIES = {
    "llama": {},
    "gpt2": LEARNED,
    "no biases": {**LEARNED, "bias_linear": False, "bias_qkv": False, "tie_embeddings": False},
    "mixture": {"num_moe_experts": 4, "moe_ffn_hidden_size": 32, "family": "mixtral"},
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_weight_is_bfloat16_and_passes_run(family):
    architecture, roles = replace(TINY_ARCHITECTURE, **FAMILIES[family]), []
    for precision in ("32", "bf16"):
        given = settings(precision=precision, length_params=LengthParams(max_length=6))
        options = {"architecture": architecture, "tokenizer": byte_level_tokenizer()}
        cfg = {"vocab_size": architecture.vocab_size}
        roles.append(MegatronGPTActorModel(cfg, settings=given, **options))
    exact, narrow = roles
    assert {each.dtype for each in narrow.gpt.parameters()} == {torch.bfloat16}
    weights, batch = dict(exact.gpt.named_parameters()), make_batch()
    with torch.no_grad():
        for name, parameter in narrow.gpt.named_parameters():
            parameter.copy_(weights[name])
    difference = exact.get_logprobs(batch) - narrow.get_logprobs(batch)
    assert difference[batch["token_mask"] > 0].abs().mean() < 0.02
    narrow.infer({"text": batch["input_ids"][:, :6], "length": torch.tensor(PROMPTS)})
    assert trained(narrow, PPOPolicyLoss())[0]["skipped"] == 0.0


def test_save_to_and_restore_from_are_nemos(actor, tmp_path):
    actor.save_to(str(tmp_path / "copy.nemo"))
    copy = MegatronGPTActorModel.restore_from(str(tmp_path / "copy.nemo"))
    assert torch.equal(copy.get_logprobs(make_batch()), actor.get_logprobs(make_batch()))
    config = MegatronGPTModel.restore_from(str(tmp_path / "copy.nemo"), return_config=True)
    assert config["num_layers"] == actor.architecture.num_layers


class ModelWithNotes(MegatronGPTActorModel):
    def __init__(self, cfg, *args, **kwargs):
        super().__init__(cfg, *args, **kwargs)
        self.notes = self.register_artifact("extra.notes", cfg.get("extra", {}).get("notes"))


def test_registered_artifacts_travel_with_the_model(tiny_nemo, tmp_path):
    (tmp_path / "notes.txt").write_text("remember the milk")
    first = ModelWithNotes.restore_from(str(tiny_nemo))
    assert first.notes is None
    first.register_artifact("extra.notes", str(tmp_path / "notes.txt"))
    first.save_to(str(tmp_path / "first.nemo"))
    (tmp_path / "notes.txt").unlink()
    second = ModelWithNotes.restore_from(str(tmp_path / "first.nemo"))
    assert Path(second.notes).read_text() == "remember the milk"
    second.save_to(str(tmp_path / "second.nemo"))
    assert (tmp_path / "second.nemo").read_bytes() == (tmp_path / "first.nemo").read_bytes()


def test_a_reward_model_brings_its_head(tiny_nemo, tmp_path):
    critic = make_critic(tiny_nemo)
    critic.save_to(str(tmp_path / "rm.nemo"))
    reward = load_from_nemo(MegatronGPTRewardModel, restore_path=tmp_path / "rm.nemo")
    batch = make_batch()
    scores = reward.infer({key: batch[key] for key in ("input_ids", "input_lengths")})
    assert scores.shape == (len(LENGTHS),)
    hidden = reference_hidden(reward, batch["input_ids"][1, : LENGTHS[1]])[-1]
    expected = hidden @ critic.gpt.rm_head.weight.detach().double()[0] + 0.25
    assert scores[1].item() == pytest.approx(expected.item(), abs=1e-5)
    with pytest.raises(CheckpointError, match=r"output_layer\.weight"):
        load_from_nemo(MegatronGPTActorModel, restore_path=tmp_path / "rm.nemo")


def test_bad_input_is_refused_by_name(tiny_nemo, tmp_path):
    load = partial(load_from_nemo, MegatronGPTActorModel)
    with pytest.raises(CheckpointNotFoundError, match=r"absent\.nemo"):
        load(restore_path=tmp_path / "absent.nemo")
    with pytest.raises(CheckpointNotFoundError, match="restore_from_path"):
        load()
    role = load(restore_path=tiny_nemo)
    with pytest.raises(ConfigError, match="optim"):
        role.prepare_for_training()
    with pytest.raises(ConfigError, match="keep_reference"):
        role.get_reference_logprobs(make_batch())
    with pytest.raises(LayoutError, match="3"):
        load(RoleSettings(parallel=ParallelConfig(tensor=3)), restore_path=tiny_nemo)


def test_schedules_by_hand():
    constant = SchedConfig(name="constant", warmup_steps=3)
    assert [learning_rate(s, 1.0, constant, 10) for s in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]
    linear = SchedConfig(name="linear", min_lr=0.2)
    assert [learning_rate(s, 1.0, linear, 4) for s in (0, 2, 4, 9)] == pytest.approx(
        [1.0, 0.6, 0.2, 0.2]
    )
    cosine = SchedConfig(name="cosine", warmup_steps=1, constant_steps=2, min_lr=0.1, max_steps=7)
    assert [learning_rate(s, 1.0, cosine, None) for s in range(8)] == pytest.approx(
        [0.5, 1.0]
        + [0.1 + 0.9 * (1 + math.cos(math.pi * k / 4)) / 2 for k in (1, 2, 3)]
        + [0.1, 0.1, 0.1]
    )
