"""A real model: vLLM's log-probs are the trainer's to 1e-3 on average, in float32."""

import pytest
import torch
from vllm_roles import ROOT, roles, run_config, scored

from aligner.distributed.batched_data_dict import BatchedDataDict

MODEL = ROOT / "models" / "smollm2-135m-instruct.nemo"
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not MODEL.exists(), reason="make models/smollm2-135m-instruct.nemo"),
]


def test_logprobs_are_the_trainers(own_ray):
    config = run_config(
        MODEL,
        ppo={"length_params": {"max_length": 8}, "sampling_params": {"end_strings": ["\n"]}},
        vllm={"kv_cache_mb": 512, "threads": 2},
    )
    with roles(config) as (policy, generation):
        texts = ["2 + 3 = 5\n6 + 1 =", "The capital of France is", "1, 2, 3,", "Once upon a time"]
        ids = [policy.tokenizer.encode(text) for text in texts]
        width = max(map(len, ids))
        data = BatchedDataDict(
            {
                "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in ids]),
                "input_lengths": torch.tensor([len(row) for row in ids]),
                "sample_ids": torch.arange(len(ids)),
            }
        )
        generation.prepare_for_generation()
        output = generation.generate(data, seed=3)
        columns = scored(output)
        gap = (policy.get_logprobs(columns)["logprobs"] - output["logprobs"]).abs()
        assert gap.sum() / columns["token_mask"].sum() < 1e-3
        assert gap.max() < 1e-2
        ours, theirs = (engine.generate(data, greedy=True) for engine in (policy, generation))
        assert torch.equal(ours["output_ids"], theirs["output_ids"])
        assert torch.equal(ours["is_end"], theirs["is_end"])
