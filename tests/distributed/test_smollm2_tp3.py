"""SmolLM2 over three processes, tensor parallel, is SmolLM2 in one.

Nine heads, three groups and 49,152 tokens divide by 3 and by nothing that other tests use. Run as a
script, this file is one of the processes:

    torchrun --nproc-per-node N test_smollm2_tp3.py MODEL OUTPUT TENSOR
"""

import sys
from pathlib import Path

import pytest
import torch
from ranks import run_ranks

from aligner.config import LengthParams, ParallelConfig, SamplingParams
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.groups import shutdown_parallel

MODEL = Path(__file__).parents[2] / "models" / "smollm2-135m-instruct.nemo"
TEXTS = (
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on.",
    "def area(radius):\n    return 3.14159 * radius**2\n",
    "2+3=5\n7+4=11\n6+3=",
    "In 1969 two people walked on the Moon; a third waited in orbit above them.",
)


def encode(tokenizer: Tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens [B, S], right-padded, and their numbers [B]."""
    rows = [tokenizer.encode(text) for text in TEXTS]
    tokens = torch.full((len(rows), max(map(len, rows))), tokenizer.pad_id)
    for row, ids in zip(tokens, rows, strict=True):
        row[: len(ids)] = torch.tensor(ids)
    return tokens, torch.tensor([len(ids) for ids in rows])


def worker(model: str, output: str, tensor: int) -> None:
    """Log-probs and greedy responses of this many tensor-parallel ranks."""
    settings = RoleSettings(parallel=ParallelConfig(tensor=tensor))
    role = load_from_nemo(MegatronGPTActorModel, settings, restore_path=model)
    role.configure_generation(LengthParams(max_length=8), SamplingParams(use_greedy=True), 4)
    tokens, lengths = encode(role.tokenizer)
    position = torch.arange(tokens.shape[1])
    batch = {
        "input_ids": tokens,
        "input_lengths": lengths,
        "token_mask": ((position > 0) & (position < lengths[:, None])).float(),
    }
    role.prepare_for_inference()
    seen = {"logprobs": role.get_logprobs(batch), **role.infer({"text": tokens, "length": lengths})}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


def launch(processes: int, output: Path) -> dict[str, torch.Tensor]:
    """What so many processes saw."""
    run_ranks(Path(__file__), processes, [MODEL, output, str(processes)], timeout_s=600)
    return torch.load(output, weights_only=True)


@pytest.mark.extended
@pytest.mark.smollm2
@pytest.mark.timeout(1200)
def test_tensor_parallel_3_equals_one_process(tmp_path):
    if not MODEL.exists():
        pytest.skip("needs models/smollm2-135m-instruct.nemo; make it with `make` and that name")
    one, three = launch(1, tmp_path / "1.pt"), launch(3, tmp_path / "3.pt")
    assert one["logprobs"].min() < -1  # there was something to compare
    difference = (one["logprobs"] - three["logprobs"]).abs().max()
    assert difference / one["logprobs"].abs().max() < 1e-5
    assert torch.equal(one["response_tokens"], three["response_tokens"])


if __name__ == "__main__":
    torch.set_num_threads(1)
    worker(sys.argv[1], sys.argv[2], int(sys.argv[3]))
