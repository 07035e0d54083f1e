"""The published way to load a role and to use it: hydra's section, a trainer, `infer`, a loss."""

import pytest
import recipes
import torch
from lightning.pytorch import LightningModule, Trainer
from omegaconf import OmegaConf

from aligner.algorithms.run.identity import flat
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import RSModelConfig, RSRunConfig, load_config
from aligner.errors import ConfigError
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
    MegatronGPTRSModel,
    ReferencePolicy,
    load_from_nemo,
)

ROLLOUT = {
    "length_params": {"max_length": 3, "min_length": 2},
    "sampling_params": {"temperature": 0.5, "top_k": 7},
    "offload_adam_states": True,
    "forward_micro_batch_size": 5,
    "rollout_micro_batch_size": 6,
}
BATCHES = {"micro_batch_size": 2, "global_batch_size": 4}
PROMPTS = torch.tensor([[72, 105, 33, 0], [87, 104, 121, 63], [65, 0, 0, 0], [66, 67, 0, 0]])
LENGTHS = torch.tensor([3, 4, 1, 2])


QUIET = {"logger": False, "enable_checkpointing": False, "max_steps": 1}


@pytest.fixture(scope="module")
def trainer():
    return Trainer(accelerator="cpu", devices=1, **QUIET)


@pytest.fixture
def composed(tiny_nemo):
    """What ``@hydra_runner`` hands over: a DictConfig in struct mode."""

    def composed(name, *overrides):
        settings = [f"model.restore_from_path={tiny_nemo}", "reward.function=a.b:c"]
        settings += [f"model.{key}={size}" for key, size in BATCHES.items()]
        config = recipes.composed(name, *settings, "data.train.source=a.jsonl", *overrides)
        assert OmegaConf.is_struct(config.model)
        return config

    return composed


def rollout_overrides(group):
    return [f"model.{group}.{key}={value}" for key, value in flat(ROLLOUT).items()]


def assert_settings(role):
    settings = role.settings
    assert (settings.micro_batch_size, settings.global_batch_size) == (2, 4)
    assert settings.offload_adam_states
    assert settings.forward_micro_batch_size == 5
    if isinstance(role, MegatronGPTActorModel):
        assert (role.length_params.max_length, role.length_params.min_length) == (3, 2)
        assert (role.sampling_params.temperature, role.sampling_params.top_k) == (0.5, 7)
        assert role.rollout_micro_batch_size == 6


def test_rejection_samplings_model_as_published(composed, trainer, tiny_nemo):
    """The call of the published page, with its `infer` and its loss."""
    cfg = composed("gpt_rs", *rollout_overrides("rs"))
    ptl_model = load_from_nemo(
        MegatronGPTRSModel, cfg.model, trainer, strict=True, restore_path=str(tiny_nemo)
    )
    assert isinstance(ptl_model, LightningModule)
    assert ptl_model.trainer is trainer
    assert_settings(ptl_model)

    ptl_model.prepare_for_inference()
    rollout = ptl_model.infer({"text": PROMPTS, "length": LENGTHS})
    ptl_model.finish_inference()
    for key in ("response_tokens", "response_lengths", "prompt_lengths"):
        assert rollout[key].dtype == torch.int64
    assert rollout["prompt_lengths"].tolist() == LENGTHS.tolist()
    drawn = rollout["response_lengths"] - rollout["prompt_lengths"]
    assert ((drawn >= 2) & (drawn <= 3)).all()

    logprobs = ptl_model.get_inference_log_probs(rollout["response_tokens"])
    position = torch.arange(logprobs.shape[1])
    mask = (position >= rollout["prompt_lengths"][:, None]) & (
        position < rollout["response_lengths"][:, None]
    )
    ptl_model.prepare_for_training()
    loss_mean, metrics = ptl_model.get_loss_and_metrics(batch=rollout, forward_only=True)
    assert loss_mean == metrics["loss"]
    assert loss_mean == pytest.approx(-logprobs[mask].mean().item(), rel=1e-5)
    before = [value.clone() for value in ptl_model.gpt.parameters()]
    loss_mean, metrics = ptl_model.get_loss_and_metrics(batch=rollout, forward_only=False)
    outcome = ptl_model.optimizer.step()
    ptl_model.finish_training()
    assert outcome.grad_norm > 0
    assert not all(map(torch.equal, before, ptl_model.gpt.parameters()))


