"""Names that the value workers' pages and NeMo-Aligner publish, imported and used as they say."""

import inspect

import pytest
import torch
from batches import ppo_batch
from lightning.pytorch import LightningModule
from torch import nn

from aligner.algorithms.losses.value import MseValueLossFn, PPOValueLoss
from aligner.checkpoint.model_source import open_model
from aligner.models import gpt
from aligner.models.gpt import (
    MegatronGPTActorModel,
    MegatronGPTCriticModel,
    MegatronGPTRewardModel,
    load_from_nemo,
)
from aligner.models.gpt.dtensor.actor import DTensorActorModel
from aligner.models.gpt.dtensor.critic import DTensorCriticModel
from aligner.models.gpt.forward.schedule import split_microbatches
from aligner.models.gpt.forward.token_layout import LayoutRules
from aligner.models.gpt.megatron import critic
from aligner.models.gpt.role.settings import RoleSettings
from aligner.models.value.workers.dtensor_value_worker_v2 import (
    _right_shift_values,
    _RightShiftLossWrapper,
)
from aligner.models.value.workers.megatron_value_worker import (
    TokenizerType,
    ValueHead,
    _unwrap_model,
    _ValueOutputLayerBypass,
    forward_step_value,
)
from aligner.parallel.groups import initialize_parallel

COUNTS = {"global_valid_seqs": torch.tensor(4.0), "global_valid_toks": torch.tensor(29.0)}


def make_batch():
    return ppo_batch([9, 5, 12, 7], [1] * 4)


@pytest.fixture(scope="module")
def body(tiny_nemo):
    role = load_from_nemo(MegatronGPTCriticModel, restore_path=tiny_nemo)
    with torch.no_grad():
        role.gpt.rm_head.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    return role.eval()


def test_the_forward_step_has_the_published_arguments():
    parameters = inspect.signature(forward_step_value).parameters
    published = [
        *("state", "global_valid_seqs", "global_valid_toks", "data_iterator", "model"),
        *("value_head", "loss_fn", "pack_sequences", "defer_fp32_logits", "cp_normalize"),
        "policy_cfg",
    ]
    assert list(parameters)[: len(published)] == published
    assert parameters["value_head"].kind is inspect.Parameter.KEYWORD_ONLY
    defaults = [parameters[name].default for name in published[-4:]]
    assert defaults == [False, None, True, None]


@pytest.mark.parametrize("pack_sequences", [False, True])
@pytest.mark.parametrize("loss_fn", [MseValueLossFn({"scale": 0.4}), PPOValueLoss(None)])
def test_the_forward_step_as_published(body, pack_sequences, loss_fn):
    batch = make_batch()
    hidden, closure = forward_step_value(
        *(None, *COUNTS.values(), iter([batch]), body.model),
        value_head=body.gpt.rm_head,
        loss_fn=loss_fn,
        pack_sequences=pack_sequences,
        defer_fp32_logits=None,
        cp_normalize=True,
        policy_cfg={"sequence_packing": {"enabled": pack_sequences}},
    )
    assert hidden.shape[:2] == ((1, 33) if pack_sequences else (4, 12))
    loss, _, metrics = closure(hidden)
    error = (body.get_values(batch) - batch["returns"]).square() * batch["token_mask"]
    scale = getattr(loss_fn, "scale", 1.0)
    assert loss.item() == pytest.approx(scale * error.sum().item() / 2 / 29, rel=1e-5)
    assert metrics["loss"] == loss


def test_a_loss_that_context_parallel_ranks_repeat(body, monkeypatch):
    rules = LayoutRules.of(initialize_parallel(), packed=False, sequence_length_round=1)
    microbatches = split_microbatches(make_batch(), [(0, 4)], rules)

    def loss(cp_normalize):
        options = {"value_head": body.gpt.rm_head, "cp_normalize": cp_normalize}
        arguments = (None, *COUNTS.values(), iter(microbatches), body.model)
        hidden, closure = forward_step_value(*arguments, **options, loss_fn=MseValueLossFn())
        value, _, metrics = closure(hidden)
        assert metrics["loss"] == value
        return value.item()

    monkeypatch.setattr(critic.parallel_state, "get_context_parallel_world_size", lambda: 1)
    once = loss(True)
    assert loss(False) == once
    monkeypatch.setattr(critic.parallel_state, "get_context_parallel_world_size", lambda: 2)
    assert loss(False) == pytest.approx(2 * once)
    assert loss(True) == once


