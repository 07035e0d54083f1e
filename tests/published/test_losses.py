"""Losses as NeMo-RL publishes them, through `Policy.train` and `Value.train`."""

import enum
from typing import ClassVar

import pytest
import torch
from batches import ppo_batch

from aligner.algorithms.losses.interfaces import LossInputType, PublishedLoss
from aligner.algorithms.losses.value import MseValueLossFn, PPOValueLoss
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import (
    CriticConfig,
    ModelConfig,
    OptimConfig,
    PolicyPPOConfig,
    SamplingParams,
    SequencePackingConfig,
)
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.worker_groups import LocalCluster
from aligner.errors import ConfigError, DataError
from aligner.losses.language import NegativeLogLikelihoodLoss
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import initialize_parallel
from aligner.types import Denominators, TokenOutputs

ROWS, WIDTH = 4, 9


def batch():
    data = ppo_batch([WIDTH, 5, 7, 8], [3] * ROWS)
    sample_mask = torch.tensor([1.0, 1.0, 0.0, 1.0])
    return BatchedDataDict({**data, "sample_mask": sample_mask, "values": data["advantages"]})


def nll_of_logits(next_token_logits, data, global_valid_seqs, global_valid_toks):
    """Of logits, as a plain function: position t predicts token t + 1."""
    tokens = data["input_ids"][:, 1:]
    logprobs = next_token_logits[:, :-1].log_softmax(-1).gather(2, tokens[..., None])[..., 0]
    mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
    loss = -(logprobs * mask).sum() / global_valid_toks
    return loss, {"loss": loss.item(), "num_valid_samples": len(tokens)}


TheirInputType = enum.Enum(
    "TheirInputType", {name: name.lower() for name in ("LOGIT", "LOGPROB", "DISTILLATION")}
)


class NLLOfLogprobs:
    """Of log-probs, and called by keywords alone."""

    input_type: ClassVar = TheirInputType.LOGPROB

    def __call__(self, data, global_valid_seqs, global_valid_toks, **kwargs):
        mask = data["token_mask"][:, 1:] * data["sample_mask"][:, None]
        logprobs = kwargs["next_token_logprobs"]
        assert logprobs.shape == mask.shape
        return -(logprobs * mask).sum() / global_valid_toks, {}


def plain_mse(logits, data, global_valid_seqs, global_valid_toks):
    mask = data["token_mask"] * data["sample_mask"][:, None]
    return ((logits - data["returns"]).square() * mask).sum() / global_valid_toks / 2, {}


@pytest.fixture(scope="module")
def start(tiny_nemo):
    with open_nemo(tiny_nemo) as checkpoint:
        tokenizer = checkpoint.tokenizer
    cluster = LocalCluster(initialize_parallel())
    sizes = {"micro_batch_size": 2, "global_batch_size": ROWS, "optim": OptimConfig(lr=1e-2)}

    def start(role, backend="megatron", **options):
        model = ModelConfig(str(tiny_nemo), **sizes, ppo=HOT, **options)
        if role is Policy:
            handle = Policy(cluster, model, tokenizer, init_reference_model=False, backend=backend)
        else:
            section = CriticConfig(**sizes)
            handle = Value(cluster, section, tokenizer, model=model, backend=backend)
            head = handle.worker_group.worker.model
            if backend == "megatron":
                head.gpt.rm_head.weight.data.fill_(0.05)
        handle.prepare_for_training()
        return handle

    return start


# The temperature of sampling also divides the logits of training.
HOT = PolicyPPOConfig(sampling_params=SamplingParams(temperature=0.7))
PACKED = {"sequence_packing": SequencePackingConfig(enabled=True, train_mb_tokens=16)}


BY_LOGPROBS = NLLOfLogprobs()


