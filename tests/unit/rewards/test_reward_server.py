"""Client and server of reward models: right answers, and everything that can go wrong on the way.

The servers are processes. One holds a real model; the others are `reward_stub`.
"""

import asyncio
import contextlib
import re
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hf_models import LLAMA_SIZES
from servers import started

from aligner.config import RewardServerConfig
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, RewardError, RewardServerError
from aligner.http.tokens import read_token
from aligner.models.gpt import MegatronGPTRewardModel, load_from_nemo
from aligner.rewards.sequences import SequenceEncoder
from aligner.rewards.server.client import RemoteReward, RewardClient
from aligner.rewards.server.wire import WireSample

pytestmark = pytest.mark.integration

ROOT = Path(__file__).parents[3]
STUB = Path(__file__).parents[1] / "reward_stub.py"
TOKEN = "s3cret-of-the-tests"
SAMPLES = [WireSample("1+1=", "2"), WireSample("1+1=", "x"), WireSample("2+2=\n", "4 or so")]


@contextlib.contextmanager
def stub(*words):
    """The address of a stub that takes requests, by its behaviour and most good answers."""
    command = [sys.executable, str(STUB), "0", *words]
    with started(command, r"^(\d+)$", cwd=ROOT, env={}) as (number, _):
        yield f"http://127.0.0.1:{number}"


def client(url, **options):
    return RewardClient(
        RewardServerConfig(url=url, **{"timeout_s": 5.0, "retry_for_s": 0.5, **options})
    )


@pytest.fixture(scope="module")
def served(reward_nemo):
    """Address and process of `examples/serve_reward_model.py`."""
    command = [sys.executable, "examples/serve_reward_model.py", "--model", str(reward_nemo)]
    command += ["--port", "0", "--token-env", "REWARD_TOKEN"]
    env = {"REWARD_TOKEN": TOKEN}
    with started(command, r"ready at (http://\S+)", cwd=ROOT, env=env) as server:
        yield server


@pytest.fixture
def asked(served, monkeypatch):
    """A client of the real model."""
    monkeypatch.setenv("CLIENT_TOKEN", f"{TOKEN}\n")
    return client(served[0], token_env="CLIENT_TOKEN", timeout_s=60.0)


def test_a_served_model_scores_as_it_does_in_process(reward_nemo, asked):
    model = load_from_nemo(MegatronGPTRewardModel, restore_path=reward_nemo)
    encoder = SequenceEncoder(model.tokenizer, 256)
    batch = encoder.collate([encoder.ids(sample.prompt, sample.response) for sample in SAMPLES])
    assert batch["input_ids"][0].tolist()[-1] == model.tokenizer.pad_id
    expected = model.infer(batch).tolist()
    assert asked.check() == ()
    assert asked.score([]) == []
    assert [reward for (reward,) in asked.score(SAMPLES)] == pytest.approx(expected, abs=1e-5)


@pytest.mark.extended
def test_a_served_classifier_of_transformers_scores_as_transformers_does(tmp_path):
    from transformers import LlamaConfig, LlamaForSequenceClassification

    tokenizer = byte_level_tokenizer()
    torch.manual_seed(2)
    sizes = {**LLAMA_SIZES, "pad_token_id": tokenizer.pad_id, "num_labels": 1}
    expected = LlamaForSequenceClassification(LlamaConfig(**sizes)).eval()
    expected.save_pretrained(tmp_path)
    for name, content in tokenizer.files().items():
        (tmp_path / name).write_bytes(content)
    command = [sys.executable, "examples/serve_reward_model.py", "--model", str(tmp_path)]
    with started([*command, "--port", "0"], r"ready at (http://\S+)", cwd=ROOT, env={}) as server:
        scores = [score for (score,) in client(server[0], timeout_s=60.0).score(SAMPLES)]
    encoder = SequenceEncoder(tokenizer, 64)
    rows = [encoder.ids(sample.prompt, sample.response) for sample in SAMPLES]
    with torch.no_grad():
        expected.config.pad_token_id = None  # the head reads the last token, which is an end token
        logits = [expected(torch.tensor([row])).logits.item() for row in rows]
    assert scores == pytest.approx(logits, abs=1e-5)


def test_a_hundred_clients_at_once(served, asked):
    """Each gets its own rewards, whatever they are batched with."""
    texts = [WireSample("1+1=", str(number)) for number in range(100)]
    expected = asked.score(texts)
    assert len({row[0] for row in expected}) > 50

    def ask(number):
        one = client(served[0], token_env="CLIENT_TOKEN", timeout_s=60.0, retry_for_s=60.0)
        return one.score(texts[number : number + 1])[0][0]

    with ThreadPoolExecutor(100) as pool:
        found = list(pool.map(ask, range(100)))
    assert found == pytest.approx([row[0] for row in expected], abs=1e-5)


def test_a_bad_token_is_refused_at_once(served, monkeypatch, caplog):
    monkeypatch.setenv("CLIENT_TOKEN", "wrong")
    began = time.monotonic()
    for options in ({}, {"token_env": "CLIENT_TOKEN"}):
        with pytest.raises(RewardServerError, match=f"{served[0]}.*401") as refusal:
            client(served[0], retry_for_s=30.0, **options).check()
        assert "wrong" not in caplog.text + str(refusal.value).replace("missing or wrong", "")
    assert time.monotonic() - began < 20
    monkeypatch.setenv("CLIENT_TOKEN", "ü")
    with pytest.raises(ConfigError, match="token_env=CLIENT_TOKEN contains no access token"):
        client(served[0], token_env="CLIENT_TOKEN")


