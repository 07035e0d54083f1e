"""A model behind OpenAI's HTTP interface: one server with the tiny model, a client over HTTP."""

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import chain
from types import SimpleNamespace

import httpx
import pytest

from aligner.algorithms.ask.generate import generate
from aligner.algorithms.ask.serve import start_server
from aligner.config import GenerateConfig, ServeConfig, parse_config
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import ConfigError

pytestmark = pytest.mark.integration

TOKENIZER = byte_level_tokenizer()
PROMPTS = ["12+3=", "hello", "1"]
MOST = 12
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
USER = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def served(tiny_nemo, tmp_path_factory):
    """The server, and what `generate` answers to `PROMPTS`."""
    folder = tmp_path_factory.mktemp("served")
    model = {"model": {"restore_from_path": str(tiny_nemo)}}
    greedy = {"use_greedy": True, "max_length": MOST}
    values = {**model, "prompt": PROMPTS, "sampling": greedy, "output": str(folder / "answers")}
    generate(parse_config(values, GenerateConfig))
    answers = [json.loads(line) for line in (folder / "answers").open()]
    server = {"port": 0, "token_file": str(folder / "token")}
    values = {**model, "server": server, "sampling": {"max_length": MOST}}
    config = parse_config(values, ServeConfig)
    said, stopping = [], threading.Event()
    with ExitStack() as closing:
        engine = start_server(config, closing, said.append)
        thread = threading.Thread(target=engine.serve, args=(stopping.is_set,))
        thread.start()
        url = said[-1].split()[2].removesuffix("/v1")
        token = (folder / "token").read_text().strip()
        key = {"Authorization": f"Bearer {token}"}
        with httpx.Client(base_url=url, headers=key, timeout=30) as client:
            yield SimpleNamespace(
                client=client, url=url, said=said, answers=answers, token=folder / "token"
            )
        stopping.set()
        thread.join(10)
        assert not thread.is_alive()


def ask(served, path, **body):
    answer = served.client.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def streamed(served, path, **body):
    """The pieces of a stream, which ends as it should."""
    with served.client.stream("POST", path, json={**body, "stream": True}) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_greedy_answers_are_those_of_generate(served):
    answer = ask(served, TEXT, prompt=PROMPTS, temperature=0, return_token_ids=True, logprobs=0)
    assert answer["object"] == "text_completion"
    assert answer["model"] == "tiny"
    assert len(answer["choices"]) == len(PROMPTS)
    for number, (choice, line) in enumerate(zip(answer["choices"], served.answers, strict=True)):
        assert choice["index"] == number
        assert choice["text"] == line["response"]
        assert len(choice["token_ids"]) == line["tokens"] <= MOST
        assert choice["finish_reason"] == ("stop" if line["is_end"] else "length")
        assert choice["prompt_token_ids"] == TOKENIZER.encode(PROMPTS[number])
        found = choice["logprobs"]["token_logprobs"]
        assert len(found) == line["tokens"]
        assert all(logprob < 0 for logprob in found)
    made = sum(line["tokens"] for line in served.answers)
    asked = sum(len(choice["prompt_token_ids"]) for choice in answer["choices"])
    total = {"prompt_tokens": asked, "completion_tokens": made, "total_tokens": asked + made}
    assert answer["usage"] == total
    tokens = [TOKENIZER.encode(prompt) for prompt in PROMPTS]
    same = ask(served, TEXT, prompt=tokens, temperature=0)
    assert [one["text"] for one in same["choices"]] == [one["text"] for one in answer["choices"]]


def test_a_chat_is_rendered_by_the_template(served):
    answer = ask(
        served, CHAT, messages=USER, max_completion_tokens=3, logprobs=True, return_token_ids=True
    )
    rendered = TOKENIZER.encode(TOKENIZER.apply_chat_template(USER))
    assert answer["prompt_token_ids"] == rendered
    (choice,) = answer["choices"]
    assert choice["message"]["role"] == "assistant"
    assert 1 <= len(choice["token_ids"]) <= 3
    told = choice["logprobs"]["content"]
    assert [one["token"] for one in told] == [TOKENIZER.decode([t]) for t in choice["token_ids"]]
    parts = [{"role": "developer", "content": [{"type": "text", "text": "hel"}] * 2}, *USER]
    tokens = ask(served, "/tokenize", messages=parts)
    system = [{"role": "system", "content": "helhel"}, *USER]
    assert tokens["tokens"] == TOKENIZER.encode(TOKENIZER.apply_chat_template(system))
    assert tokens["count"] == len(tokens["tokens"])


