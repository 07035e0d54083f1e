"""The critic's worker on one process, and values out of the pass that trains."""

import copy
import dataclasses
import gc
import weakref
from unittest.mock import Mock

import pytest
import torch
from batches import ppo_batch
from role_models import assert_equal, fill_head, load_role
from torch import nn

from aligner.config import (
    CriticConfig,
    DynamicBatchingConfig,
    ModelConfig,
    OptimConfig,
    SchedConfig,
)
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt import MegatronGPTCriticModel
from aligner.models.gpt.layers import layer_spec
from aligner.models.gpt.megatron import build, critic
from aligner.models.gpt.role.settings import RoleSettings, RunSettings
from aligner.models.gpt.role.training_state import learning_rate
from aligner.models.value.workers import megatron_value_worker
from aligner.models.value.workers.megatron_value_worker import (
    MegatronValueWorker,
    MegatronValueWorkerImpl,
)
from aligner.parallel.groups import initialize_parallel

pytestmark = pytest.mark.integration

LENGTHS = (9, 5, 12, 7)
ROWS = len(LENGTHS)
WHOLE = {"micro_batch_size": ROWS, "global_batch_size": ROWS}


def make_critic(tiny_nemo, **changes):
    settings = {"optim": OptimConfig(lr=1e-2), **WHOLE, **changes}
    return load_role(MegatronGPTCriticModel, PPOValueLoss(value_clip=None), tiny_nemo, **settings)


def make_batch():
    return BatchedDataDict(ppo_batch(LENGTHS, [2] * ROWS, seed=7))


def counted(critic):
    """A list that each forward pass of the body will make longer."""
    passes = []
    critic.gpt.decoder.register_forward_hook(lambda *_: passes.append(None))
    return passes


def scored(critic, batch):
    critic.prepare_for_inference()
    values = critic.get_values(batch)
    critic.finish_inference()
    return values


def updated(critic, batch):
    critic.prepare_for_training()
    metrics = critic.training_update(batch)
    critic.finish_training()
    return metrics, {name: value.clone() for name, value in critic.gpt.named_parameters()}


@pytest.mark.parametrize(
    "changes",
    [{}, {"recompute": "full"}, {"sequence_packing": True}, {"precision": "bf16"}],
    ids=["plain", "recompute", "packed", "bf16"],
)
def test_the_body_runs_once_and_the_update_is_the_same_to_the_bit(changes, tiny_nemo):
    batch, critic = make_batch(), make_critic(tiny_nemo, **changes)
    passes = counted(critic)
    values = scored(critic, batch)
    assert not values.requires_grad
    assert not critic.model.training
    hidden = weakref.ref(critic.forward_reuse._microbatch.hidden)
    kept = updated(critic, batch)
    assert len(passes) == 1
    gc.collect()
    assert hidden() is None  # the graph is freed with the update

    own = make_critic(tiny_nemo, **changes)
    assert torch.equal(values, own.get_values(batch))
    own.forward_reuse.drop()
    assert_equal(kept, updated(own, batch))
    second = updated(critic, batch)  # no second time
    assert_equal(second, updated(own, batch))


def state_loaded(critic, batch):
    state = copy.deepcopy(critic.run_state())
    updated(critic, batch)
    later = copy.deepcopy(critic.run_state())
    critic.load_run_state([state])
    critic.get_values(batch)
    critic.load_run_state([later])


