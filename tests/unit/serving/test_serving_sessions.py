"""Sessions of a policy's server: trajectories by exact token prefix, forks, rewards, keys.

The engine's answers are written down, and so is what each trajectory must be.
"""

import pytest
from test_serving_engine import CHAT, TEXT, serving, texts

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.errors import NonFiniteError
from aligner.serving.sessions import Session

TOKENIZER = byte_level_tokenizer()
FIRST = [{"role": "user", "content": "one?"}]
SECOND = [*FIRST, {"role": "assistant", "content": "ab"}, {"role": "user", "content": "two?"}]


@pytest.fixture(scope="module")
def server():
    """Answers ``ab`` to a first question, ``cde`` to others."""
    with serving(lambda text: "ab" if text.count("user") == 1 else "cde") as running:
        yield running


def begun(server, **body):
    """Id and headers of a new session."""
    answer = server.client.post("/v1/sessions", json=body)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["id"], {"Authorization": f"Bearer {found['api_key']}"}


def ask(server, key, messages, **more):
    answer = server.client.post(CHAT, json={"messages": messages, **more}, headers=key)
    assert answer.status_code == 200, answer.text
    return answer


def recorded(server, name):
    return server.client.get(f"/v1/sessions/{name}").json()


def sampled(trajectory):
    """Text of each turn, by its tokens."""
    tokens = list(zip(trajectory["ids"], trajectory["turn_ids"], strict=True))
    turns = range(1, 1 + max(trajectory["turn_ids"]))
    return [TOKENIZER.decode([i for i, t in tokens if t == turn]) for turn in turns]


@pytest.mark.parametrize("stream", [False, True])
def test_turns_that_continue_each_other_are_one_trajectory(server, stream):
    name, key = begun(server)
    for messages in (FIRST, SECOND):
        ask(server, key, messages, stream=stream)
    [trajectory] = recorded(server, name)["trajectories"]
    rendered = TOKENIZER.apply_chat_template(SECOND)
    assert TOKENIZER.decode(trajectory["ids"]) == f"{rendered}cde<|im_end|>"
    assert sampled(trajectory) == ["ab<|im_end|>", "cde<|im_end|>"]
    assert trajectory["ends"] == ["stop", "stop"]
    expected = [-0.5 if turn else 0.0 for turn in trajectory["turn_ids"]]
    assert trajectory["logprobs"] == expected
    assert trajectory["forked_from"] is None


def test_a_prompt_that_is_no_extension_begins_a_trajectory(server):
    name, key = begun(server)
    ask(server, key, FIRST)
    ask(server, key, SECOND)
    rewritten = [*SECOND[:1], {"role": "assistant", "content": "aX"}, *SECOND[2:]]
    ask(server, key, rewritten)
    ask(server, key, FIRST)  # once more, from the beginning
    one, two, three = recorded(server, name)["trajectories"]
    assert sampled(one) == ["ab<|im_end|>", "cde<|im_end|>"]
    # Sampled there once only: of the fork only its last turn is.
    assert sampled(two) == ["cde<|im_end|>"]
    opening = len(TOKENIZER.encode(TOKENIZER.apply_chat_template(FIRST)))
    assert (two["forked_from"], two["shared"]) == (0, opening + 1)  # the letter a was sampled
    assert sampled(three) == ["ab<|im_end|>"]
    assert (three["forked_from"], three["shared"]) == (None, 0)


def test_several_answers_are_several_trajectories(server):
    name, key = begun(server)
    ask(server, key, FIRST, n=2)
    assert len(recorded(server, name)["trajectories"]) == 2
    answer = server.client.post(TEXT, json={"prompt": ["x", "y"]}, headers=key)
    assert texts(answer) == ["cde", "cde"]
    assert len(recorded(server, name)["trajectories"]) == 4


def test_rewards(server):
    name, key = begun(server)
    assert recorded(server, name)["reward"] is None
    for reward, score, parts in (
        (0.5, 0.5, {}),
        (None, None, {}),
        ({"reward": 1, "accuracy": 0}, 1.0, {"accuracy": 0.0}),
    ):
        answer = server.client.post("/v1/reward", json={"reward": reward}, headers=key)
        assert answer.json() == {"reward": score}
        assert (recorded(server, name)["reward"], recorded(server, name)["parts"]) == (score, parts)
    for wrong in ("good", {"accuracy": 1}, [1.0]):
        answer = server.client.post("/v1/reward", json={"reward": wrong}, headers=key)
        assert answer.status_code == 400, wrong
    assert server.client.post("/v1/reward", json={"reward": 1}).status_code == 400  # no session's


def test_keys(server):
    name, key = begun(server)
    other, another = begun(server)
    assert server.client.get(f"/v1/sessions/{name}", headers=key).json()["id"] == name
    assert server.client.get(f"/v1/sessions/{name}", headers=another).status_code == 404
    assert server.client.post("/v1/sessions", json={}, headers=key).status_code == 401
    assert server.client.delete(f"/v1/sessions/{name}", headers=key).status_code == 401
    ask(server, key, FIRST)
    ended = server.client.delete(f"/v1/sessions/{name}").json()
    assert len(ended["trajectories"]) == 1
    assert server.client.get(f"/v1/sessions/{name}").status_code == 404
    assert server.client.post(TEXT, json={"prompt": "x"}, headers=key).status_code == 401
    assert recorded(server, other)["trajectories"] == []


def test_a_session_with_a_seed_repeats_itself():
    """Whatever else is asked; without one sessions differ."""
    one, two, none = Session(3), Session(3), Session()
    assert [one.seed_parts(), one.seed_parts()] == [two.seed_parts(), two.seed_parts()]
    assert one.seed_parts() != Session(4).seed_parts()
    assert none.seed_parts() is None


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_not_answered_takes_no_room(stream, monkeypatch):
    """A session that has had a refusal, or was left by its client, goes on as another one."""
    monkeypatch.setattr("aligner.serving.sessions._MAX_TOKENS", 400)

    def reply(text):
        if text == "bad":
            raise NonFiniteError("logits of rows [0]")
        return "x" * 90 if text == "left" else "a"

    with serving(reply, seconds=0.02) as server:
        name, key = begun(server)
        asked = {"prompt": "bad", "stream": stream}
        assert "NonFiniteError" in server.client.post(TEXT, json=asked, headers=key).text
        asked = {"prompt": [10**6], "max_tokens": 300, "stream": stream}
        assert server.client.post(TEXT, json=asked, headers=key).status_code == 400
        if stream:
            asked = {"prompt": "left", "stream": True}
            with server.client.stream("POST", TEXT, json=asked, headers=key) as answer:
                next(answer.iter_lines())
            texts(server.client.post(TEXT, json={"prompt": "of nobody's"}))
            assert server.script.abandoned == 1
        prompt = "b" * 150
        for _ in range(5):
            asked = {"prompt": prompt, "max_tokens": 10}
            [said] = texts(server.client.post(TEXT, json=asked, headers=key))
            prompt += f"{said}<|im_end|>c"
        [sequence] = recorded(server, name)["trajectories"]
        assert len(sampled(sequence)) == 5
