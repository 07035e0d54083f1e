"""vLLM as the sampling engine of a policy, with the policy's own weights.

1. Its log-probs are the trainer's, and what it draws is the policy's own distribution's.
2. A response depends on its seed, sample and prompt, not on the batch.
3. Stop strings, the end token and lengths mean what they mean in our own engine.
"""

import pytest
import torch
from vllm_roles import prompts, roles, run_config, scored

from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.distributed.batched_data_dict import BatchedDataDict

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]


@pytest.fixture(scope="module")
def pair(own_ray, wide_nemo):
    ppo = {"length_params": {"max_length": 12}, "sampling_params": {"end_strings": ["q"]}}
    with roles(run_config(wide_nemo, ppo=ppo)) as (policy, generation):
        generation.prepare_for_generation()
        yield policy, generation


def test_logprobs_are_the_trainers(pair):
    policy, generation = pair
    output = generation.generate(prompts(), seed=5)
    columns = scored(output)
    expected = policy.get_logprobs(columns)["logprobs"]
    gap = (expected - output["logprobs"]).abs()
    assert gap.sum() / columns["token_mask"].sum() < 1e-5
    assert gap.max() < 1e-4
    assert output["logprobs"][columns["token_mask"] == 0].abs().max() == 0


def test_a_response_does_not_depend_on_its_batch(pair):
    _, generation = pair
    whole = generation.generate(prompts(), seed=5)
    again = generation.generate(prompts(), seed=5)
    for key in whole:
        assert torch.equal(whole[key], again[key])
    few = generation.generate(prompts().slice(4, 7), seed=5)
    width = few["output_ids"].shape[1]
    assert torch.equal(few["output_ids"], whole["output_ids"][4:7, :width])
    other = generation.generate(prompts(), seed=6)
    assert other["output_ids"].shape != whole["output_ids"].shape or not torch.equal(
        other["output_ids"], whole["output_ids"]
    )


def agreed(engines, **options):
    """What both engines say to `prompts`, the same tokens."""
    ours, theirs = (engine.generate(prompts(), **options) for engine in engines)
    for key in ("output_ids", "generation_lengths", "unpadded_sequence_lengths", "is_end"):
        assert torch.equal(ours[key], theirs[key]), key
    return ours, theirs


def test_greedy_is_our_own_engines_greedy(pair):
    ours, theirs = agreed(pair, greedy=True)
    assert torch.allclose(ours["logprobs"], theirs["logprobs"], atol=1e-4)


def test_lengths_and_sampling_of_one_call(pair):
    """What a validation or an evaluation asks for, and nothing of it stays behind."""
    before = pair[1].generate(prompts(), seed=5)
    sampling_options = SamplingOptions(
        LengthParams(max_length=5), SamplingParams(use_greedy=True, end_strings=("a", "e", "1"))
    )
    _, theirs = agreed(pair, seed=5, sampling_options=sampling_options)
    assert int(theirs["generation_lengths"].max()) <= 5
    after = pair[1].generate(prompts(), seed=5)
    assert torch.equal(before["output_ids"], after["output_ids"])


def test_stop_strings_end_a_response(pair):
    policy, generation = pair
    output = generation.generate(prompts(64), seed=1)
    ends = output["unpadded_sequence_lengths"]
    last = output["output_ids"].gather(1, ends[:, None] - 1).squeeze(1)
    stopped = output["is_end"]
    assert 0 < int(stopped.sum()) < 64
    eos, stop = policy.tokenizer.eos_id, policy.tokenizer.encode("q")[-1]
    assert set(last[stopped].tolist()) <= {eos, stop}
    assert stop in last[stopped].tolist()
    assert (output["generation_lengths"][~stopped] == 12).all()


def test_ends_and_min_length_are_our_own_engines(own_ray, wide_nemo):
    """Most letters end a response, but none before the third token: three are the shortest."""
    ends = [chr(code) for code in range(33, 127)]
    ppo = {
        "length_params": {"max_length": 12, "min_length": 3},
        "sampling_params": {"end_tokens": ends},
    }
    with roles(run_config(wide_nemo, ppo=ppo)) as (policy, generation):
        generation.prepare_for_generation()
        output = generation.generate(prompts(64), seed=1)
        lengths, is_end = output["generation_lengths"], output["is_end"]
        assert int(lengths.min()) == 3
        assert (lengths[~is_end] == 12).all()
        last = output["output_ids"].gather(1, output["unpadded_sequence_lengths"][:, None] - 1)
        known = {policy.tokenizer.eos_id, *map(ord, ends)}
        assert [int(token) in known for token in last] == is_end.tolist()
        assert len(set(last[is_end].flatten().tolist())) > 2
        agreed((policy, generation), greedy=True)


def test_it_draws_from_the_policys_distribution(pair):
    """First tokens of one prompt against the trainer's probabilities: a chi-square test."""
    policy, generation = pair
    many = prompts(1).repeat_interleave(512)
    many["sample_ids"] = torch.arange(512)
    output = generation.generate(many, seed=9)
    start = int(many["input_lengths"][0])
    drawn = output["output_ids"][:, start]
    tokens = torch.arange(256)
    ids = torch.cat([many["input_ids"][:1, :start].expand(256, -1), tokens[:, None]], dim=1)
    columns = BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": torch.full((256,), start + 1),
            "token_mask": torch.ones(ids.shape),
        }
    )
    probability = policy.get_logprobs(columns)["logprobs"][:, start].double().exp()
    likely = probability * 512 > 5
    counts = torch.bincount(drawn, minlength=259)[:256].double()
    expected = torch.cat([probability[likely], (1 - probability[likely].sum())[None]]) * 512
    seen = torch.cat([counts[likely], (512 - counts[likely].sum())[None]])
    chi_square = ((seen - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5
