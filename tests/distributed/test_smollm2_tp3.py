"""SmolLM2 over three processes, tensor parallel, is SmolLM2 in one.

Nine heads, three groups and 49,152 tokens divide by 3 and by nothing that other tests use.
"""

from pathlib import Path

import pytest
import torch
from ranks import on_ranks

from aligner.config import LengthParams, ParallelConfig, SamplingParams
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct.nemo"
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def area(radius):\n    return 3.14159 * radius**2\n",
    "2+3=5\n7+4=11\n6+3=",
    "In 1969 two people walked on the Moon; a third waited in orbit above them.",
)


def encode(tokenizer):
    """Tokens [B, S], right-padded, and their numbers [B]."""
    rows = [tokenizer.encode(text) for text in TEXTS]
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_id)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return tokens, torch.tensor([len(ids) for ids in rows])


def answered(tensor):
    """Log-probs and greedy responses of this many tensor-parallel ranks."""
    settings = RoleSettings(parallel=ParallelConfig(tensor=tensor))
    role = load_from_nemo(MegatronGPTActorModel, settings, restore_path=MODEL)
    role.configure_generation(LengthParams(max_length=8), SamplingParams(use_greedy=True), 4)
    tokens, lengths = encode(role.tokenizer)
    position = torch.arange(tokens.shape[1])
    batch = {
        "input_ids": tokens,
        "input_lengths": lengths,
        "token_mask": ((position > 0) & (position < lengths[:, None])).float(),
    }
    role.prepare_for_inference()
    return {"logprobs": role.get_logprobs(batch), **role.infer({"text": tokens, "length": lengths})}


@pytest.mark.extended
@pytest.mark.smollm2
@pytest.mark.timeout(1200)
def test_tensor_parallel_3_equals_one_process():
    if not MODEL.exists():
        pytest.skip("needs models/smollm2-135m-instruct.nemo; make it with `make` and that name")
    one, three = (on_ranks(ranks, answered, ranks, timeout_s=600) for ranks in (1, 3))
    assert one["logprobs"].min() < -1  # there was something to compare
    difference = (one["logprobs"] - three["logprobs"]).abs().max()
    assert difference / one["logprobs"].abs().max() < 1e-5
    assert torch.equal(one["response_tokens"], three["response_tokens"])
