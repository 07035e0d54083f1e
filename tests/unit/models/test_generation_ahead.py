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
from aligner.models.gpt.decode import responses, sampling
from aligner.models.gpt.decode.responses import rows_of_graph, span_of_graph

pytestmark = pytest.mark.integration

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
        monkeypatch.setattr(responses.accelerator, "capture", capture)
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


def check_same(model, ahead, prompts, **options):
    expected = run(model, *prompts, **options)
    captured = ahead()
    assert_same(run(model, *prompts, **options), expected)
    return bool(captured)


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_tokens(llama, ahead, name):
    prompts, lengths = make_prompts(batch=12)
    prompts[7:10], lengths[7:10] = prompts[3], lengths[3]
    assert check_same(llama, ahead, (prompts, lengths), **OPTIONS[name]) == (name != "one token")


@pytest.mark.parametrize("variant", ["gpt2", "mistral"])
def test_other_models(ahead, variant):
    check_same(make_model(VARIANTS[variant]), ahead, make_prompts(), temperature=1.3)


@pytest.mark.parametrize("nucleus", [4, 200])
def test_a_nucleus_wider_than_looked_at_is_drawn_again(llama, ahead, monkeypatch, nucleus):
    monkeypatch.setattr(sampling, "_NUCLEUS", nucleus)
    options = {"temperature": 2.0, "top_p": 0.9}
    assert check_same(llama, ahead, make_prompts(), **options) == (nucleus == 200)


def check_listener(generator):
    """It hears each token once, and none that is taken back."""
    heard = {}

    def listen(sample, token, logprob):
        heard.setdefault(sample, []).append((token, logprob))

    prompts, lengths = make_prompts()
    found = generator.sample(prompts, lengths, torch.arange(len(prompts)), 5, listener=listen)
    for row, tokens in enumerate(found.tokens):
        response = slice(found.prompt_lengths[row], found.lengths[row])
        pairs = zip(tokens[response].tolist(), found.logprobs[row, response].tolist(), strict=True)
        assert heard[row] == list(pairs)
        assert (tokens[found.lengths[row] :] == EOS).all()


def test_a_listener_hears_each_token_once_and_none_that_is_taken_back(llama, ahead):
    ahead()
    check_listener(make_generator(llama, eos_ids=OPTIONS["many ends"]["eos_ids"]))


def test_a_listener_hears_a_token_once_where_a_rollout_begins_again(llama, ahead, monkeypatch):
    """The fourth step finds its nucleus wider than it looked at."""
    plain, steps = sampling._keep_threshold, []

    def threshold(scores, top_k, top_p, waits):
        limit, _ = plain(scores, top_k, top_p, waits)
        steps.append(waits)
        return limit, None if waits else torch.tensor(len(steps) == 4)

    monkeypatch.setattr(sampling, "_keep_threshold", threshold)
    ahead()
    check_listener(make_generator(llama, temperature=1.0, top_p=0.5))
    assert steps[:6] == [False, False, False, False, False, True]


def test_logits_that_are_no_numbers_are_refused(ahead):
    gpt, architecture = make_model(LLAMA)
    gpt.output_layer.weight.data.fill_(torch.nan)
    ahead()
    with pytest.raises(NonFiniteError, match=r"rows \[0, 1, 2, 3\]"):
        run((gpt, architecture), *make_prompts())


def test_shapes_of_graphs_are_few():
    found = [rows_of_graph(n, 200) for n in (1, 2, 3, 5, 9, 17, 58, 65, 129, 199)]
    assert found == [1, 2, 4, 8, 16, 32, 64, 128, 192, 200]
    assert rows_of_graph(58, 60) == 60
    spans = [span_of_graph(n, 5000) for n in range(1, 5001)]
    assert all(span >= n and (span % 16 == 0 or span == 5000) for n, span in enumerate(spans, 1))
    assert all(span <= 1.5 * n + 128 for n, span in enumerate(spans, 1))
    assert len(set(spans)) < 16


def test_graphs_last_while_weights_stay_where_they_are(llama, ahead):
    """The same tokens as without graphs, of weights that an update changed in place."""
    gpt, _ = llama
    prompts, lengths = make_prompts(batch=12)
    options = {"eos_ids": OPTIONS["many ends"]["eos_ids"]}
    generator, captured = make_generator(llama, **options), ahead()

    def draw(generator, seed, count=12):
        return generator.sample(prompts[:count], lengths[:count], torch.arange(count), seed)

    draw(generator, 1)
    before = len(captured)
    with torch.no_grad():
        for parameter in gpt.parameters():
            parameter.mul_(1.01)
    found = [draw(generator, 1), draw(generator, 2, 7)]
    assert 0 < before <= len(captured) <= before + 2
    fresh = make_generator(llama, **options)
    for each, arguments in zip(found, [(1, 12), (2, 7)], strict=True):
        assert_same(each, draw(fresh, *arguments))
    captured.clear()
    draw(generator, 1)
    assert captured == []  # all shapes are known
    for parameter in gpt.parameters():
        parameter.data = parameter.data.clone()
    draw(generator, 1)
    assert len(captured) > 0
