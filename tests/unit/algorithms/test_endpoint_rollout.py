"""Rollouts of agents: their rows are what they were answered, and how they end.

The engine's tokens depend on the prompt, the seed and the sample id only; the HTTP server, the
processes and the clocks are the real ones.
"""

import json
import sys
from contextlib import ExitStack
from types import SimpleNamespace

import psutil
import pytest
import torch
import user_agents
from conversations import MOST, TOKENIZER, Babble, configuration, prompts_of, same
from played import turns_of, write_files

from aligner.algorithms.rollout.driver import Driver, Episode
from aligner.algorithms.rollout.endpoint import EndpointRollouts
from aligner.algorithms.rollout.environments import EnvironmentReward
from aligner.algorithms.rollout.rollout import score
from aligner.config import SamplingParams
from aligner.config.environment import EnvironmentConfig
from aligner.environments.pool import Call
from aligner.errors import ConfigError, EnvironmentCallError
from aligner.http.queue import JobQueue

pytestmark = pytest.mark.integration

FILE = user_agents.__file__
RUN = {"factory": f"{FILE}:run"}
COMMAND = {"command": (sys.executable, FILE)}


class Agents:
    """Rollouts of one configuration."""

    def __init__(self, closing, columns=("what",), **settings):
        settings = {"max_tokens": 400, "retries": 0, "concurrency": 2, **settings}
        config = configuration(EnvironmentConfig(kind="endpoint", **settings))
        given = SimpleNamespace(vocab_size=TOKENIZER.vocab_size), frozenset(columns), closing
        self.rollouts = EndpointRollouts(config, TOKENIZER, *given)

    def collect(self, rows, per_prompt=1, engine=None):
        data = prompts_of(rows, per_prompt)
        return self.rollouts.collect(engine or Babble(), data, seed=3, per_prompt=per_prompt)


@pytest.fixture(scope="module")
def functions():
    """Agents that are functions; their processes are started once."""
    with ExitStack() as closing:
        yield Agents(closing, ("what", "name", "saw", "marker"), **RUN)


def task(what, name="1", saw=None, marker=None):
    return {"what": what, "name": name, "saw": saw and str(saw), "marker": marker and str(marker)}


def collected(rows, columns=("what", "name", "saw", "marker"), per_prompt=1, **settings):
    with ExitStack() as closing:
        return Agents(closing, columns, **settings).collect(rows, per_prompt)


def test_rows_are_what_the_agents_saw(tmp_path):
    rows = [task("two_turns", str(n), tmp_path / str(n)) for n in range(3)]
    batch = collected(rows, **COMMAND)
    for row, turns in enumerate(turns_of(batch)):
        seen = [json.loads(line) for line in (tmp_path / str(row)).open()]
        for (*ids, logprobs, _), (*told, told_logprobs) in zip(turns, seen, strict=True):
            assert ids == told  # before the turn and of the turn
            assert logprobs == pytest.approx(told_logprobs)
        length = int(batch["input_lengths"][row])
        assert length == len(seen[1][0] + seen[1][1])
        assert batch["position_ids"][row, :length].tolist() == list(range(length))
        assert int(batch["prompt_lengths"][row]) == len(seen[0][0])
        assert torch.equal(batch["token_mask"][row], (batch["turn_ids"][row] > 0).float())
        assert batch["turn_rewards"][row].nonzero().tolist() == [[length - 1]]
        assert batch["turns"][row][0]["answer"][0]["role"] == "agent"
        assert "and?" in batch["turns"][row][0]["answer"][0]["content"]
    assert batch["end_reasons"] == ["done"] * 3
    metrics = score(EnvironmentReward(), batch)
    assert (metrics["turns"], metrics["forks"], metrics["ended_done"]) == (2, 0, 1)
    assert batch["is_right"].tolist() == [1.0] * 3


