"""Environments of other libraries, as far as none of their packages is needed."""

import asyncio
import math
import sys
import threading
import time
from contextlib import asynccontextmanager
from datetime import date
from types import SimpleNamespace

import pytest
import ray
import torch
from played import ADAPTERS, Game, kwargs_of, say, write_files

from aligner.environments.agent import Agent
from aligner.environments.tools import HOW_TO_CALL
from aligner.environments.worker import load_factory
from aligner.errors import ConfigError, DataError
from aligner_environments.foreign import LoopThread, as_text
from aligner_environments.gymnasium import GymnasiumEnv, action_parser, without_colours
from aligner_environments.mcp import MCPEnv, result_text
from aligner_environments.nemo_rl import NeMoRLEnv, actor_class, reward_of
from aligner_environments.skyrl_gym import SkyRLGymEnv
from aligner_environments.trl import TRLEnv

HERE = __name__


class Log:
    """A class of TRL's form; the first call takes longer than the second."""

    def __init__(self, name="log"):
        self._name = name

    @property
    def title(self):
        return self._name

    def reset(self, seed, **columns):
        self._seed, self._columns, self._lines = seed, columns, []

    def write(self, line: str) -> str:
        """Write a line.

        Args:
            line: The line.
        """
        time.sleep(0.1 if line == "a" else 0)
        self._lines.append(line)
        return f"{len(self._lines)} of {self._name}"

    def fail(self) -> str:
        """Fail."""
        raise RuntimeError("it fails")

    def _hidden(self):
        raise AssertionError


def scored(prompts, completions, environments, ground_truth, **columns):
    assert prompts[0] == "q"
    return [float(environments[0]._lines == ground_truth[0]) if completions[0] != "pass" else None]


class Meeting:
    """Coroutines of TRL's form that wait for one another."""

    async def reset(self, **columns):
        await asyncio.sleep(0)
        self._barrier = threading.Barrier(2, timeout=20)
        return "meet"

    async def meet(self) -> str:
        """Meet."""
        self._barrier.wait()
        return "met"

    async def get_reward(self):
        return {"done": 1}["done"]


Odd = type("Odd", (), {"reset": lambda self, **columns: 3})
NoReset = type("NoReset", (), {})


def make(name, **kwargs):
    return TRLEnv(seed=5, **{"environment": f"{HERE}:{name}", "form": "plain", **kwargs})