@pytest.mark.parametrize(
    ("theirs", "backend", "options"),
    [
        (nll_of_logits, "megatron", {}),
        (nll_of_logits, "dtensor", {}),
        (BY_LOGPROBS, "megatron", PACKED),
        pytest.param(nll_of_logits, "megatron", PACKED, marks=pytest.mark.extended),
        pytest.param(BY_LOGPROBS, "megatron", {}, marks=pytest.mark.extended),
        pytest.param(BY_LOGPROBS, "dtensor", {}, marks=pytest.mark.extended),
    ],
)
def test_a_policy_learns_the_same_from_a_published_loss(start, theirs, backend, options):
    """One and the same loss written in three ways: loss, gradient and update agree."""
    results = []
    for loss in (NegativeLogLikelihoodLoss(), theirs):
        handle = start(Policy, backend, **options)
        first = handle.train(batch(), loss)
        results.append((first, handle.train(batch(), loss)))
    (ours, after_ours), (second, after_other) = results
    assert second["loss"] == pytest.approx(ours["loss"], rel=1e-5)
    assert second["grad_norm"] == pytest.approx(ours["grad_norm"], rel=1e-4)
    assert after_other["loss"] == pytest.approx(after_ours["loss"], rel=1e-4)
    assert after_ours["loss"] < ours["loss"]
    if theirs is nll_of_logits:
        assert second["all_mb_metrics"]["num_valid_samples"] == [ROWS]


@pytest.mark.parametrize("backend", ["megatron", "dtensor"])
def test_a_critic_learns_the_same_from_a_published_loss(start, backend):
    losses = [PPOValueLoss(None), MseValueLossFn(), plain_mse]
    results = [start(Value, backend).train(batch(), loss) for loss in losses]
    for result in results[1:]:
        assert result["loss"] == pytest.approx(results[0]["loss"], rel=1e-6)
        assert result["grad_norm"] == pytest.approx(results[0]["grad_norm"], rel=1e-5)
    assert results[0]["grad_norm"] > 0


def test_workers_take_published_losses_themselves(start):
    worker = start(Value).worker_group.worker
    alone = worker.train(batch(), MseValueLossFn(), eval_mode=True)
    assert alone["global_loss"] == start(Value).train(batch(), plain_mse, eval_mode=True)["loss"]


def test_mse_value_loss_has_a_scale_and_a_clip():
    data, values = batch(), torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    counts = Denominators(valid_tokens=torch.tensor(7.0), valid_seqs=torch.tensor(3.0))
    expected, _ = PPOValueLoss(0.2)(TokenOutputs(values), data, counts)
    loss, metrics = MseValueLossFn({"scale": 3.0, "cliprange": 0.2})(
        values[..., None], data, counts.valid_seqs, counts.valid_tokens
    )
    torch.testing.assert_close(loss, 3 * expected)
    torch.testing.assert_close(metrics["loss"], loss)
    with pytest.raises(ConfigError, match=r"loss_fn\.clip: unknown key"):
        MseValueLossFn({"clip": 0.2})


def test_what_cannot_be_a_loss_is_refused():
    class Distillation:
        input_type = TheirInputType.DISTILLATION

        def __call__(self, *args):
            raise AssertionError

    with pytest.raises(ConfigError, match=r"loss_fn\.input_type=.*LOGIT, LOGPROB"):
        PublishedLoss(Distillation())
    with pytest.raises(ConfigError, match="loss_fn='mse'"):
        PublishedLoss("mse")

    def refused(function, message):
        with pytest.raises(DataError, match=message):
            PublishedLoss(function)(
                TokenOutputs(torch.zeros(ROWS, WIDTH)),
                batch(),
                Denominators(torch.tensor(1.0), torch.tensor(1.0)),
            )

    refused(lambda *args: torch.zeros(()), r"Return a tuple \(loss, metrics\)")
    refused(lambda *args: (1.0, {}), "Return a scalar tensor")
    refused(lambda *args: (torch.zeros(2), {}), "Return a scalar tensor")
    refused(lambda *args: (torch.zeros(()), {"m": torch.zeros(2)}), "metric m=")
    refused(lambda *args: (torch.zeros(()), {"m": "x"}), "metric m='x'")


def test_the_input_is_told_by_type_or_by_name():
    assert PublishedLoss(nll_of_logits).input_type is LossInputType.LOGIT
    assert PublishedLoss(NLLOfLogprobs()).input_type is LossInputType.LOGPROB
    by_name = PublishedLoss(
        lambda next_token_logprobs, data, global_valid_seqs, global_valid_toks: (data, {})
    )
    assert by_name.input_type is LossInputType.LOGPROB