@pytest.mark.parametrize("path", [CHAT, TEXT])
def test_a_stream_says_what_the_whole_answer_says(served, path):
    asked = {"messages": USER} if path == CHAT else {"prompt": ["1+1=", "2"]}
    asked |= {"n": 2, "seed": 3, "return_token_ids": True, "logprobs": path == CHAT or 0}
    whole = ask(served, path, **asked)
    pieces = streamed(served, path, **asked, stream_options={"include_usage": True})
    assert pieces[-1]["usage"] == whole["usage"]
    assert pieces[-1]["choices"] == []
    assert len(pieces) > MOST  # token by token
    assert {piece["id"] for piece in pieces} == {pieces[0]["id"]}
    for choice in whole["choices"]:
        parts = [
            part
            for piece in pieces
            for part in piece["choices"]
            if part["index"] == choice["index"]
        ]
        assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        assert [*chain(*(part.get("token_ids", []) for part in parts))] == choice["token_ids"]
        told = [part["logprobs"] for part in parts if part.get("logprobs")]
        if path == CHAT:
            said = "".join(part["delta"].get("content", "") for part in parts)
            assert said == choice["message"]["content"]
            assert parts[0]["delta"]["role"] == "assistant"
            assert [*chain(*(one["content"] for one in told))] == choice["logprobs"]["content"]
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            found = [*chain(*(one["token_logprobs"] for one in told))]
            assert found == choice["logprobs"]["token_logprobs"]


def test_answers_depend_neither_on_what_they_came_with_nor_on_what_was_given_up(served):
    asked = [
        {"prompt": "x" * n, "seed": n % 3, "max_tokens": 1 + n, "temperature": [0, 0.5][n % 2]}
        for n in range(1, 13)
    ]
    alone = [ask(served, TEXT, **one)["choices"] for one in asked]
    with ThreadPoolExecutor(len(asked)) as pool:
        together = list(pool.map(lambda one: ask(served, TEXT, **one)["choices"], asked))
    assert together == alone
    assert len({choices[0]["text"] for choices in alone}) > 6
    body = {"prompt": "x", "max_tokens": 240, "min_tokens": 240, "n": 8, "stream": True}
    with served.client.stream("POST", TEXT, json=body) as answer:
        next(answer.iter_lines())
    same = ask(served, TEXT, prompt=PROMPTS, temperature=0)["choices"]
    assert [one["text"] for one in same] == [line["response"] for line in served.answers]


def test_the_model_and_its_tokens(served):
    (model,) = served.client.get("/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["max_model_len"] == 256
    assert served.client.get("/v1/models/tiny").json() == model
    tokens = ask(served, "/tokenize", prompt="1+1=")["tokens"]
    assert tokens == TOKENIZER.encode("1+1=")
    assert ask(served, "/detokenize", tokens=tokens)["prompt"] == "1+1="
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    room = ask(served, TEXT, prompt="x" * 250, temperature=0)  # 6 tokens are left, not 12
    assert room["usage"]["completion_tokens"] <= 6


def test_a_wrong_token_is_refused(served):
    for key in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "secret"}):
        for answer in (
            httpx.post(f"{served.url}{TEXT}", json={"prompt": "1"}, headers=key),
            httpx.get(f"{served.url}/v1/models", headers=key),
        ):
            assert answer.status_code == 401
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert served.token.stat().st_mode & 0o777 == 0o600
    assert not any(served.token.read_text().strip() in line for line in served.said)


