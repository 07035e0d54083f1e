"""Processes in every layout generate one process's tokens, on every rank.

A tensor-parallel product is summed in another order, so log-probs agree to rounding.
"""

from functools import cache

import pytest
import torch
from layout_worker import TIED_GPT
from ranks import on_ranks

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import LengthParams, ParallelConfig, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import NonFiniteError
from aligner.examples.tasks.tiny_model import random_weights
from aligner.logprobs.output_layer import output_weight
from aligner.models.gpt import MegatronGPTActorModel, load_from_nemo
from aligner.models.gpt.decode.generator import Generator
from aligner.models.gpt.role.settings import RoleSettings
from aligner.parallel.collectives import gather_objects

ROWS, WIDTH = 8, 10
END_TOKENS = tuple(range(0, 256, 25))
RUNS = {
    "sampled": SamplingParams(top_p=0.95),
    "greedy": SamplingParams(use_greedy=True),
    "stop strings": SamplingParams(
        temperature=2.0, repetition_penalty=1.5, end_strings=("e", "Q", "7")
    ),
}


def generate(model, parallel):
    """The output of every run, and what was raised once logits are not numbers."""
    settings = RoleSettings(parallel=parallel)
    role = load_from_nemo(MegatronGPTActorModel, settings, restore_path=model)
    gpt = role.gpt
    with torch.no_grad():  # the model's own weights are so small that all tokens are alike
        for name, parameter in gpt.named_parameters():
            if "norm" not in name:
                parameter.mul_(8.0)
    numbers = torch.Generator().manual_seed(5)
    prompts = torch.randint(0, 256, (ROWS, WIDTH), generator=numbers)
    lengths = torch.tensor([10, 3, 7, 1, 10, 5, 7, 7])
    prompts[6:] = prompts[2]  # samples of one prompt
    seen = {}
    for name, sampling in RUNS.items():
        generator = Generator(
            gpt,
            role.architecture,
            byte_level_tokenizer(),
            eos_ids=END_TOKENS,
            pad_id=0,
            length=LengthParams(max_length=20),
            sampling=sampling,
            max_batch_size=4,
            record_kept=259,  # the vocabulary; only the run with top-p filters
        )
        seen[name] = generator.sample(prompts, lengths, torch.arange(ROWS), 3)._asdict()
    assert gpt.config.sequence_parallel == parallel.sequence_parallel
    if role.parallel.is_last_stage:
        output_weight(gpt).data.fill_(torch.nan)
    try:
        generator.sample(prompts, lengths, torch.arange(ROWS), 3)
    except NonFiniteError as error:
        seen["raised"] = str(error)
    return seen


def generate_all(models, layouts):
    """By layout, name of the model and run; of every rank."""
    seen = {}
    for layout in layouts:
        *sizes, sequence = map(int, layout.split(","))
        parallel = ParallelConfig(*sizes, sequence_parallel=bool(sequence))
        seen[layout] = {name: generate(path, parallel) for name, path in models.items()}
    return gather_objects(seen)


ONE = "1,1,1,0"
# "tensor,pipeline,context,sequence parallel"; the data-parallel size is what is left.
LAYOUTS = {
    1: [ONE],
    2: [ONE, "2,1,1,0", "2,1,1,1", "1,2,1,0", "1,1,2,0"],
    4: ["2,2,1,1", "1,4,1,0", "1,2,2,0"],
}
FURTHER = pytest.mark.extended  # four processes on a small machine take long
CELLS = [
    pytest.param(ranks, layout, marks=FURTHER if ranks == 4 else ())
    for ranks in (2, 4)
    for layout in LAYOUTS[ranks]
]


@pytest.fixture(scope="module")
def seen(tiny_nemo, tmp_path_factory):
    tied = tmp_path_factory.mktemp("tied") / "tied.nemo"
    save_nemo(tied, random_weights(TIED_GPT, seed=1), TIED_GPT, byte_level_tokenizer().files())
    models = {"tiny": tiny_nemo, "tied": tied}
    return cache(lambda ranks: on_ranks(ranks, generate_all, models, LAYOUTS[ranks]))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("model", ["tiny", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), CELLS)
def test_a_layout_equals_one_process(ranks, layout, model, seen):
    assert len(seen(ranks)) == ranks
    for rank in seen(ranks):
        message = rank[layout][model].pop("raised")  # by the last stage
        assert message.startswith("logits of rows [0, 1, 2, 3] are not finite")
        for run, output in rank[layout][model].items():
            expected = seen(1)[0][ONE][model][run]
            for key in ("tokens", "lengths", "is_end"):
                assert torch.equal(output[key], expected[key]), (run, key)
            assert torch.allclose(output["logprobs"], expected["logprobs"], atol=1e-4)
            if run == "sampled":  # what top-p kept, but for a token at its edge
                kept, wanted = (one["kept_ids"].sort(2).values for one in (output, expected))
                assert (wanted >= 0).any()
                assert (kept == wanted).all(2).float().mean() > 0.98
            else:
                assert output["kept_ids"] is None


@pytest.mark.parametrize("model", ["tiny", "tied"])
def test_responses_differ_in_length_text_and_end_token(model, seen):
    """Else the comparison would show little: sequences leave and enter at different times."""
    for run in RUNS:
        output = seen(1)[0][ONE][model][run]
        made = output["lengths"] - output["prompt_lengths"]
        assert len(set(made.tolist())) > 2
        assert len({tuple(row) for row in output["tokens"].tolist()}) > 5
    output = seen(1)[0][ONE][model]["sampled"]
    last = output["tokens"].gather(1, output["lengths"][:, None] - 1).flatten()
    ended = last[output["is_end"]].tolist()
    assert len(set(ended)) > 1
    assert set(ended) <= set(END_TOKENS)
