"""Environments of gymnasium, skyrl-gym and MCP servers: the real packages, in real processes."""

import time

import psutil
import pytest
from played import Game, kwargs_of

from aligner.environments.pool import Failure
from aligner.environments.tools import HOW_TO_CALL
from aligner.errors import ConfigError

pytestmark = pytest.mark.extended
GYMNASIUM, MCP, SKYRL = "gymnasium:GymnasiumEnv", "mcp:MCPEnv", "skyrl_gym:SkyRLGymEnv"


def test_the_page_s_frozen_lake(packages):
    with Game(GYMNASIUM, kwargs_of("gymnasium"), {"prompt": "not used"}) as game:
        (first,) = game.begin().messages
        assert first["content"].splitlines()[:2] == [
            "Answer with one of: left, down, right, up.",
            "[S]FFF",
        ]
        lost = game.say("somewhere")
        assert (lost.score, lost.done, lost.info) == (0.0, False, {"invalid": True})
        assert lost.messages[0]["content"] == "Answer with one of: left, down, right, up."
        moved = game.say("not right but Down")
        assert moved.messages[0]["content"].splitlines()[1:3] == ["SFFF", "[F]HFH"]
        turns = [game.say(text) for text in ("down", "right", "right", "down", "right")]
        assert [turn.score for turn in turns] == [0, 0, 0, 0, 1]
        assert [turn.done for turn in turns] == [False] * 4 + [True]


def test_functions_of_ones_own_and_truncation(folder):
    (folder / "mine.py").write_text(
        "import gymnasium\n"
        "class Sum(gymnasium.Env):\n"
        "    action_space = gymnasium.spaces.Box(-9, 9, (1,))\n"
        "    observation_space = gymnasium.spaces.Dict(\n"
        "        {'sum': gymnasium.spaces.Box(-99, 99, (1,))})\n"
        "    def reset(self, seed=None, options=None):\n"
        "        self.sum = options['first']\n"
        "        return {'sum': self.sum}, {}\n"
        "    def step(self, action):\n"
        "        self.sum += action[0]\n"
        "        return {'sum': self.sum}, -0.5, False, False, {'extra': 1}\n"
        "gymnasium.register('Sum-v0', entry_point=Sum, max_episode_steps=2,\n"
        "    disable_env_checker=True)\n"
        "def act(text, space):\n"
        "    return [float(text)] if text.strip() else None\n"
        "def show(observation, info):\n"
        "    return f\"it is {observation['sum']:g}\"\n"
    )
    kwargs = {"id": "mine:Sum-v0", "action": "mine.py:act", "observation": "mine.py:show"}
    kwargs |= {"instructions": "Add.", "invalid_reward": -1}
    with Game(GYMNASIUM, kwargs, {"options": {"first": 3}}) as game:
        assert game.begin().messages[0]["content"] == "Add.\nit is 3"
        assert game.say(" ").score == -1.0
        one, two = game.say("2"), game.say("-1")
    assert [turn.messages[0]["content"] for turn in (one, two)] == ["it is 5", "it is 4"]
    assert [(turn.score, turn.done) for turn in (one, two)] == [(-0.5, False), (-0.5, True)]
    expected = {"extra": 1, "truncated": True, "TimeLimit.truncated": True}
    assert two.info | {"TimeLimit.truncated": True} == expected  # some versions have this key


@pytest.mark.parametrize(
    ("name", "kwargs", "said"),
    [
        (GYMNASIUM, {"id": "NoSuch-v0"}, r"environment.kwargs.id='NoSuch-v0'"),
        (GYMNASIUM, {"id": "Pendulum-v1"}, r"Box.* environment.kwargs.action"),
        (GYMNASIUM, {"id": "CartPole-v1", "action": "no_file.py:act"}, "does not exist"),
        (SKYRL, {"id": "no_such"}, r"environment.kwargs.id='no_such' is not in .*gsm8k"),
        (MCP, {"command": []}, r"environment.kwargs.command=\[\] must be a list of words"),
    ],
)
def test_what_cannot_be_made_is_refused_at_once(packages, name, kwargs, said):
    with pytest.raises(ConfigError, match=rf"environment.factory=.*{name}.*{said}"):
        Game(name, kwargs, {"prompt": "q"})