def test_what_cannot_be_scored_is_told_to_its_sender(asked):
    with pytest.raises(RewardServerError, match=r"400.*has 304 tokens.* at most 256"):
        asked.score([WireSample("1+1=", "1" * 299)])
    with pytest.raises(RewardServerError, match=r"400.*the prompt is empty"):
        asked.score([WireSample("", "1")])
    assert len(asked.score(SAMPLES)) == 3  # the server lives on


def test_sigterm_ends_the_server(served, asked):
    """Last of this server's tests; then its address is one where nobody listens."""
    url, process = served
    process.send_signal(signal.SIGTERM)
    assert process.wait(120) == 0
    with pytest.raises(RewardServerError, match=f"{url}: .*refused; gave up after") as error:
        asked.check()
    assert isinstance(error.value, ConnectionError)


@pytest.mark.parametrize(
    ("behaviour", "said"),
    [
        ("ids", "ids are not 0 to 0 in order"),
        ("not_here", "404 .*no such path"),
        ("no_rewards", "rewards: Field required, got .'scores'"),
        ("nan", "rewards.0.0: .* finite number, got nan"),
        ("too_many", "2 rewards for 1 samples"),
        ("redirect", "302"),
        ("teapot", "418 .*I am a teapot"),
    ],
)
def test_a_wrong_answer_stops_at_once(behaviour, said):
    with stub(behaviour) as url:
        asked = client(url, retry_for_s=30.0)
        asked.check()
        started = time.monotonic()
        with pytest.raises(RewardServerError, match=f"{url}: .*{said}"):
            asked.score(SAMPLES[:1])
        assert time.monotonic() - started < 5  # not tried again


@pytest.mark.parametrize(
    ("behaviour", "said", "tries"),
    [
        ("page", "not JSON", 2),  # twice a page, as while the server behind a proxy is restarted
        ("page_404", "404 Not Found to POST /score", 2),
        ("cut", r"received \d+ bytes, expected \d+\)", 1),
    ],
)
def test_a_temporary_failure_is_asked_again(behaviour, said, tries, caplog):
    with stub(behaviour) as url:
        assert client(url, retry_for_s=30.0).score(SAMPLES) == [[1.0], [0.0], [1.0]]
    assert len(re.findall(f"{said}.*next try in", caplog.text)) == tries


def test_what_is_given_up():
    for behaviour, said in (("not_json", r"not JSON.*gave up"), ("failing", "of memory; gave")):
        with stub(behaviour) as url, pytest.raises(RewardServerError, match=said):
            client(url).score(SAMPLES)
    # Of eight requests one is refused: the others, to be asked again for long, are left.
    with stub("digit", "3") as url:
        began = time.monotonic()
        with pytest.raises(RewardServerError, match="gave up after"):
            client(url, samples_per_request=1, concurrent_requests=4).score(SAMPLES * 4)
        assert time.monotonic() - began < 10


def test_a_notebook_has_a_loop_in_its_thread():
    async def cell(url):
        return client(url).score(SAMPLES)

    with stub("digit") as url:
        assert asyncio.run(cell(url)) == [[1.0], [0.0], [1.0]]


@pytest.mark.parametrize("behaviour", ["silent", "drip", "drip_headers"])
def test_a_slow_server_is_not_waited_for_longer_than_said(behaviour):
    with stub(behaviour) as url:
        started = time.monotonic()
        with pytest.raises(
            RewardServerError,
            match=r"no answer to POST /score within reward.server.timeout_s=0\.6 s",
        ):
            client(url, timeout_s=0.6, retry_for_s=0.8).score(SAMPLES)
        assert time.monotonic() - started < 10


def rollout(tokenizer):
    prompt, *responses = (tokenizer.encode(text) for text in ("1+1=", "2\n", "x\n"))
    return BatchedDataDict(
        {
            "input_ids": torch.tensor([prompt + response for response in responses]),
            "prompt_lengths": torch.tensor([len(prompt)] * 2),
            "input_lengths": torch.tensor([len(prompt + response) for response in responses]),
            "is_end": torch.tensor([True, False]),
            "prompts": ["1+1=", "1+1="],
        }
    )


def test_rewards_of_a_server_are_weighted_and_finite():
    tokenizer = byte_level_tokenizer()
    with stub("huge") as url:
        reward = RemoteReward(RewardServerConfig(url=url, retry_for_s=0.5), tokenizer)
        message = rf"server {url} rates sample 1 \(prompt '1\+1=', response 'x.n'\) with inf"
        with pytest.raises(RewardError, match=message):
            reward.get_rewards(rollout(tokenizer))
    unweighted = r"rates 2 attributes .a, b.*reward.attribute_weights"
    with stub("two") as url:
        config = RewardServerConfig(url=url, retry_for_s=0.5)
        with pytest.raises(ConfigError, match=unweighted):
            RemoteReward(config, tokenizer)
        reward = RemoteReward(config, tokenizer, weights=[2.0, -0.5], end_strings=["\n"])
        scored = reward.get_rewards(rollout(tokenizer))
    assert scored.responses == ["2\n", "x\n"]
    assert scored.rewards.tolist() == [2.0 - 5.0, -5.0]
    assert scored.parts == {"a": [1.0, 0.0], "b": [10.0, 10.0]}


def test_addresses_and_tokens_are_checked_before_anything_is_sent(tmp_path, monkeypatch):
    for url in ("host:5555", "ftp://host", "http://", "http://host:x", "http://host/?token=1"):
        with pytest.raises(ConfigError, match=r"reward.server.url="):
            client(url)
    with pytest.raises(ConfigError, match=r"with a password") as refusal:
        client("http://me:hidden@host")
    assert "hidden" not in str(refusal.value)
    file = tmp_path / "token"
    with pytest.raises(ConfigError, match=r"token_file=.*contains no access token"):
        client("http://host", token_file=str(file))
    file.write_text("abc\n")
    assert read_token(None, str(file), "a server") == "abc"
