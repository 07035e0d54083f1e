"""Fields of a request change the answer as documented, or are refused by their name.

`tests/unit/algorithms/test_serving.py` has the other fields.
"""

import json
from contextlib import ExitStack

import httpx
import pytest
from test_serving import (
    CHAT,
    TEXT,
    TOKENIZER,
    USER,
    ask,
    served,  # noqa: F401 - a fixture
)

from aligner.algorithms.ask.serve import start_server
from aligner.config import ServeConfig, parse_config
from aligner.errors import DataError
from aligner.serving.requests import _NEUTRAL as NEUTRAL
from aligner.serving.requests import ChatRequest, CompletionRequest, read_request

pytestmark = pytest.mark.integration

TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}


class Asked:
    """Ask one path of the server; every method returns what a client reads."""

    def __init__(self, server, path):
        self.server, self.path = server, path
        self.prompt = {"messages": USER} if path == CHAT else {"prompt": "hello"}

    def body(self, more):
        return {**self.prompt, "seed": 4, "max_tokens": 20, "return_token_ids": True, **more}

    def answer(self, **more):
        body = {key: value for key, value in self.body(more).items() if value is not None}
        return ask(self.server, self.path, **body)

    def choices(self, **more):
        return self.answer(**more)["choices"]

    def ids(self, **more):
        return [choice["token_ids"] for choice in self.choices(**more)]

    def is_refused(self, name, **more):
        answer = self.server.client.post(self.path, content=json.dumps(self.body(more)))
        assert set(answer.json()) == {"error"}
        error = answer.json()["error"]
        assert error["message"].startswith(name), error
        return True

    def prompt_ids(self, **more):
        answer = self.answer(**more)
        return (answer if self.path == CHAT else answer["choices"][0])["prompt_token_ids"]


def distinct_texts_are_as_asked(asked):
    """Special tokens are spelt or left out; some answers have them."""
    spelt = 0
    for skips in (False, True):
        for choice in asked.choices(n=40, max_tokens=40, skip_special_tokens=skips):
            ids = [token for token in choice["token_ids"] if token not in TOKENIZER.end_ids]
            spelt += any(token in TOKENIZER.special_ids for token in ids)
            shown = [token for token in ids if not skips or token not in TOKENIZER.special_ids]
            text = choice["message"]["content"] if asked.path == CHAT else choice["text"]
            assert text == TOKENIZER.decode(shown)
    return spelt > 2


def lengths_of(asked, **more):
    return {len(ids) for ids in asked.ids(n=60, max_tokens=40, **more)}


def tokens_of(asked, **more):
    """Tokens of a greedy answer of 20."""
    (ids,) = asked.ids(temperature=0, min_tokens=20, **more)
    assert len(ids) == 20
    return len(set(ids))


# What is true of an answer where the field is honoured. Templates that read a variable:
# tests/unit/data/test_template_variables.py.
HONOURED = {
    "n": lambda asked: (
        asked.ids(n=3)[0] == asked.ids()[0] and len(set(map(tuple, asked.ids(n=3)))) == 3
    ),
    "max_tokens": lambda asked: asked.ids(max_tokens=3) == [asked.ids()[0][:3]] != asked.ids(),
    "max_completion_tokens": lambda asked: (
        asked.ids(max_completion_tokens=2, max_tokens=9) == [asked.ids()[0][:2]]
    ),
    "min_tokens": lambda asked: (
        min(lengths_of(asked)) < 40 and lengths_of(asked, min_tokens=40) == {40}
    ),
    "temperature": lambda asked: (
        asked.ids(temperature=0, n=2)[0] == asked.ids(temperature=0, seed=9)[0]
        and asked.ids(temperature=0.001) == asked.ids(temperature=0)
        and asked.ids(temperature=5) != asked.ids()
    ),
    "top_p": lambda asked: asked.ids(top_p=1e-6) == asked.ids(temperature=0),
    "top_k": lambda asked: (
        asked.ids(top_k=1) == asked.ids(temperature=0)
        and asked.ids(top_k=-1) == asked.ids(top_k=0) == asked.ids()
    ),
    "repetition_penalty": lambda asked: (
        tokens_of(asked, repetition_penalty=100) == 20 > tokens_of(asked, repetition_penalty=0.01)
    ),
    "skip_special_tokens": distinct_texts_are_as_asked,
    "model": lambda asked: (
        asked.answer(model="tiny")["model"] == "tiny" and asked.is_refused("model", model="other")
    ),
    "tools": lambda asked: (
        "now" in TOKENIZER.decode(asked.prompt_ids(tools=[TOOL]))
        and "now" not in TOKENIZER.decode(asked.prompt_ids())
    ),
    "tool_choice": lambda asked: (
        asked.prompt_ids(tools=[TOOL], tool_choice="none") == asked.prompt_ids()
        and asked.prompt_ids(tools=[TOOL], tool_choice="auto") != asked.prompt_ids()
        and asked.is_refused("tool_choice", tools=[TOOL], tool_choice="required")
    ),
    "chat_template_kwargs": lambda asked: all(
        asked.is_refused("chat_template_kwargs", chat_template_kwargs={name: True})
        for name in ("tokenize", "never_read")
    ),
}
FIELDS = [
    (path, field)
    for path, model in ((CHAT, ChatRequest), (TEXT, CompletionRequest))
    for field in model.model_fields.keys() & HONOURED.keys()
]


@pytest.mark.parametrize(("path", "field"), sorted(FIELDS))
def test_a_field_is_honoured_or_refused_by_name(served, path, field):  # noqa: F811
    assert HONOURED[field](Asked(served, path))


@pytest.mark.parametrize("key", sorted(NEUTRAL))
def test_a_key_that_is_not_offered_is_refused_by_name_unless_it_changes_nothing(key):
    messages = {"messages": USER}
    for value in NEUTRAL[key]:
        read_request(ChatRequest, json.dumps({**messages, key: value}).encode())
    with pytest.raises(DataError, match=f"^{key}: 'another value' is not supported"):
        read_request(ChatRequest, json.dumps({**messages, key: "another value"}).encode())


def test_a_truth_value_is_no_number_and_a_number_no_truth_value():
    for key, value in (("best_of", True), ("echo", 0)):
        with pytest.raises(DataError, match=f"^{key}: {value} is not supported"):
            read_request(CompletionRequest, json.dumps({"prompt": "a", key: value}).encode())


def test_a_model_of_256_positions_is_served_by_default(tiny_nemo, tmp_path):
    model = {"restore_from_path": str(tiny_nemo)}
    server = {"port": 0, "token_file": str(tmp_path / "token")}
    config = parse_config({"model": model, "server": server}, ServeConfig)
    assert config.sampling.max_length == 256
    said = []
    with ExitStack() as closing:
        start_server(config, closing, said.append)
        address = said[-1].split()[2].removesuffix("/v1")
        assert httpx.get(f"{address}/health").json() == {"status": "ok"}
    assert "sampling.max_length=255 is used, the model's limit" in said
