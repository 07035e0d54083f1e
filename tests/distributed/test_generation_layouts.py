"""Processes in every layout generate one process's tokens, on every rank.

A tensor-parallel product is summed in another order, so log-probs agree to rounding.
"""

import dataclasses
from functools import cache
from pathlib import Path

import pytest
import torch
from generation_worker import END_TOKENS, RUNS, generate_all
from ranks import run_ranks

from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE, random_weights

WORKER = Path(__file__).with_name("generation_worker.py")
ONE = "1,1,1,0"
# "tensor,pipeline,context,sequence parallel"; the data-parallel size is what is left.
LAYOUTS = {
    2: {
        "data 2": "1,1,1,0",
        "tensor 2": "2,1,1,0",
        "tensor 2 + sequence": "2,1,1,1",
        "pipe 2": "1,2,1,0",
        "context 2": "1,1,2,0",
    },
    4: {"tensor 2, pipe 2": "2,2,1,1", "pipe 4": "1,4,1,0", "pipe 2, context 2": "1,2,2,0"},
}
FURTHER = pytest.mark.extended  # four processes on a small machine take long
CELLS = [
    pytest.param(ranks, name, id=name, marks=FURTHER if ranks == 4 else ())
    for ranks, layouts in LAYOUTS.items()
    for name in layouts
]
# Learned positions, biases, and one weight for embedding and output.
TIED = dataclasses.replace(
    TINY_ARCHITECTURE,
    num_query_groups=8,
    activation="gelu",
    normalization="layernorm",
    position_embedding="learned_absolute",
    bias_linear=True,
    bias_qkv=True,
    tie_embeddings=True,
    family="gpt2",
)


def launch(processes, models, output, layouts):
    run_ranks(WORKER, processes, [output, ",".join(models), *layouts], timeout_s=290)
    return torch.load(output, weights_only=True)


@pytest.fixture(scope="module")
def models(tiny_nemo, tmp_path_factory):
    tied = tmp_path_factory.mktemp("tied") / "tied.nemo"
    weights = random_weights(TIED, seed=1)
    save_nemo(tied, weights, TIED, byte_level_tokenizer().files())
    return {"tiny": str(tiny_nemo), "tied": str(tied)}


@pytest.fixture(scope="module")
def seen(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("generation")
    paths = list(models.values())

    @cache
    def of(ranks):
        return launch(ranks, paths, folder / f"{ranks}.pt", LAYOUTS[ranks].values())

    return generate_all(paths, ONE), of


@pytest.mark.timeout(600)
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("model", ["tiny", "tied"])
@pytest.mark.parametrize(("ranks", "layout"), CELLS)
def test_a_layout_equals_one_process(ranks, layout, model, run, models, seen):
    one, by_ranks = seen
    expected = one[models[model]][run]
    assert len(by_ranks(ranks)) == ranks
    for rank in by_ranks(ranks):
        output = rank[LAYOUTS[ranks][layout]][models[model]][run]
        for key in ("tokens", "lengths", "is_end"):
            assert torch.equal(output[key], expected[key]), key
        assert torch.allclose(output["logprobs"], expected["logprobs"], atol=1e-4)
        if run == "sampled":  # what top-p kept, but for a token at its edge that rounding moves
            kept, wanted = (one["kept_ids"].sort(2).values for one in (output, expected))
            assert (wanted >= 0).any()
            assert (kept == wanted).all(2).float().mean() > 0.98
        else:
            assert output["kept_ids"] is None


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("model", ["tiny", "tied"])
def test_responses_differ_in_length_and_text(model, run, models, seen):
    """Else the comparison would show little: sequences leave and enter at different times."""
    output = seen[0][models[model]][run]
    made = output["lengths"] - output["prompt_lengths"]
    assert len(set(made.tolist())) > 2
    assert len({tuple(row) for row in output["tokens"].tolist()}) > 5


@pytest.mark.parametrize("model", ["tiny", "tied"])
def test_more_than_one_end_token_ends_responses(model, models, seen):
    """So every layout, pipeline stages among them, is held to more than one (`END_TOKENS`)."""
    output = seen[0][models[model]]["sampled"]
    last = output["tokens"].gather(1, output["lengths"][:, None] - 1).flatten()
    ended = last[output["is_end"]].tolist()
    assert len(set(ended)) > 1
    assert set(ended) <= set(END_TOKENS)


@pytest.mark.parametrize(("ranks", "layout"), CELLS)
def test_what_the_last_stage_raises_reaches_every_rank(ranks, layout, models, seen):
    _, by_ranks = seen
    for rank in by_ranks(ranks):
        for model in models.values():
            message = rank[LAYOUTS[ranks][layout]][model]["raised"]
            assert message.startswith("logits of rows [0, 1, 2, 3] are not finite")
