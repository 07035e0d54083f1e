"""What clients read of an answer: tokens, bytes and offsets give the text; stop strings cut it."""

import time
from itertools import pairwise

import pytest
from chat_families import FAMILIES

from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.environments.calls import parse_calls
from aligner.environments.trajectory import Limits
from aligner.errors import DataError
from aligner.generation.rows import Progress, Row
from aligner.serving.answers import ChatAnswer, Choice, CompletionAnswer
from aligner.serving.requests import ChatRequest, chat_messages, read_request
from aligner.serving.served import Served
from aligner.serving.sessions import Sessions

TOKENIZER = byte_level_tokenizer()
ENDS = TOKENIZER.eos_id


def answered(text, *, stop=(), stream=False, min_tokens=0, skips_special=False):
    """The choice that holds the tokens of ``text`` and an end, whole or token by token."""
    options = SamplingOptions(LengthParams(99, min_tokens), SamplingParams(end_strings=tuple(stop)))
    row = Row(TOKENIZER.encode("x"), 0, options)
    choice = Choice(TOKENIZER, row, is_buffered=False, skips_special=skips_special)
    ids = [*TOKENIZER.encode(text), ENDS]
    shown = ""
    for number, token in enumerate(ids[:-1] if stream else []):
        shown += choice.push(Progress(0, [token], [-0.5]))
        assert choice.text == shown, number
    rest = ids[-1:] if stream else ids
    shown += choice.push(Progress(0, rest, [-0.5] * len(rest), "stop"))
    assert shown == choice.text
    return choice


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skips", [False, True])
def test_tokens_offsets_and_bytes_give_the_text(stream, skips):
    choice = answered("the 😀 <|im_start|>é!", stream=stream, skips_special=skips)
    assert choice.text == ("the 😀 é!" if skips else "the 😀 <|im_start|>é!")
    request = ChatRequest(messages=[], logprobs=True)
    (answer,) = CompletionAnswer(TOKENIZER, "m", request, [choice]).complete()["choices"]
    found = answer["logprobs"]
    assert len(found["tokens"]) == len(choice.ids) == len(found["token_logprobs"])
    assert "".join(found["tokens"]) == choice.text
    bounds = [*found["text_offset"], len(choice.text)]
    assert [choice.text[a:b] for a, b in pairwise(bounds)] == found["tokens"]
    (answer,) = ChatAnswer(TOKENIZER, "m", request, [choice]).complete()["choices"]
    spelt = [byte for token in answer["logprobs"]["content"] for byte in token["bytes"]]
    assert bytes(spelt) == choice.text.encode()


@pytest.mark.parametrize("stream", [False, True])
def test_stop_strings(stream):
    spelt = "hello!<|im_start|> there"
    for stop, text in (("! th", "hello"), ("!<|im_start|>", "hello"), ("there", spelt[:-5])):
        choice = answered(spelt, stop=[stop, "never"], stream=stream)
        assert (choice.text, choice.finish) == (text, "stop")
    assert answered(spelt, stop=["! th"], stream=stream, skips_special=True).text == "hello"
    # One that is complete before min_tokens cuts nothing; the next one does.
    for least, text in ((0, ""), (2, ""), (3, "ab"), (5, "abab")):
        choice = answered("ababab", stop=["ab"], stream=stream, min_tokens=least)
        assert choice.text == text, least


def test_parameters_that_are_accepted_are_honoured():
    """No key of a request is taken and then lost: each is one of what the server looks at."""
    honoured = {
        *("n", "max_tokens", "max_completion_tokens", "min_tokens", "stop", "seed", "stream"),
        *("temperature", "top_p", "top_k", "repetition_penalty", "logprobs", "messages", "tools"),
        *("tool_choice", "model", "skip_special_tokens", "return_token_ids", "stream_options"),
        "chat_template_kwargs",
    }
    assert set(ChatRequest.model_fields) == honoured
    body = b'{"messages": [], "stream_options": {"include_obfuscation": true}}'
    assert read_request(ChatRequest, body).stream_options.include_obfuscation
    choice = answered("a")
    for wants in (True, False):
        options = {"include_obfuscation": wants}
        request = ChatRequest(messages=[], stream_options=options)
        answer = ChatAnswer(TOKENIZER, "m", request, [choice])
        assert all(("obfuscation" in piece) is wants for piece in answer.first())