@pytest.mark.integration
def test_the_page_s_counter(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Game("trl:TRLEnv", kwargs_of("trl"), {"prompt": "abcd", "label": 1}) as game:
        (first,) = game.begin().messages
        assert first["content"] == (
            'call add {"number": "<integer>"}: Add a number to the total.\n'
            f"{HOW_TO_CALL}\nabcd\nCount to 4."
        )
        turn = game.say('call add {"number": 3}\ncall add {"number": "x"}\ncall sub {}')
        added, refused, unknown = turn.messages[0]["content"].splitlines()
        assert (added, turn.score, turn.done) == ("result of add: 3", None, False)
        assert "error: TypeError" in refused
        assert "there is no tool 'sub'; there are add" in unknown
        game.say('call add {"number": 1}')
        last = game.say("done")
        assert (last.score, last.done) == (1.0, True)


def test_calls_of_plain_methods_are_made_in_order_and_coroutines_at_the_same_time():
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    log = make("Log", prompt=chat, reward=f"{HERE}:scored", arguments={"name": "book"})
    start = log.init()
    assert start.messages[0] == chat[0]
    tools = 'call fail {}: Fail.\ncall write {"line": "<string>"}: Write a line.'
    assert start.messages[1]["content"] == f"{tools}\n{HOW_TO_CALL}\nq"
    turn = log.step(say('call write {"line": "a"}\ncall write {"line": "b"}\ncall fail'))
    assert turn.messages[0]["content"].splitlines() == [
        "result of write: 1 of book",
        "result of write: 2 of book",
        "result of fail: error: RuntimeError: it fails",
    ]
    meeting = make("Meeting", prompt="Please ")
    assert meeting.init().messages[0]["content"].endswith("\nPlease meet")
    (message,) = meeting.step(say("call meet\ncall meet")).messages
    assert message["content"] == "result of meet: met\nresult of meet: met"
    assert meeting.step(say("over")).score == 1.0


def half(prompts, completions, **columns):
    assert completions[0][0] == say("over")
    return [0.5]


def test_a_reward_function_of_trls_form():
    for last, score in (("over", 1.0), ("pass", None)):
        log = make("Log", prompt="q", ground_truth=["a"], reward=f"{HERE}:scored")
        assert log._environment._seed == 5
        assert log._environment._columns == {"prompt": "q", "ground_truth": ["a"]}
        log.step(say('call write {"line": "a"}'))
        end = log.step(say(last))
        assert (end.score, end.done) == (score, True)
    options = {"reward": f"{HERE}:scored", "max_tool_calling_iterations": 1}
    log = make("Log", prompt="q", ground_truth=["b"], **options)
    assert not log.step(say('call write {"line": "b"}')).done
    end = log.step(say('call write {"line": "c"}'))  # beyond the limit
    assert (end.done, end.score) == (True, 1.0)
    chat = [{"role": "user", "content": "q"}]
    env = make("Meeting", prompt=chat, reward=f"{HERE}:half")
    assert env.messages == [{"role": "user", "content": "qmeet"}]
    assert chat[0]["content"] == "q"  # the row stays
    assert env.step(say("over")).score == 1.5


def test_classes_that_are_not_of_trls_form_are_refused():
    with pytest.raises(ConfigError, match=r"Log' has no method get_reward\. Set a reward"):
        TRLEnv.check_kwargs({"environment": f"{HERE}:Log"})
    with pytest.raises(ConfigError, match="NoReset' has no method reset"):
        TRLEnv.check_kwargs({"environment": f"{HERE}:NoReset"})
    with pytest.raises(ConfigError, match=r"environment.kwargs.environment='nowhere:Class'"):
        load_factory(f"{ADAPTERS}.trl:TRLEnv", {"environment": "nowhere:Class"}, [], "plain")
    TRLEnv.check_kwargs({"environment": f"{HERE}:Log", "reward": f"{HERE}:scored"})
    with pytest.raises(DataError, match=r"reset returned int\. TRL's form is text or None"):
        make("Odd", prompt="q")
    with pytest.raises(DataError, match="Add a column 'prompt' to the data"):
        make("Log")


def test_a_missing_package_is_named_with_its_command(monkeypatch):
    given = {"command": ["a"], "id": "x", "base_url": "u", "environment": "e"}
    for name, module, package in (
        ("gymnasium:GymnasiumEnv", "gymnasium", "gymnasium"),
        ("mcp:MCPEnv", "mcp", "mcp"),
        ("skyrl_gym:SkyRLGymEnv", "skyrl_gym", "skyrl-gym"),
        ("openenv:OpenEnvEnv", "openenv.core.generic_client", "openenv"),
        ("verifiers:VerifiersEnv", "verifiers", "'verifiers<0.4'"),
    ):
        monkeypatch.setitem(sys.modules, module, None)
        message = rf"environment.factory=.*{name}.*pip install {package}$"
        with pytest.raises(ConfigError, match=message):
            load_factory(f"{ADAPTERS}.{name}", given, ["prompt"])
    # Each version of verifiers is sent to its own module.
    agent = f"{ADAPTERS}.verifiers_agent:run"
    monkeypatch.setitem(sys.modules, "verifiers", None)
    with pytest.raises(ConfigError, match=rf"environment.factory='{agent}'.* 'verifiers>=0.4'$"):
        Agent(agent, {"taskset": "t"}, ["prompt"])
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace(MultiTurnEnv=None))
    with pytest.raises(
        ConfigError, match=r"older than 0.4.*aligner_environments.verifiers:VerifiersEnv$"
    ):
        Agent(agent, {"taskset": "t"}, ["prompt"])
    monkeypatch.setitem(sys.modules, "verifiers", SimpleNamespace())
    with pytest.raises(ConfigError, match=rf"kind=endpoint and environment.factory={agent}\. "):
        load_factory(f"{ADAPTERS}.verifiers:VerifiersEnv", {"environment": "e"}, ["prompt"])


class Discrete:
    def __init__(self, n, start=0):
        self.n, self.start = n, start


Text = type("Text", (), {"contains": lambda self, text: text.isalpha()})
Box = type("Box", (), {"__repr__": lambda self: "Box(-1, 1)"})


def second_word(text, space):
    words = text.split()
    return space.n * int(words[1]) if len(words) > 1 else None


@pytest.mark.parametrize(
    ("space", "options", "said", "action"),
    [
        (Discrete(4), {}, "not 0 but 3.", 3),
        (Discrete(4), {}, "4", None),
        (Discrete(4), {}, "7 is too much: 2", 2),
        (Discrete(4), {}, "-1", None),
        (Discrete(3, start=-1), {}, "I take -1", -1),
        (Discrete(4), {}, "none", None),
        (Discrete(4), {}, "9" * 30, None),
        (Discrete(2), {"names": ["left", "left up"]}, "left, no: Left Up!", 1),
        (Discrete(2, start=1), {"names": ["go", "stop"]}, "stop going, go", 1),
        (Discrete(2), {"names": ["go", "stop"]}, "going", None),
        (Text(), {}, " abc\n", "abc"),
        (Text(), {}, "1", None),
        (Discrete(5), {"function": f"{HERE}:second_word"}, "a 2", 10),
        (Discrete(5), {"function": f"{HERE}:second_word"}, "a", None),
    ],
)
def test_actions_of_messages(space, options, said, action):
    parse, _ = action_parser(space, **options)
    assert parse(said) == action


