"""What top-k and top-p kept, recorded by the sampler and used again by the trainer."""

import pytest
import torch
from settings import parsed

from aligner.algorithms.rollout.rollout import prompts_batch, rollout_of
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import SamplingParams
from aligner.data.batches import PromptBatch
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.models.gpt.decode.sampling import sample_tokens
from aligner.models.policy.lm_policy import Policy
from aligner.parallel.groups import initialize_parallel


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


VOCABULARY = 259  # of the tiny model: what it keeps is nearly all of it


@pytest.mark.integration
def test_a_policy_scores_over_what_it_recorded(tiny_nemo):
    """The ban of EOS before the fourth token is part of the set; no trainer's filter knows it."""
    ppo = {"record_kept_tokens": VOCABULARY, "sampling_params": {"top_p": 0.8}}
    ppo["length_params"] = {"max_length": 6, "min_length": 4}
    config = parsed({"model.restore_from_path": str(tiny_nemo), "model.ppo": ppo})
    with open_nemo(tiny_nemo) as checkpoint:
        tokenizer = checkpoint.tokenizer
    policy = Policy(LocalCluster(initialize_parallel()), config.model, tokenizer)
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