def history(arguments, **message):
    function = {"name": "now", "arguments": arguments}
    call = {"id": "call_1", "type": "function", "function": function}
    return [
        {"role": "developer", "content": "d"},
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call], **message},
        {"role": "tool", "tool_call_id": "call_1", "content": None},
    ]


def served(tokenizer=None):
    return Served("m", tokenizer or FAMILIES["qwen"].make(), 64, 300, None)


@pytest.mark.parametrize("arguments", ["{}", "", " \n", "null", None])
def test_histories_of_clients_are_read(arguments):
    text = served().chat(history(arguments), [])
    assert '"name": "now", "arguments": {}' in text
    assert text == served().chat(history("{}", content=[]), [])
    nothing = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None}]
    served().chat([*nothing, {"role": "user", "content": "b"}], [])


def test_messages_that_cannot_be_shown_or_cannot_fit():
    for arguments in ("[1]", '"noon"', '{"a": 1', 5):
        with pytest.raises(DataError, match="'now'"):
            served().chat(history(arguments), [])
    for message in ({"role": "assistant", "content": None, "refusal": "no"}, {"role": "user"}):
        assert chat_messages([message])[0]["content"] is None
    with pytest.raises(DataError, match="ignores name"):
        served().chat([{"role": "user", "name": "someone", "content": "a"}], [])
    one = served()
    assert one.shortened("x" * 64) == "x" * 64
    assert 64 < len(one.tokenizer.encode(one.shortened("x" * 2**20))) < 1024


@pytest.mark.parametrize("form", ["hermes", "mistral", "llama3", "plain"])
def test_calls_are_parsed_in_linear_time(form):
    texts = ["<tool_call>{{{}}}", "[TOOL_CALLS]add[ARGS]{{{}}}", "[TOOL_CALLS]{}add"]
    began = time.process_time()
    for text in (*texts, "{}<tool_call>", "call f {}", "<|python_tag|>{}"):
        for filler in (" ", "\n", "\t ", "a", "<tool_call>", "[TOOL_CALLS]", "call f\n"):
            parse_calls(text.format(filler * (200_000 // len(filler))), form)
    assert time.process_time() - began < 10


def test_prompts_are_kept_until_their_answers_are_there():
    session = Sessions().begin(1, Limits(max_turns=4, max_tokens=100))
    for number in range(3):
        ids = session.encode(f"{number}" + "x" * 500, TOKENIZER.encode, TOKENIZER.encode)
        with pytest.raises(DataError):
            session.admit([ids], 16, 1)
    assert session._texts == {}
    session = Sessions().begin()
    ids = session.encode("hello", TOKENIZER.encode, TOKENIZER.encode)
    numbers = session.admit([ids], 4, 2)
    session.withdraw([ids], numbers[:1])
    assert len(session._texts) == 1
    session.record(ids, [65, ENDS], [-1.0, -1.0], "stop", "A", numbers[1])
    assert session._texts == {}
    assert session.sequences[0].text == "helloA"
    assert [answer.request for answer in session.answers] == [numbers[1]]  # the first was withdrawn
    assert session._expected == {}


def test_sessions_that_nobody_uses_are_forgotten(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("aligner.serving.sessions.time.monotonic", lambda: clock[0])
    sessions = Sessions(idle_s=10)
    kept, idle = sessions.begin(), sessions.begin()
    for clock[0] in (8.0, 16.0, 24.0):
        assert sessions.with_key(kept.key) is kept
    sessions.begin()
    assert sessions.with_key(idle.key) is None
    assert sessions.with_key(kept.key) is kept