def test_the_page_s_server(folder):
    with Game(MCP, kwargs_of("mcp"), {"prompt": "6*7=", "ground_truth": "42"}) as game:
        (first,) = game.begin().messages
        assert first["content"].split("\n") == [
            'call multiply {"a": "<integer>", "b": "<integer>"}: Multiply two numbers.',
            *HOW_TO_CALL.split("\n"),
            "6*7=",
        ]
        (said,) = game.say(
            'call multiply {"a": 6, "b": 7}\ncall multiply {"a": "x"}\n'
            'call multiply {"a": 2, "b": 2}'
        ).messages
        right, wrong, other = said["content"].split("\nresult of ")
        assert (right, other) == ("result of multiply: 42", "multiply: 4")
        assert "error: " in wrong
        servers = psutil.Process(game.pool.pid(0)).children(recursive=True)
        assert len(servers) == 1
        end = game.say("42")
        assert (end.score, end.done, end.parts["accuracy"]) == (1.0, True, 1.0)
        assert game.call("close").value is None
        assert psutil.wait_procs(servers, timeout=10)[1] == []


def test_schemas_of_a_server_and_one_that_hangs(folder):
    (folder / "slow.py").write_text(
        "import os, time\n"
        "from mcp.server.mcpserver import MCPServer\n"
        "server = MCPServer('slow')\n"
        "@server.tool()\n"
        "def wait(seconds: float) -> str:\n"
        "    'Wait.'\n"
        "    time.sleep(seconds)\n"
        "    return os.environ['MARK']\n"
        "@server.tool()\n"
        "def other() -> str:\n"
        "    'Other.'\n"
        "server.run()\n"
    )
    kwargs = {"command": ["python", "slow.py"], "tools": ["wait"], "variables": {"MARK": "here"}}
    kwargs["reward"] = "aligner.examples.tasks.exact_number:reward"
    with Game(MCP, kwargs, {"prompt": "q"}) as game:
        (tool,) = game.begin().tools
        assert tool["function"]["name"] == "wait"
        assert tool["function"]["parameters"]["properties"]["seconds"]["type"] == "number"
        call = '<tool_call>{"name": "wait", "arguments": {"seconds": %s}}</tool_call>'
        assert game.say(call % 0).messages[0]["content"] == "here"
        servers = psutil.Process(game.pool.pid(0)).children(recursive=True)
        began = time.monotonic()
        hung = game.call("step", {"role": "assistant", "content": call % 600}, limit_s=2.0)
        assert isinstance(hung, Failure)
        assert hung.reason == "env_timeout"
        assert time.monotonic() - began < 20
        assert psutil.wait_procs(servers, timeout=10)[1] == []
    unknown = {**kwargs, "tools": ["wait", "fly"]}
    with Game(MCP, unknown, {"prompt": "q"}) as game:
        failure = game.call("begin", (1, {"prompt": "q"}))
        assert "the server has no fly, only wait, other" in failure.text


def test_the_page_s_gsm8k(packages):
    with Game(SKYRL, kwargs_of("skyrl_gym"), {"prompt": "What is 2+2?"}) as game:
        assert game.begin().messages == [{"role": "user", "content": "What is 2+2?"}]
        wrong = game.say("#### 5")
        assert (wrong.score, wrong.done) == (pytest.approx(0.2 / 3), False)
        right = game.say("so\n#### 4")
        assert (right.score, right.done, right.parts["steps"]) == (1.0, True, 2.0)


def test_a_class_of_ones_own_for_skyrl_gym(folder):
    (folder / "mine.py").write_text(
        "from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput\n"
        "class Echo(BaseTextEnv):\n"
        "    def __init__(self, env_config, extras):\n"
        "        super().__init__()\n"
        "        self.left, self.word = env_config.turns, extras['word']\n"
        "    def step(self, action):\n"
        "        self.left -= 1\n"
        "        return BaseTextEnvStepOutput(\n"
        "            observations=[{'role': 'user', 'content': self.word}],\n"
        "            reward=float(len(action)), done=self.left == 0,\n"
        "            metadata={'left': self.left},\n"
        "            postprocessed_action=action.upper())\n"
    )
    kwargs = {"id": "mine.py:Echo", "env_config": {"turns": 2}}
    with Game(SKYRL, kwargs, {"prompt": "q", "word": "w"}) as game:
        game.begin()
        one, two = game.say("abc"), game.say("a")
    assert one.info == {"left": 1, "postprocessed_action": "ABC"}
    assert [turn.messages[0]["content"] for turn in (one, two)] == ["w", "w"]
    assert [(turn.score, turn.done) for turn in (one, two)] == [(3.0, False), (1.0, True)]