MANY_ROLES = [*({"role": f"r{n}", "content": "x"} for n in range(99)), *USER]
BAD_TOOL = {"function": {"name": "f", "parameters": "x"}}
MANY_ANSWERS = {"prompt": ["x"] * 200, "n": 200}
VARIABLE = {"prompt": "x", "chat_template_kwargs": {"a": 1}}
BAD = [
    (TEXT, "{", 400, "not JSON", None),
    (TEXT, "[]", 400, "must be a JSON object", None),
    (TEXT, {}, 400, "prompt: Field required", "prompt"),
    (TEXT, {"prompt": ""}, 400, "the prompt has no token", None),
    (TEXT, {"prompt": []}, 400, "an empty list", "prompt"),
    (TEXT, {"prompt": [1, "x"]}, 400, "must be a text, a list of token ids, or a list", "prompt"),
    (TEXT, {"prompt": [[-1]]}, 400, "must be a text, a list of token ids, or a list", "prompt"),
    (TEXT, {"prompt": [[999]]}, 400, "999 is outside the vocabulary of 259", None),
    (TEXT, {"prompt": "x" * 300}, 400, "300 tokens and an answer do not fit", None),
    (TEXT, {"prompt": "x", "max_tokens": 256}, 400, "1 tokens and 256 new tokens do not fit", None),
    (TEXT, {"prompt": "x", "temperature": 1e-9}, 400, "0, or between 0.001", "temperature"),
    (TEXT, {"prompt": "x", "stop": ""}, 400, "an empty text", "stop"),
    (TEXT, {"prompt": "x", "stop": ["a"] * 17}, 400, "17 texts, but the limit is 16", "stop"),
    (TEXT, {"prompt": "x", "stop": ["a" * 257]}, 400, "more than 256 characters", "stop"),
    (TEXT, {"prompt": "x", "stop": [1]}, 400, "a text or a list of texts", "stop"),
    (TEXT, {"prompt": "x" * 2**20}, 400, "do not fit the model's 256", None),
    (CHAT, {"messages": USER * 5000}, 400, "at most 4096", "messages"),
    (CHAT, {"messages": MANY_ROLES}, 400, "99 roles", None),
    (TEXT, {"prompt": "x", "max_new_tokens": 5}, 400, "not permitted", "max_new_tokens"),
    (TEXT, {"prompt": "x", "model": "gpt"}, 404, "'gpt' is not served, only 'tiny'", None),
    (TEXT, MANY_ANSWERS, 413, "40000 answers, but the limit of a request is 1024", None),
    (CHAT, {"messages": []}, 400, "chat messages is empty", None),
    (CHAT, {"messages": [{"role": "user"}]}, 400, "role and content must be text", None),
    (CHAT, {"messages": [{"content": "x", "role": "assistant"}]}, 400, "the assistant's", None),
    (CHAT, {"messages": USER, "tools": [{"name": "f"}]}, 400, "must be of the form", "tools.0"),
    (CHAT, {"messages": USER, "tools": [BAD_TOOL]}, 400, "must be of the form", "tools.0"),
    ("/tokenize", {}, 400, "neither it nor messages are set", "prompt"),
    ("/tokenize", {"prompt": "x", "messages": USER}, 400, "both it and messages are set", "prompt"),
    ("/tokenize", {"prompt": "x", "tools": [{}]}, 400, "only used with messages", "tools"),
    ("/tokenize", VARIABLE, 400, "only used with messages", "chat_template_kwargs"),
    ("/v1/embeddings", {}, 404, "There are GET /health, GET /v1/models, POST", None),
]


@pytest.mark.parametrize(("path", "body", "status", "words", "key"), BAD)
def test_bad_requests_are_refused_in_openais_form(served, path, body, status, words, key):
    answer = served.client.post(path, content=body if isinstance(body, str) else json.dumps(body))
    assert set(answer.json()) == {"error"}
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (status, key), error
    assert words in error["message"]
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"sampling": {"samples_per_prompt": 2}}, "samples_per_prompt=2: each request chooses"),
        ({"server": {"port": 70000}}, r"server\.port"),
        ({"server": {"token_env": "NONE"}}, "token_env=NONE contains no access token of this serv"),
        ({"server": {"host": "256.0.0.1"}}, r"server\.host=256\.0\.0\.1 .*cannot listen"),
    ],
)
def test_settings_that_cannot_work_are_refused(tiny_nemo, changes, words):
    values = {"model": {"restore_from_path": str(tiny_nemo)}, "sampling": {"max_length": MOST}}
    values |= changes
    with ExitStack() as closing, pytest.raises(ConfigError, match=words):
        start_server(parse_config(values, ServeConfig), closing, print)
