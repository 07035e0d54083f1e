"""New weights in vLLM after the policy was trained.

1. Log-probs of fixed sequences move by what the trainer's move by, whichever way weights travel.
2. What was cached under the old weights is forgotten.
3. Twenty refits leave memory as it was.
"""

import psutil
import pytest
import torch
from batches import ppo_batch
from tiny_transformers import tiny_model
from vllm_roles import prompts, roles, run_config, scored

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.losses.policy import PPOPolicyLoss

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(280)]
TINY_BUFFER = 0.05  # MiB: the weights take a dozen groups


def fixed_sequences():
    batch = ppo_batch([20, 9, 14, 17, 5, 12, 20, 8], [1] * 8)
    batch["input_ids"] = 1 + batch["input_ids"] % 249
    del batch["prev_logprobs"]  # the old policy is the one that is trained
    return BatchedDataDict(batch)


def train(policy):
    """One real update towards some of the fixed sequences and away from others."""
    batch = fixed_sequences()
    batch["generation_logprobs"] = policy.get_logprobs(batch)["logprobs"]
    policy.prepare_for_training()
    policy.train(batch, PPOPolicyLoss())
    policy.finish_training()


def trainers(policy):
    policy.prepare_for_lp_inference()
    return policy.get_logprobs(fixed_sequences())["logprobs"]


def engines(generation):
    mask = fixed_sequences()["token_mask"]
    return generation.get_logprobs(fixed_sequences())["logprobs"] * mask


def check_that_they_move(policy, generation):
    """Train once and hand over; return the engine's responses to `prompts` thereafter."""
    generation.prepare_for_generation()
    ours, theirs = trainers(policy), engines(generation)
    assert (ours - theirs).abs().max() < 1e-4
    train(policy)
    assert (engines(generation) - theirs).abs().max() == 0  # nothing moves by itself
    generation.weights_changed()
    generation.prepare_for_generation()
    moved, theirs_moved = trainers(policy) - ours, engines(generation) - theirs
    assert moved.abs().max() > 0.1
    assert (moved - theirs_moved).abs().max() < 1e-4
    output = generation.generate(prompts(), seed=2)
    expected = policy.get_logprobs(scored(output))["logprobs"]
    assert (expected - output["logprobs"]).abs().max() < 1e-4
    return output


@pytest.mark.parametrize(
    ("way", "backend", "layout", "engine_count", "devices"),
    [
        ("colocated", "megatron", 1, 1, 1),
        ("separate", "megatron", 2, 2, 1),
        ("colocated", "dtensor", 2, 1, 1),
        ("separate", "dtensor", 1, 1, 1),
        ("colocated", "megatron", 2, 1, 2),
        ("separate", "dtensor", 1, 1, 2),
    ],
    ids=lambda value: f"x{value}" if isinstance(value, int) else value,
)
def test_logprobs_move_as_the_trainers(ray, wide_nemo, way, backend, layout, engine_count, devices):
    config = run_config(
        wide_nemo,
        vllm={
            "refit": way,
            "refit_buffer_mb": TINY_BUFFER,
            "engines": engine_count,
            "tensor_parallel_size": devices,
        },
        model={"tensor_model_parallel_size": layout},
        trainer={"devices": layout},
    )
    with roles(config, backend=backend, workers=layout) as (policy, generation):
        groups = policy.prepare_weights_for_ipc(TINY_BUFFER / 1024)
        assert len(groups) > 5
        output = check_that_they_move(policy, generation)
        generation.generate_in_background(prompts(), seed=3).abandon()
        pending = generation.generate_in_background(prompts(), seed=2)
        assert torch.equal(pending.result()["output_ids"], output["output_ids"])


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [("gemma2", {"head_dim": 32}), ("mixtral", {"head_dim": 32}), ("olmo2", {"hidden_size": 128})],
)
def test_models_that_only_transformers_builds(ray, model_type, sizes, tmp_path):
    """With soft caps, experts, and norms over all heads."""
    tokenizer = byte_level_tokenizer()
    model = tiny_model(model_type, vocab_size=tokenizer.vocab_size, **sizes)
    model.save_pretrained(tmp_path)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    config = run_config(tmp_path, policy={"backend": "dtensor"})
    with roles(config, backend="dtensor") as (policy, generation):
        check_that_they_move(policy, generation)


def long_prompts():
    """Four prompts longer than a block of vLLM's cache of keys and values (128 tokens on CPU)."""
    ids = (torch.arange(200) * 7 + torch.arange(4)[:, None]) % 90 + 32
    return BatchedDataDict(
        {"input_ids": ids, "input_lengths": torch.full((4,), 200), "sample_ids": torch.arange(4)}
    )


def test_caches_and_memory(ray, wide_nemo):
    ppo = {"length_params": {"max_length": 8}}
    with roles(run_config(wide_nemo, ppo=ppo)) as (policy, generation):
        generation.prepare_for_generation()
        before = generation.generate(long_prompts(), seed=1)  # fills the cache of prompts
        train(policy)
        generation.weights_changed()
        generation.prepare_for_generation()
        after = generation.generate(long_prompts(), seed=1)
        expected = policy.get_logprobs(scored(after))["logprobs"]
        assert (expected - after["logprobs"]).abs().max() < 1e-4
        assert (before["logprobs"][:, 200] - after["logprobs"][:, 200]).abs().max() > 0.1

        memory, engine = [], psutil.Process(generation.worker_group._identities[0].pid)
        for _ in range(20):
            generation.weights_changed()
            generation.prepare_for_generation()
            generation.generate(long_prompts(), seed=1)
            memory.append(engine.memory_info().rss)
        assert memory[-1] < 1.02 * memory[2], [size / 2**20 for size in memory]