def test_spaces_without_a_parser_and_observations():
    with pytest.raises(ConfigError, match=r"Box\(-1, 1\).* as environment.kwargs.action"):
        action_parser(Box())
    with pytest.raises(ConfigError, match=r"actions=\['a'\] has 1 names, and the .* 2 actions"):
        action_parser(Discrete(2), ["a"])
    assert action_parser(Discrete(3, start=1))[1] == "Answer with a number from 1 to 3."
    assert action_parser(Discrete(2), ["a", "b"])[1] == "Answer with one of: a, b."
    assert "columns" in GymnasiumEnv.__init__.__annotations__  # any row can be given
    assert as_text("as it is") == "as it is"
    assert (
        as_text({"board": torch.tensor([1, 2]), 3: (True, None)})
        == '{"board": [1, 2], "3": [true, null]}'
    )
    # The policy's prompt: numbers stay numbers, other objects are their text.
    other = {"limit": math.inf, "day": date(2020, 1, 2), "seed": 2**70}
    assert as_text(other) == f'{{"limit": Infinity, "day": "2020-01-02", "seed": {2**70}}}'
    assert without_colours("\n\x1b[43m\x1b[34;1mR\x1b[0m\x1b[0mF\x1b[41mG\x1b[0m\n") == "[R]F[G]"


@pytest.mark.integration
def test_the_page_s_class_of_nemo_rl(tmp_path, monkeypatch):
    write_files(tmp_path)
    monkeypatch.chdir(tmp_path)
    with Game("nemo_rl:NeMoRLEnv", kwargs_of("nemo_rl"), {"prompt": None}) as game:
        assert game.begin().messages == [{"role": "user", "content": "Say cat."}]
        turn = game.say("cat")
        assert turn.messages == [{"role": "user", "content": "again"}]
        assert (turn.score, turn.done) == (1.0, False)
        last = game.say("dog")
        assert (last.score, last.done) == (0.0, True)


class Coroutine:
    def __init__(self, config):
        self.config = config

    async def step(self, log, metadata):
        return SimpleNamespace(
            observations=[{"role": "environment", "content": str(len(log[0]))}],
            **{"metadata": [None], "answers": [metadata[0]["x"]]},
            **{"rewards": [[0.5, 0.25]], "terminateds": [False]},
        )


def test_nemo_rls_interface_rewards_and_actors():
    given = {"config": {"a": 1}, "prompt": "q", "x": 7, "observation_role": "tool"}
    env = NeMoRLEnv(seed=0, environment=f"{HERE}:Coroutine", **given)
    for length in (2, 4):  # metadata that is None leaves the last one
        turn = asyncio.run(env.step(say("w")))
        assert turn.messages == [{"role": "tool", "content": str(length)}]
        assert turn.reward == {"reward": 0.75, "reward1": 0.5, "reward2": 0.25}
        assert turn.info == {"answer": 7}
    assert env._environment.config == {"a": 1}
    env.close()
    with pytest.raises(DataError, match="begins with no message"):
        NeMoRLEnv(seed=0, environment=f"{HERE}:Coroutine", config={})
    with pytest.raises(ConfigError, match="NoReset' has no method step"):
        NeMoRLEnv.check_kwargs({"environment": f"{HERE}:NoReset"})
    assert reward_of(torch.tensor([0.5])) == 0.5
    assert reward_of(torch.tensor([[1.0, 2.0]])) == {"reward": 3, "reward1": 1, "reward2": 2}
    parts = reward_of({"form": torch.tensor([0.5]), "right": [1]})
    assert parts == {"reward": 1.5, "form": 0.5, "right": 1.0}
    assert actor_class(ray.remote(Coroutine)) is Coroutine
    assert actor_class(Coroutine) is Coroutine


def test_results_and_settings_of_mcp_and_skyrl_gym(monkeypatch):
    text = {"type": "text", "text": "42"}
    assert result_text({"content": [text, {"type": "image"}]}) == "42\n[image]"
    assert result_text({"content": [text], "isError": True}) == "error: 42"
    assert result_text({"structuredContent": {"a": 1}}) == "{'a': 1}"
    monkeypatch.setitem(sys.modules, "mcp", asyncio)  # any module
    with pytest.raises(ConfigError, match=r"environment.kwargs.command='python s.py' must be a"):
        MCPEnv.check_kwargs({"command": "python s.py"})
    with pytest.raises(ConfigError, match=r"environment.kwargs.reward is not set"):
        MCPEnv.check_kwargs({"command": ["python"]})
    MCPEnv.check_kwargs(
        {"command": ["python"], "reward": "aligner.examples.tasks.exact_number:reward"}
    )
    with pytest.raises(ConfigError, match=r"environment.kwargs.id is not set, and the data has no"):
        SkyRLGymEnv(seed=0, prompt="q")


def test_a_context_is_entered_and_left_in_one_task():
    tasks = []

    @asynccontextmanager
    async def context():
        tasks.append(asyncio.current_task())
        yield len(tasks)
        tasks.append(asyncio.current_task())

    @asynccontextmanager
    async def fails():
        raise OSError("no")
        yield

    loop = LoopThread()
    assert loop.enter(context()) == 1
    assert loop.run(asyncio.sleep(0.001, 8)) == 8
    assert len(tasks) == 1  # still inside
    with pytest.raises(OSError, match="no"):
        loop.enter(fails())
    loop.close()
    loop.close()
    assert len(tasks) == 2
    assert tasks[0] is tasks[1]
