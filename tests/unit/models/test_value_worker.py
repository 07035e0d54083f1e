"""The critic's worker on one process: forward step, the head's optimizer, 8-bit products."""

import dataclasses

import pytest
import torch

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

ROWS, WIDTH, CLIP = 4, 12, 0.1
SCHED = SchedConfig(name="cosine", warmup_steps=2, max_steps=6, min_lr=1e-4)
OPTIM = OptimConfig(name="sgd", lr=0.5, sched=SCHED)


def make_batch():
    generator = torch.Generator().manual_seed(5)
    lengths, position = torch.tensor([12, 7, 3, 9]), torch.arange(WIDTH)
    return BatchedDataDict(
        {
            "input_ids": torch.randint(0, 256, (ROWS, WIDTH), generator=generator),
            "input_lengths": lengths,
            "token_mask": ((position > 0) & (position < lengths[:, None])).float(),
            "sample_mask": torch.ones(ROWS),
            "returns": torch.randn(ROWS, WIDTH, generator=generator),
        }
    )


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
    with torch.no_grad():  # a fresh head lets no gradient into the body
        role.gpt.rm_head.weight.normal_(0, 0.02, generator=torch.Generator().manual_seed(3))
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
    published, calls = megatron_value_worker.forward_step_value, []
    assert published is critic.forward_step_value

    def spy(*args, **kwargs):
        calls.append(kwargs["value_head"])
        return published(*args, **kwargs)

    monkeypatch.setattr(critic, "forward_step_value", spy)
    worker = start()
    worker.prepare_for_training()
    for eval_mode in (False, True):
        worker.train(make_batch(), PPOValueLoss(value_clip=None), eval_mode=eval_mode, mbs=2)
    assert calls == [worker.model.gpt.rm_head] * 4  # two micro-batches each


def test_eval_mode_reports_the_loss_and_changes_nothing(start):
    worker = start()
    worker.prepare_for_training()
    before = [p.detach().clone() for p in worker.model.gpt.parameters()]
    seen = worker.train(make_batch(), PPOValueLoss(value_clip=None), eval_mode=True)
    after = list(worker.model.gpt.parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    trained = worker.train(make_batch(), PPOValueLoss(value_clip=None), mbs=1)
    assert seen["global_loss"] == pytest.approx(trained["global_loss"], rel=1e-6)


@pytest.mark.parametrize("offload_weights", [False, True])
def test_a_pass_is_kept_from_values_to_training_unless_everything_leaves(start, offload_weights):
    worker = start(critic={"micro_batch_size": ROWS, "offload_weights": offload_weights})
    passes = []
    worker.model.gpt.decoder.register_forward_hook(lambda *_: passes.append(None))
    worker.prepare_for_inference()
    worker.get_values(make_batch())
    worker.finish_inference()
    worker.prepare_for_training()
    worker.train(make_batch(), PPOValueLoss(value_clip=None))
    worker.finish_training()
    assert len(passes) == (2 if offload_weights else 1)


def test_alone_a_worker_has_no_weights_to_wait_for(start):
    worker = start()
    worker.enable_forward_pre_hook()
    assert not worker.model.model.remove_forward_pre_hook_handles
    worker.disable_forward_pre_hook(param_sync=False)


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
