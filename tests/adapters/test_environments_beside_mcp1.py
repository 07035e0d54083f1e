"""Environments of verifiers 0.3 and OpenEnv, and a server of MCP 1: the real packages."""

import pytest
from played import Game, kwargs_of
from servers import started

pytestmark = pytest.mark.extended
PACKAGES = ".venv-adapters-mcp1"  # these want version 1 of mcp
VERIFIERS, OPENENV, MCP = "verifiers:VerifiersEnv", "openenv:OpenEnvEnv", "mcp:MCPEnv"


def test_the_page_s_verifiers(folder):
    kwargs = kwargs_of("verifiers")
    with Game(VERIFIERS, kwargs, {"prompt": "Say dog.", "answer": "dog", "label": 1}) as game:
        system, asked = game.begin().messages
        assert (system["role"], system["content"]) == ("system", "Be brief.")
        assert (asked["role"], asked["content"]) == ("user", "Say dog.")
        turn = game.say("cat")
        assert turn.messages == [{"role": "user", "content": "again"}]
        assert (turn.score, turn.done) == (None, False)
        end = game.say("a dog")
        assert (end.score, end.done, end.parts["said_answer"]) == (1.0, True, 1.0)
        assert game.call("close").value is None
        assert game.begin().messages[1]["content"] == "Say dog."  # left in the middle
        assert game.call("close").value is None
    with Game(VERIFIERS, kwargs) as game:
        assert [each["content"] for each in game.begin().messages] == ["Be brief.", "Say cat."]


def test_tools_of_verifiers(folder):
    (folder / "mine.py").write_text(
        "import verifiers as vf\n"
        "from datasets import Dataset\n"
        "def double(number: int) -> int:\n"
        "    '''Double a number.\n\n    Args:\n        number: Any.\n    '''\n"
        "    return 2 * number\n"
        "def right(completion, answer, **kwargs):\n"
        "    return float(completion[-1]['content'].endswith(answer))\n"
        "def load_environment():\n"
        "    rows = Dataset.from_list([{'question': '2*21?', 'answer': '42'}])\n"
        "    return vf.ToolEnv(dataset=rows, tools=[double], rubric=vf.Rubric(funcs=[right]))\n"
    )
    with Game(VERIFIERS, {"environment": "mine.py:load_environment"}) as game:
        start = game.begin()
        assert [tool["function"]["name"] for tool in start.tools] == ["double"]
        call = '<tool_call>{"name": "double", "arguments": {"number": 21}}</tool_call>'
        (said,) = game.say(call).messages
        assert (said["role"], said["content"]) == ("tool", "42")
        assert game.say("it is 42").score == 1.0


SERVER = """
import socket
import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app

class Said(Action):
    message: str

class Heard(Observation):
    reply: str
    words: list[int] = []

class Echo(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.count = 0
        return Heard(reply=f"seed {seed}")

    def step(self, action, timeout_s=None, **kwargs):
        self.count += 1
        return Heard(
            reply=action.message.upper(), reward=None if self.count == 1 else 0.5,
            done=self.count == 2, words=[self.count],
        )

    @property
    def state(self):
        return State(step_count=self.count)

app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)  # connections wait in its queue until uvicorn accepts
uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])
"""


@pytest.fixture
def port(folder):
    (folder / "server.py").write_text(SERVER)
    with started(["python", "server.py"], r"^(\d+)$", cwd=folder, env={}) as (number, _):
        yield int(number)


def test_the_page_s_openenv(folder, port):
    address = f"http://127.0.0.1:{port}"
    with Game(OPENENV, {**kwargs_of("openenv"), "base_url": address}, {"prompt": "p"}, 5) as game:
        assert game.begin().messages == [{"role": "user", "content": "seed 5"}]
        one, two = game.say("a"), game.say("b")
        assert [each.messages[0]["content"] for each in (one, two)] == ["A", "B"]
        assert [(each.score, each.done) for each in (one, two)] == [(None, False), (0.5, True)]
        assert game.call("close").value is None
        assert game.begin().messages == [{"role": "user", "content": "seed 5"}]
    (folder / "mine.py").write_text(
        "def act(text):\n    return {'message': text * 2}\n"
        "def show(fields):\n    return '/'.join([fields['reply'], *map(str, fields['words'])])\n"
    )
    kwargs = {"base_url": address, "action": "mine.py:act", "instructions": "Echo."}
    with Game(OPENENV, {**kwargs, "observation": "mine.py:show"}) as game:
        assert game.begin().messages[0]["content"] == "Echo.\nseed 1"
        assert game.say("a").messages[0]["content"] == "AA/1"
    with Game(OPENENV, {"base_url": address}) as game:
        assert game.begin().messages[0]["content"] == '{"reply": "seed 1", "words": []}'


def test_a_server_of_mcp_1(folder):
    (folder / "server.py").write_text(
        "from mcp.server.fastmcp import FastMCP\n"
        "server = FastMCP('older')\n"
        "@server.tool(name='double-it')\n"
        "def double(number: int) -> int:\n"
        "    'Double a number.'\n"
        "    return 2 * number\n"
        "server.run()\n"
    )
    kwargs = {
        "command": ["python", "server.py"],
        "reward": "aligner.examples.tasks.exact_number:reward",
        "form": "plain",
    }
    with Game(MCP, kwargs, {"prompt": "q", "ground_truth": 42}) as game:
        game.begin()
        (said,) = game.say('call double_it {"number": 21}').messages
        assert said["content"] == "result of double_it: 42"
        assert game.say("42").score == 1.0
