"""What top-k and top-p kept, recorded by the sampler and used again by the trainer."""

import pytest
import torch
from hidden_logprobs import logprobs_of
from settings import parsed

from aligner.algorithms.rollout.rollout import prompts_batch, rollout_of
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import SamplingParams
from aligner.data.batches import PromptBatch
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.logprobs import output_layer
from aligner.models.gpt.decode.sampling import sample_tokens
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.groups import initialize_parallel

VOCAB, PADDING, HIDDEN, TOKENS, LIMIT = 301, 11, 8, 13, 20


def inputs(seed=0, tokens=TOKENS):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(tokens, HIDDEN, generator=generator, dtype=torch.float64)
    weight = torch.randn(VOCAB + PADDING, HIDDEN, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), weight.requires_grad_(), generator


def recorded_sets(generator, tokens=TOKENS):
    """Sets of 1 to LIMIT tokens, the target first, as int32 [N, LIMIT] with -1 behind."""
    kept = torch.full((tokens, LIMIT), -1, dtype=torch.int32)
    for row in range(tokens):
        count = 1 + row % LIMIT
        kept[row, :count] = torch.randperm(VOCAB, generator=generator)[:count].int()
    return kept, kept[:, 0].long()


@pytest.fixture(params=[4 * 2**20, 13 * 64 * 8], ids=["one_tile", "many_tiles"])
def _tile(request, monkeypatch):
    monkeypatch.setitem(output_layer._TILE_BYTES, "cpu", request.param)


def test_what_is_recorded_is_what_is_drawn_from():
    logits = torch.tensor([[3.0, 1.0, 2.0, -1.0, 0.0], [0.0, 0.0, 9.0, 0.0, 0.0]])
    uniforms = torch.tensor([0.5, 0.5], dtype=torch.float64)
    for sampling, expected in [
        (SamplingParams(top_k=2), [[0, 2, -1], []]),
        (SamplingParams(top_p=0.9), [[0, 1, 2], [2, -1, -1]]),
        (SamplingParams(top_p=0.999), [[-1, -1, -1], [2, -1, -1]]),  # more than three: not recorded
    ]:
        drawn = sample_tokens(logits.clone(), uniforms, sampling, greedy=False, record=3)
        kept = [
            sorted(row, key=lambda token: (token < 0, token)) for row in drawn.kept_ids.tolist()
        ]
        rows = slice(1 if sampling.top_k == 2 else 2)  # equal logits are kept or dropped together
        assert kept[rows] == expected[rows]
    assert sample_tokens(logits, uniforms, SamplingParams(top_k=2), greedy=False).kept_ids is None


@pytest.mark.usefixtures("_tile")
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_values_and_gradients_over_a_recorded_set(temperature):
    hidden, weight, generator = inputs()
    kept, target = recorded_sets(generator)
    g, e = torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)
    options = {"vocab_size": VOCAB, "temperature": temperature, "top_p": 0.8, "kept_ids": kept}
    found = logprobs_of(hidden, weight, target, **options, with_entropy=True)
    logprobs, entropies = [], []
    for row in range(TOKENS):
        ids = kept[row][kept[row] >= 0].long()
        log_softmax = (weight[ids] @ hidden[row] / temperature).log_softmax(0)
        logprobs.append(log_softmax[0])
        entropies.append(-(log_softmax.exp() * log_softmax).sum())
    expected = torch.stack(logprobs), torch.stack(entropies)
    torch.testing.assert_close(found, expected)
    slopes = [
        torch.autograd.grad((g * pair[0] + e * pair[1]).sum(), (hidden, weight))
        for pair in (found, expected)
    ]
    torch.testing.assert_close(*slopes)


@pytest.mark.usefixtures("_tile")
def test_what_was_not_recorded_is_found_again():
    hidden, weight, generator = inputs()
    kept, target = recorded_sets(generator)
    options = {"vocab_size": VOCAB, "top_k": 4, "with_entropy": True}
    own = logprobs_of(hidden, weight, target, **options)
    recorded = logprobs_of(hidden, weight, target, kept_ids=kept, **options)
    kept[5] = -1
    mixed = logprobs_of(hidden, weight, target, kept_ids=kept, **options)
    for found, again, before in zip(mixed, own, recorded, strict=True):
        assert found[5] == again[5]
        assert found[5] != before[5]
        rest = [row for row in range(TOKENS) if row != 5]
        assert torch.equal(found[rest], before[rest])


VOCABULARY = 259  # of the tiny model: what it keeps is nearly all of it


@pytest.fixture(scope="module")
def policy(tiny_nemo):
    ppo = {"record_kept_tokens": VOCABULARY, "sampling_params": {"top_p": 0.8}}
    ppo["length_params"] = {"max_length": 6, "min_length": 4}
    config = parsed({"model.restore_from_path": str(tiny_nemo), "model.ppo": ppo})
    with open_nemo(tiny_nemo) as checkpoint:
        tokenizer = checkpoint.tokenizer
    return Policy(LocalCluster(initialize_parallel()), config.model, tokenizer)


@pytest.mark.integration
def test_a_policy_scores_over_what_it_recorded(policy):
    """The ban of EOS before the fourth token is part of the set; no trainer's filter knows it."""
    ids = torch.tensor([[40, 41, 42], [50, 51, 0]])
    texts = ["a", "b"]
    prompts = PromptBatch(ids, torch.tensor([3, 2]), torch.arange(2), texts, [None, None], {})
    data = prompts_batch(prompts, 0, 4)
    batch = rollout_of(data, policy.generate(data, seed=3).to("cpu"))
    mask = batch["token_mask"].bool()
    kept = batch["kept_ids"]
    assert kept.dtype == torch.int32
    assert kept.shape == (*mask.shape, VOCABULARY)
    recorded = (kept >= 0).any(2)
    assert (recorded & mask).any()
    assert not recorded[~mask].any()
    among = (kept == batch["input_ids"][..., None]).any(2)
    assert among[recorded].all()
    own = {name: column for name, column in batch.items() if name != "kept_ids"}
    for method in (policy.get_logprobs, policy.get_reference_policy_logprobs):
        (name,) = method(batch)
        gap = (method(batch)[name] - batch["generation_logprobs"]).abs()
        assert gap[recorded].max() < 1e-5
        without = (method(BatchedDataDict(own))[name] - batch["generation_logprobs"]).abs()
        assert without[recorded].max() > 1e-3