def test_tokens_stay_as_they_were_sampled(functions):
    """Bytes that are no UTF-8 come back as other ones; the agent's next question does not fork."""

    class Bytes(Babble):
        def _row(self, ids, key, most):
            whole, logprobs, ended = super()._row(ids, key, most)
            new = [token + 100 if token < 130 else token for token in whole[len(ids) :]]
            return ids + new, logprobs, ended

    batch = functions.collect([task("two_turns", str(n)) for n in range(3)], engine=Bytes())
    assert batch["forks"] == [0] * 3
    assert sum("�" in turns[0]["content"] for turns in batch["turns"]) >= 2


def test_the_run_s_sampling_is_used(functions, caplog):
    seen = []

    class Seen(Babble):
        def generate(self, data, **given):
            seen.append(given["sampling_options"])
            return super().generate(data, **given)

    batch = functions.collect([task("own_sampling", "a")] * 2, engine=Seen())
    assert {options.sampling for options in seen} == {SamplingParams()}
    lengths = [len(ids) for turns in turns_of(batch) for _, ids, *_ in turns]
    assert max(lengths[0::2]) <= 2
    assert max(lengths[1::2]) <= MOST
    assert not torch.equal(batch["input_ids"][0], batch["input_ids"][1])  # its seed is not
    [said] = [one.message for one in caplog.records if "settings of the run" in one.message]
    assert "seed, temperature, top_p" in said


def test_tokens_and_output_are_bounded():
    batch = collected([task("asks_on")], max_turns=50, max_tokens=150, **RUN)
    assert batch["end_reasons"] == ["max_tokens"]
    assert 150 - 60 < batch["input_ids"].shape[1] <= 150
    with pytest.raises(EnvironmentCallError, match=r"does not fit environment.max_tokens=400"):
        collected([task("asks_much")], **RUN)
    batch = collected([task("floods")], **COMMAND)
    output = batch["turns"][0][0]["info"]["output"]
    assert output.endswith("x\nthe end")
    assert len(output) <= 500


@pytest.mark.parametrize(
    ("what", "cause"),
    [
        ("crashes", "exit code 3. Its output ends: the cause of it"),
        ("asks_nothing", "before the policy had answered a request.* last output: nothing to do"),
    ],
)
def test_a_failure_stops_the_run_with_its_cause(what, cause):
    with pytest.raises(EnvironmentCallError, match=f"more than environment.retries=0. .*{cause}"):
        collected([task(what)], **COMMAND)


def test_one_that_hangs_is_killed_with_its_children(tmp_path):
    marker = tmp_path / "pids"
    batch = collected([task("hangs_once", marker=marker)], retries=1, timeout_s=1.5, **RUN)
    assert batch["failures"] == [["env_timeout"]]
    for pid in map(int, marker.read_text().split()):
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"
    with pytest.raises(EnvironmentCallError, match=r"environment.timeout_s=0.5 seconds and"):
        collected([task("hangs", marker=marker)], timeout_s=0.5, **RUN)


def test_half_an_answer_costs_its_own_conversation_only(tmp_path):
    """The thread that keeps the clocks of all agents does not wait for the rest of it."""
    rows = [task("half_an_answer"), task("takes_its_time")]
    batch = collected(rows, timeout_s=2.5, failed="zero", **RUN)
    assert batch["failures"] == [["env_timeout"], []]
    assert batch["end_reasons"] == ["failed", "done"]
    said = batch["turns"][0][-1]["info"]["failure"]
    assert "neither called the policy nor ended within environment.timeout_s=2.5 seconds" in said


