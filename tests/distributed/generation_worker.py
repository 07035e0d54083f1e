"""One rank of `test_generation_layouts`: generates in each layout; rank 0 writes what came out.

    torchrun --nproc-per-node N generation_worker.py MODEL OUTPUT LAYOUT [LAYOUT ...]

A layout is ``tensor,sequence_parallel``; what is left of the world is data parallel.
"""

import sys

import torch

torch.set_num_threads(1)

from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.nemo import open_nemo
from aligner.config import LengthParams, ParallelConfig, SamplingParams
from aligner.distributed.parallel import initialize_parallel, shutdown_parallel
from aligner.models.gpt.build import build_gpt
from aligner.models.gpt.generation import Generator

ROWS, WIDTH = 6, 10


def generate(model: str, parallel: ParallelConfig) -> dict[str, torch.Tensor]:
    state = initialize_parallel(parallel)
    with open_nemo(model) as nemo:
        gpt = build_gpt(nemo.architecture, parallel=parallel, initialize=False)
        load_weights(
            gpt,
            nemo.weights,
            nemo.architecture,
            tp_rank=state.tp_rank,
            tp_size=parallel.tensor,
        )
        architecture = nemo.architecture
    with torch.no_grad():  # the tiny model's own weights are so small that all tokens are alike
        for name, parameter in gpt.named_parameters():
            if "norm" not in name:
                parameter.mul_(8.0)
    generator = Generator(
        gpt,
        architecture,
        eos_ids=tuple(range(0, 256, 25)),
        pad_id=0,
        length=LengthParams(max_length=20),
        sampling=SamplingParams(top_p=0.95),
        max_batch_size=4,
        tp_group=state.tp_group,
    )
    numbers = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 256, (ROWS, WIDTH), generator=numbers)
    lengths = torch.tensor([10, 3, 7, 1, 10, 5])
    output = generator.generate(prompts, lengths, torch.arange(ROWS), 3)
    assert gpt.config.sequence_parallel == parallel.sequence_parallel
    return output._asdict()


def main() -> None:
    model, output, *layouts = sys.argv[1:]
    seen = {}
    for layout in layouts:
        tensor, sequence = (int(part) for part in layout.split(","))
        seen[layout] = generate(
            model, ParallelConfig(tensor=tensor, sequence_parallel=bool(sequence))
        )
    everyone = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(everyone, seen)
    if torch.distributed.get_rank() == 0:
        torch.save(everyone, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