def test_the_bypass_captures_hidden_states_and_returns_one_number_a_token(body, tiny_nemo):
    captured = {}
    model = load_from_nemo(MegatronGPTActorModel, restore_path=tiny_nemo).gpt.eval()
    model.output_layer = _ValueOutputLayerBypass(captured)
    batch = make_batch()
    positions = torch.arange(12).expand(4, 12)
    with torch.no_grad():
        minimal = model(batch["input_ids"], positions, None)
        values = ValueHead(64, torch.float32)
        values.load_state_dict(body.gpt.rm_head.state_dict())
        values = values(captured["hidden_states"].transpose(0, 1))
    assert minimal.shape == (4, 12, 1)
    assert captured["hidden_states"].shape == (12, 4, 64)
    assert values.shape == (4, 12, 1)
    inside = batch["token_mask"].bool()
    shifted = _right_shift_values(values.squeeze(-1))
    assert torch.allclose(shifted[inside], body.get_values(batch)[inside], atol=1e-5)


def test_what_unwraps_unwraps(body):
    from megatron.core.transformer.module import Float16Module

    assert _unwrap_model(body.model) is body.gpt
    wrapped = Float16Module.__new__(Float16Module)
    nn.Module.__init__(wrapped)
    wrapped.module = body.gpt
    assert _unwrap_model(wrapped) is body.gpt
    assert TokenizerType.__bound__ is not None


def test_the_right_shift_as_published(tiny_nemo, monkeypatch):
    """A critic that speaks of the token just read, and the wrapper: the shifted critic."""
    values = torch.tensor([[1.0, 2.0, 3.0]], requires_grad=True)
    shifted = _right_shift_values(values)
    assert shifted.tolist() == [[0.0, 1.0, 2.0]]
    shifted.sum().backward()
    assert values.grad.tolist() == [[1.0, 1.0, 0.0]]

    with open_model(str(tiny_nemo)) as source:
        role = DTensorCriticModel(source, RoleSettings(), initialize_parallel(), source.tokenizer)
    assert isinstance(role, LightningModule)
    with torch.no_grad():
        role.model.score.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))
    batch = make_batch()
    inside = batch["token_mask"].bool()

    def learned(loss_fn):
        role.loss_fn = loss_fn
        role.zero_grad()
        loss, _ = role.get_loss_and_metrics(batch, forward_only=False)
        return loss, role.model.score.weight.grad.full_tensor().clone()

    expected_values, expected = role.get_values(batch), learned(PPOValueLoss(None))
    monkeypatch.setattr(DTensorCriticModel, "right_shift", False)
    unshifted = role.get_values(batch)
    assert not torch.allclose(unshifted[inside], expected_values[inside])
    assert torch.allclose(_right_shift_values(unshifted)[inside], expected_values[inside])
    for inner in (PPOValueLoss(None), MseValueLossFn()):
        loss, gradient = learned(_RightShiftLossWrapper(inner))
        assert loss == pytest.approx(expected[0], rel=1e-6)
        assert torch.allclose(gradient, expected[1], atol=1e-6)


@pytest.mark.parametrize("mode", ["keep", "swap"])
def test_a_policy_of_transformers_and_its_reference_are_lightning_modules(tiny_nemo, mode):
    with open_model(str(tiny_nemo)) as source:
        role = DTensorActorModel(source, RoleSettings(), initialize_parallel(), source.tokenizer)
    role.keep_reference(mode)
    assert isinstance(role, LightningModule)
    assert isinstance(role.reference, LightningModule)
    batch = make_batch()
    before = role.get_logprobs(batch)
    with torch.no_grad():
        for shard in role.shards:
            shard.local.mul_(1.1)
    assert not torch.equal(role.get_logprobs(batch), before)
    assert torch.equal(role.reference.infer(batch), before)


def test_nemo_aligners_classes():
    kinds = gpt.REWARD_MODEL_CLASS_DICT
    assert kinds[gpt.RewardModelType("binary_ranking")] is MegatronGPTRewardModel
    assert kinds[gpt.RewardModelType("regression")] is gpt.MegatronGPTRegressionRewardModel
    for name in ("ReinforceActor", "DPO", "KTO"):
        assert issubclass(getattr(gpt, f"MegatronGPT{name}Model"), MegatronGPTActorModel)
    assert gpt.GPTSFTModel is gpt.MegatronGPTRSModel
    assert gpt.GPTKnowledgeDistillationModel is MegatronGPTActorModel
    for name, instead in (("GPTSteerLMModel", "ratings"), ("MegatronGPTSPINModel", "dpo")):
        with pytest.raises(AttributeError, match=instead):
            getattr(gpt, name)
