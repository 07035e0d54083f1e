"""One rank of `test_generation_layouts`: generates in each layout; rank 0 writes what came out.

    torchrun --nproc-per-node N generation_worker.py OUTPUT MODEL,MODEL LAYOUT [LAYOUT ...]

A layout is ``tensor,pipeline,context,sequence_parallel``; what is left of the world is data
parallel. What comes out of a layout: by model and kind of run the output, and what was raised by a
model whose logits are not numbers.
"""

import sys

import torch

torch.set_num_threads(1)

from aligner.checkpoint.gpt_weights import load_weights
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import LengthParams, ParallelConfig, SamplingParams
from aligner.errors import NonFiniteError
from aligner.logprobs.output_layer import output_weight
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.megatron.build import build_gpt
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import gather_objects, is_rank_zero
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

ROWS, WIDTH = 8, 10
END_TOKENS = tuple(range(0, 256, 25))
RUNS = {
    "sampled": SamplingParams(top_p=0.95),
    "greedy": SamplingParams(use_greedy=True),
    "stop strings": SamplingParams(
        temperature=2.0, repetition_penalty=1.5, end_strings=("e", "Q", "7")
    ),
}


def generate(model: str, parallel: ParallelConfig) -> dict[str, object]:
    """All runs of one model in one layout."""
    state = initialize_parallel(parallel)
    with open_nemo(model) as nemo:
        architecture, tokenizer = nemo.architecture, nemo.tokenizer
        gpt = build_gpt(
            architecture,
            RoleSettings(parallel=parallel),
            initialize=False,
            pre_process=state.is_first_stage,
            post_process=state.is_last_stage,
        )
        load_weights(
            gpt, nemo.weights, architecture, tp_rank=state.tp_rank, tp_size=parallel.tensor
        )
    with torch.no_grad():  # the model's own weights are so small that all tokens are alike
        for name, parameter in gpt.named_parameters():
            if "norm" not in name:
                parameter.mul_(8.0)
    numbers = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 256, (ROWS, WIDTH), generator=numbers)
    lengths = torch.tensor([10, 3, 7, 1, 10, 5, 7, 7])
    prompts[6:] = prompts[2]  # samples of one prompt
    seen: dict[str, object] = {}
    for name, sampling in RUNS.items():
        generator = Generator(
            gpt,
            architecture,
            tokenizer,
            eos_ids=END_TOKENS,
            pad_id=0,
            length=LengthParams(max_length=20),
            sampling=sampling,
            max_batch_size=4,
            record_kept=259,  # the vocabulary; only the run with top-p filters
        )
        seen[name] = generator.sample(prompts, lengths, torch.arange(ROWS), 3)._asdict()
    assert gpt.config.sequence_parallel == parallel.sequence_parallel
    if state.is_last_stage:
        output_weight(gpt).data.fill_(torch.nan)
    try:
        generator.sample(prompts, lengths, torch.arange(ROWS), 3)
    except NonFiniteError as error:
        seen["raised"] = str(error)
    return seen


def generate_all(models: list[str], layout: str) -> dict[str, object]:
    """Every model in one layout."""
    tensor, pipeline, context, sequence = (int(part) for part in layout.split(","))
    parallel = ParallelConfig(
        tensor=tensor, pipeline=pipeline, context=context, sequence_parallel=bool(sequence)
    )
    return {model: generate(model, parallel) for model in models}


def main() -> None:
    """Every layout, then the file."""
    output, models, *layouts = sys.argv[1:]
    seen = {layout: generate_all(models.split(","), layout) for layout in layouts}
    everyone = gather_objects(seen)
    if is_rank_zero():
        torch.save(everyone, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