CHANGES = {
    "other rows": lambda c, batch: batch.update(input_ids=batch["input_ids"].roll(1, dims=0)),
    "other lengths": lambda c, batch: batch.update(input_lengths=torch.tensor([9, 5, 12, 6])),
    "weights written": lambda c, batch: nn.init.zeros_(c.gpt.rm_head.weight),
    "weights loaded": lambda c, batch: c.load_whole_weights(
        {name: value * 1.5 for name, value in c.whole_weights().items()}
    ),
    "state loaded": state_loaded,
    "inference again": lambda c, batch: c.prepare_for_inference(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_pass_is_not_used(change, tiny_nemo):
    batch, critic = make_batch(), make_critic(tiny_nemo)
    scored(critic, batch)
    CHANGES[change](critic, batch)
    passes, kept = counted(critic), updated(critic, batch)
    assert len(passes) == 1, "training made a pass of its own"

    own, batch = make_critic(tiny_nemo), make_batch()
    CHANGES[change](own, batch)
    own.forward_reuse.drop()
    assert_equal(kept, updated(own, batch))


@pytest.mark.parametrize(
    ("settings", "architecture", "attributes"),
    [
        # Several passes.
        ({"micro_batch_size": 2}, {}, {}),
        ({"global_batch_size": 2}, {}, {}),
        # Random numbers, or counts, in training.
        ({}, {"hidden_dropout": 0.1}, {}),
        ({}, {"attention_dropout": 0.1}, {}),
        ({}, {"num_moe_experts": 4}, {}),
        # A body that holds other weights at times.
        ({}, {}, {"adapters": object()}),
        ({}, {}, {"rewards_of": object()}),
    ],
)
def test_a_pass_that_differs_from_training_is_not_kept(
    settings, architecture, attributes, tiny_nemo
):
    critic = make_critic(tiny_nemo, **settings)
    critic.architecture = dataclasses.replace(critic.architecture, **architecture)
    vars(critic).update(attributes)
    critic.get_values(make_batch())
    assert critic.forward_reuse._microbatch is None


CLIP = 0.1
SCHED = SchedConfig(name="cosine", warmup_steps=2, max_steps=6, min_lr=1e-4)
OPTIM = OptimConfig(name="sgd", lr=0.5, sched=SCHED)


@pytest.fixture
def start(tiny_nemo):
    def start(critic=None, **model):
        critic = {"micro_batch_size": 2, **(critic or {})}
        return MegatronValueWorker(
            config=CriticConfig(global_batch_size=ROWS, optim=OPTIM, **critic),
            model=ModelConfig(restore_from_path=str(tiny_nemo), **model),
            tokenizer=None,
            run=RunSettings(gradient_clip_val=CLIP, precision="bf16" if model.get("fp8") else "32"),
            parallel=initialize_parallel(),
        )

    return start


def test_head_and_body_follow_one_schedule_and_one_clipping(start):
    worker = start()
    role, loss = worker.model, PPOValueLoss(value_clip=None)
    fill_head(role, std=0.02)
    role.loss_fn = loss
    worker.prepare_for_training()
    parameters = dict(role.gpt.named_parameters())
    for step in range(5):
        role.optimizer.zero_grad()
        role.get_loss_and_metrics(dict(make_batch()), forward_only=False)
        gradients = {name: p.main_grad.clone() for name, p in parameters.items()}
        norm = torch.cat([g.flatten() for g in gradients.values()]).norm()
        assert norm > 2 * CLIP
        before = {name: p.detach().clone() for name, p in parameters.items()}
        result = worker.train(make_batch(), loss)
        assert result["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
        lr = learning_rate(step, OPTIM.lr, SCHED, None)
        assert result["lr"] == lr
        for name in ("rm_head.weight", "rm_head.bias", "decoder.final_layernorm.weight"):
            moved = parameters[name] - before[name]
            expected = -lr * CLIP / norm * gradients[name]
            assert (moved - expected).abs().max() < 1e-6, (step, name)
            assert expected.abs().max() > 1e-5


def test_training_goes_through_forward_step_value(start, monkeypatch):
    assert issubclass(MegatronValueWorker, MegatronValueWorkerImpl)
    assert megatron_value_worker.forward_step_value is critic.forward_step_value
    passes = Mock(wraps=critic.forward_step_value)
    monkeypatch.setattr(critic, "forward_step_value", passes)
    worker = start()
    worker.prepare_for_training()
    before = [p.detach().clone() for p in worker.model.gpt.parameters()]
    seen = worker.train(make_batch(), PPOValueLoss(value_clip=None), eval_mode=True, mbs=2)
    # In evaluation mode it reports the loss and changes nothing.
    assert_equal(before, list(worker.model.gpt.parameters()))
    trained = worker.train(make_batch(), PPOValueLoss(value_clip=None), mbs=2)
    assert seen["global_loss"] == pytest.approx(trained["global_loss"], rel=1e-6)
    heads = [call.kwargs["value_head"] for call in passes.call_args_list]
    assert heads == [worker.model.gpt.rm_head] * 4  # two micro-batches each


@pytest.mark.parametrize("offload_weights", [False, True])
def test_a_pass_is_kept_from_values_to_training_unless_everything_leaves(start, offload_weights):
    worker = start(critic={"micro_batch_size": ROWS, "offload_weights": offload_weights})
    passes = counted(worker.model)
    worker.prepare_for_inference()
    worker.get_values(make_batch())
    worker.finish_inference()
    worker.prepare_for_training()
    worker.train(make_batch(), PPOValueLoss(value_clip=None))
    worker.finish_training()
    assert len(passes) == (2 if offload_weights else 1)


def test_fp8_is_refused_where_there_is_none(start):
    if accelerator.has_fp8():
        pytest.skip("needs a machine without a GPU that has 8-bit matrix products")
    with pytest.raises(ConfigError, match=r"model\.fp8=hybrid needs Transformer Engine and a GPU"):
        start(fp8="hybrid")
    with pytest.raises(ConfigError, match=r"model\.fp8=e4m3 needs trainer\.precision=bf16"):
        build.check_fp8(RoleSettings(fp8="e4m3"))


@pytest.mark.parametrize("fp8", ["e4m3", "hybrid"])
def test_fp8_reaches_megatron_core(fp8, monkeypatch):
    for module in (build, layer_spec):
        monkeypatch.setattr(module, "has_transformer_engine", lambda: True)
    monkeypatch.setattr(accelerator, "has_fp8", lambda: True)
    config = build.transformer_config(TINY_ARCHITECTURE, RoleSettings(precision="bf16", fp8=fp8))
    assert (config.fp8, config.fp8_recipe) == (fp8, "tensorwise")


def test_fp8_rounds_rows_up():
    model = ModelConfig(restore_from_path="m.nemo", fp8="hybrid", tensor_model_parallel_size=2)
    assert model.sequence_length_round == 32
    dynamic = DynamicBatchingConfig(enabled=True, sequence_length_round=24)
    assert dataclasses.replace(model, dynamic_batching=dynamic).sequence_length_round == 96
    assert dataclasses.replace(model, fp8=None).sequence_length_round == 1