def test_actor_critic_and_reward_model_take_hydras_sections(composed, trainer, tiny_nemo):
    critic = {**BATCHES, "forward_micro_batch_size": 5, "offload_adam_states": True}
    overrides = [f"critic.{key}={value}" for key, value in critic.items()]
    cfg = composed("gpt_ppo", *rollout_overrides("ppo"), *overrides)
    samples = composed("gpt_rs", *rollout_overrides("rs"), "model.rs.num_rollout_samples=16")
    mapping = OmegaConf.create({"rs": ROLLOUT, "optim": {"lr": 1e-3}, **BATCHES})
    for kind, section in (
        (MegatronGPTRSModel, load_config(samples, RSRunConfig).model),
        (MegatronGPTRSModel, mapping),
        (MegatronGPTActorModel, cfg.model),
        (MegatronGPTCriticModel, cfg.critic),
        (MegatronGPTCriticModel, cfg.model),
        (MegatronGPTRewardModel, cfg.model),
    ):
        role = load_from_nemo(kind, section, trainer, strict=True, restore_path=tiny_nemo)
        assert_settings(role)
        role.prepare_for_training()
        assert role.optimizer.config.lr == section.optim.lr


@pytest.mark.parametrize(
    ("kind", "group"),
    [(MegatronGPTRSModel, "rs"), (MegatronGPTActorModel, "ppo"), (MegatronGPTCriticModel, None)],
)
def test_a_constructor_honours_what_stands_beside_the_architecture(kind, group, trainer, tiny_nemo):
    with open_nemo(tiny_nemo) as checkpoint:
        cfg = dict(checkpoint.config)
    if group is None:
        cfg |= {"offload_adam_states": True, "forward_micro_batch_size": 5}
    else:
        cfg[group] = ROLLOUT
    optim = {
        "name": "distributed_fused_adam",
        "lr": 9e-7,
        "bucket_cap_mb": 200,
        "sched": {"name": "CosineAnnealing", "warmup_steps": 10, "constant_steps": 1000},
    }
    role = kind(OmegaConf.create({**cfg, **BATCHES, "optim": optim}), trainer)
    assert_settings(role)
    assert role.settings.optim.sched.name == "cosine"


def test_what_a_file_says_of_its_own_training_is_not_this_runs(tiny_nemo):
    """Layout and optimizer in a `.nemo`'s configuration are those of who trained it."""
    role = load_from_nemo(MegatronGPTActorModel, restore_path=tiny_nemo)
    with open_nemo(tiny_nemo) as checkpoint:
        checkpoint.config |= {"tensor_model_parallel_size": 8, "optim": {"lr": 1.0}}
        again = MegatronGPTActorModel.from_checkpoint(checkpoint)
    assert again.settings == role.settings


def test_the_trainer_says_precision_and_clipping(tiny_nemo):
    precision = {"precision": "bf16-mixed", "gradient_clip_val": 0.25}
    trainer = Trainer(accelerator="cpu", devices=1, **QUIET, **precision)
    cfg = {"optim": {"lr": 1e-3}}
    role = load_from_nemo(MegatronGPTActorModel, cfg, trainer, restore_path=tiny_nemo)
    assert role.settings.precision == "bf16"
    assert role.settings.gradient_clip_val == 0.25


def test_what_does_not_fit_is_refused_by_name(tiny_nemo):
    typed = RSModelConfig(restore_from_path=str(tiny_nemo))
    assert load_from_nemo(MegatronGPTRSModel, typed).settings.micro_batch_size == 8
    for cfg, words in (
        ({"micro_batch": 2}, r"model\.micro_batch: unknown key. Did you mean"),
        ({"rs": {"sampling_params": {"temperatur": 1}}}, r"model\.rs\.sampling_params\.temperatur"),
        ({"loss_clip_val": 0.2}, r"model\.loss_clip_val: .*critic\.value_clip"),
        (7, "cfg is int"),
    ):
        with pytest.raises(ConfigError, match=words):
            load_from_nemo(MegatronGPTRSModel, cfg, restore_path=tiny_nemo)


@pytest.mark.parametrize("mode", ["keep", "swap"])
def test_the_reference_model_is_a_lightning_module(mode, tiny_nemo):
    actor = load_from_nemo(MegatronGPTActorModel, {"optim": {"lr": 0.1}}, restore_path=tiny_nemo)
    with pytest.raises(ConfigError, match="keep_reference"):
        _ = actor.reference
    actor.keep_reference(mode)
    reference = actor.reference
    assert isinstance(reference, LightningModule)
    assert isinstance(reference, ReferencePolicy)
    tokens = torch.randint(1, 250, (2, 6), generator=torch.Generator().manual_seed(1))
    before = actor.get_inference_log_probs(tokens)
    actor.train()
    assert not any(module.training for module in reference.modules())
    assert not any(parameter.requires_grad for parameter in reference.parameters())
    with torch.no_grad():
        for parameter in actor.gpt.parameters():
            parameter.add_(0.01)
    batch = {"input_ids": tokens, "input_lengths": torch.tensor([6, 6])}
    batch["token_mask"] = torch.ones(2, 6)
    reference.prepare_for_inference()
    assert torch.equal(reference.infer(batch), before)
    assert torch.equal(reference(batch), actor.get_init_policy_logprobs(tokens))
    reference.finish_inference()
    assert not torch.equal(actor.get_inference_log_probs(tokens), before)