def test_an_agent_s_silence_begins_with_its_last_answer():
    """Also if the policy owed it nothing whenever the driver looked."""
    killed = []
    pool = SimpleNamespace(name="agent 'x'", kill=killed.append)
    driver = Driver(EnvironmentConfig(factory="x", timeout_s=1.0), pool, JobQueue(1), None)
    session = SimpleNamespace(is_waiting=False, engine_failure=None, answers=[])
    episode = Episode(0, 0, 0, {}, slot=3, call=Call(3, "run", None, 1.0), session=session)
    for now in (0.9, 1.8, 2.7):
        session.answers.append(now)
        assert driver._reply_of_process(episode, False, now) is None
    assert driver._reply_of_process(episode, False, 3.5) is None
    session.is_waiting = True  # the policy's time is not the agent's
    assert driver._reply_of_process(episode, False, 9.5) is None
    session.is_waiting = False
    assert driver._reply_of_process(episode, False, 10.6).reason == "env_timeout"
    assert killed == [3]


def test_a_function_returns_its_reward():
    settings = {"factory": f"{FILE}:returns", "kwargs": {"scale": 0.5}}
    batch = collected([{"what": "a"}, {"what": "b"}], ("what",), per_prompt=2, **settings)
    assert batch["turn_rewards"].sum(1).tolist() == [0.5] * 4
    seeds = [parts["seed"] for parts in batch["reward_parts"]]
    assert seeds[0::2] == seeds[1::2]
    assert seeds[0] != seeds[2]


class Broken(Babble):
    """An engine whose calls with the numbers of ``at``, from 1, fail."""

    def __init__(self, *at):
        super().__init__()
        self.at, self.tries = at, 0

    def generate(self, data, **given):
        self.tries += 1
        if not self.at or self.tries in self.at:
            raise ZeroDivisionError("of the engine")
        return super().generate(data, **given)

    def recover(self):
        return True


@pytest.mark.parametrize("what", ["asks_again", "passes_over"])
def test_an_agent_whose_engine_failed_is_begun_again(what):
    """A failed call counts once for both agents."""
    rows = [task(what, str(n)) for n in range(2)]
    with ExitStack() as closing:
        agents = Agents(closing, ("what", "name", "saw", "marker"), retries=1, **RUN)
        calm, shaken = agents.collect(rows, 2), agents.collect(rows, 2, engine=Broken(2))
    failures = [each for row in shaken["failures"] for each in row]
    assert failures == ["engine_error"] * len(failures)
    assert 1 <= len(failures) <= 2
    assert score(EnvironmentReward(), shaken)["failed_engine_error"] == len(failures)
    score(EnvironmentReward(), calm)
    same(*({**batch, "failures": None} for batch in (calm, shaken)))


def test_an_engine_that_always_fails_and_a_rollout_without_any_reward_are_errors(functions):
    engine = Broken()
    with pytest.raises(EnvironmentCallError, match=r"retries=0.*failure: .* of the eng") as caught:
        functions.collect([task("two_turns")], engine=engine)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert engine.tries == 1
    assert functions.collect([task("two_turns")])["end_reasons"] == ["done"]
    with pytest.raises(EnvironmentCallError, match="scored none of the 1 conversations"):
        functions.collect([task("unscored")])


def test_the_agent_of_the_page(tmp_path):
    write_files(tmp_path, "docs/environments.md")
    assert len((tmp_path / "my_agent.py").read_text().splitlines()) <= 30
    command = (sys.executable, str(tmp_path / "my_agent.py"))
    columns = ("prompt", "ground_truth")
    batch = collected([{"prompt": "1+1=", "ground_truth": "2"}], columns, command=command)
    assert (batch["end_reasons"], batch["turn_ids"].amax().item()) == (["done"], 2)
    assert batch["reward_parts"] == [{"accuracy": 0.0}]


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"command": ("no-such-program",)}, "environment.command=.*no-such-program. was not found"),
        ({"factory": f"{FILE}:nobody"}, "has no function 'nobody'"),
        ({"factory": f"{FILE}:act"}, "is called with base_url, api_key, seed, the columns"),
        ({**RUN, "kwargs": {"seed": 1}}, "seed would be given twice"),
    ],
)
def test_what_cannot_be_run_is_refused_at_once(settings, said):
    with pytest.raises(ConfigError, match=said), ExitStack() as closing:
        Agents(closing, **settings)
