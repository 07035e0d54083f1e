"""Steps that are read one late, in the shapes of CUDA graphs: the same tokens, bit for bit.

On a CPU, which is told to run ahead as a GPU would; a "graph" calls the function it was made of.
"""

import pytest
import torch
from test_generation import (
    EOS,
    LLAMA,
    TOKENIZER,
    VARIANTS,
    make_generator,
    make_model,
    make_prompts,
    run,
)

from aligner.config import LengthParams
from aligner.errors import NonFiniteError
from aligner.models.gpt.decode import generator as generation
from aligner.models.gpt.decode import sampling, scheduler
from aligner.models.gpt.decode.scheduler import rows_of_graph, span_of_graph

OPTIONS = {
    "greedy": {"greedy": True},
    "sampled": {"temperature": 1.3},
    "top-p": {"temperature": 2.0, "top_p": 0.9},
    "top-k, penalty": {"top_k": 20, "repetition_penalty": 1.4, "slots": 9},
    "min_length": {"length": LengthParams(max_length=24, min_length=6), "temperature": 2.0},
    "one token": {"length": LengthParams(max_length=1)},
    "stop strings": {"tokenizer": TOKENIZER, "end_strings": ("e", "Q", "7"), "temperature": 3.0},
    "many ends": {"eos_ids": tuple(range(0, 256, 5)), "slots": 3},
    "one slot": {"eos_ids": tuple(range(0, 256, 9)), "slots": 1},
}


@pytest.fixture
def ahead(monkeypatch):
    """Lets generation run ahead; the list has the shapes of the steps that were captured."""
    captured = []

    def capture(function, memory):
        captured.append(function)
        return function

    def run_ahead():
        monkeypatch.setattr(generation, "_runs_ahead", lambda device: True)
        monkeypatch.setattr(scheduler.accelerator, "capture", capture)
        return captured

    return run_ahead


@pytest.fixture(scope="module")
def llama():
    return make_model(LLAMA)


def assert_same(found, expected):
    for name, value in expected._asdict().items():
        other = getattr(found, name)
        assert (other is None) == (value is None), name
        assert value is None or torch.equal(other, value), name


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_tokens(llama, ahead, name):
    prompts, lengths = make_prompts(batch=12)
    prompts[7:10] = prompts[3]
    lengths[7:10] = lengths[3]
    expected = run(llama, prompts, lengths, **OPTIONS[name])
    captured = ahead()
    assert_same(run(llama, prompts, lengths, **OPTIONS[name]), expected)
    assert bool(captured) == (name != "one token")


@pytest.mark.parametrize("variant", ["gpt2", "mistral"])
def test_other_models(ahead, variant):
    model = make_model(VARIANTS[variant])
    expected = run(model, *make_prompts(), temperature=1.3)
    assert ahead() == []
    assert_same(run(model, *make_prompts(), temperature=1.3), expected)


@pytest.mark.parametrize("nucleus", [4, 200])
def test_a_nucleus_wider_than_looked_at_is_drawn_again(llama, ahead, monkeypatch, nucleus):
    monkeypatch.setattr(sampling, "_NUCLEUS", nucleus)
    options = {"temperature": 2.0, "top_p": 0.9}
    expected = run(llama, *make_prompts(), **options)
    captured = ahead()
    assert_same(run(llama, *make_prompts(), **options), expected)
    assert bool(captured) == (nucleus == 200)


def test_a_listener_hears_each_token_once_and_none_that_is_taken_back(llama, ahead):
    heard = {}

    def listen(sample, token, logprob):
        heard.setdefault(sample, []).append((token, logprob))

    ahead()
    prompts, lengths = make_prompts()
    generator = make_generator(llama, eos_ids=OPTIONS["many ends"]["eos_ids"])
    found = generator.sample(prompts, lengths, torch.arange(len(prompts)), 5, listener=listen)
    for row, tokens in enumerate(found.tokens):
        response = tokens[found.prompt_lengths[row] : found.lengths[row]]
        logprobs = found.logprobs[row][found.prompt_lengths[row] : found.lengths[row]]
        assert heard[row] == list(zip(response.tolist(), logprobs.tolist(), strict=True))
        assert (tokens[found.lengths[row] :] == EOS).all()


def test_logits_that_are_no_numbers_are_refused(ahead):
    gpt, architecture = make_model(LLAMA)
    gpt.output_layer.weight.data.fill_(torch.nan)
    ahead()
    with pytest.raises(NonFiniteError, match=r"rows \[0, 1, 2, 3\]"):
        run((gpt, architecture), *make_prompts())


def test_shapes_of_graphs_are_few():
    assert [rows_of_graph(n, 60) for n in (1, 2, 3, 5, 8, 9, 17, 58)] == [1, 2, 4, 8, 8, 16, 24, 60]
    spans = [span_of_graph(n, 5000) for n in range(1, 5001)]
    assert all(span >= n and (span % 16 == 0 or span == 5000) for n, span in enumerate(spans, 1))
    assert all(span < 1.2 * n + 64 for n, span in enumerate(spans, 1))
    assert len(set(spans)) < 40
