"""`environment.tools`: functions as tools, a reward function for the answer, no rows of its own."""

import pytest
from omegaconf import OmegaConf
from played import answers_of

from aligner.config import EnvironmentConfig
from aligner.config.load import with_built_in_task
from aligner.data.readers import read_rows
from aligner.environments.functions import FunctionTools
from aligner.environments.pool import Call, EnvironmentPool, Failure
from aligner.environments.tools import HOW_TO_CALL
from aligner.errors import ConfigError

FILE = '''
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b

def untyped(a):
    """Take anything.

    Args:
        a: It.
    """

def trl(prompts, completions, level, **kwargs):
    assert prompts == [[{"role": "user", "content": "2+3?"}]], prompts
    return [float(c[0]["content"] == "5") + n for c, n in zip(completions, level)]

def score(solution_str, ground_truth):
    return float(solution_str == ground_truth)

class Fails:
    def __init__(self, *, seed, init="None", step="None"):
        self._init, self._step = init, step
    def init(self):
        from aligner.environments import Start
        start = Start([{"role": "user", "content": "?"}])
        return start if self._init == "None" else self.do(self._init)
    def step(self, message):
        return self.do(self._step)
    def do(self, code):
        from aligner.environments import Turn
        return eval(code)
    def fail(self, kind):
        raise {**vars(__import__("builtins")), **vars(__import__("json"))}[kind]("x", "", 0)
'''


@pytest.fixture
def file(tmp_path):
    (tmp_path / "f.py").write_text(FILE)
    return tmp_path / "f.py"


def environment(file, reward="score", form="plain", **columns):
    kwargs = {"tools": [f"{file}:add"], "reward": f"{file}:{reward}"}
    FunctionTools.check_kwargs(kwargs)
    return FunctionTools(seed=0, prompt="2+3?", form=form, **kwargs, **columns)


def test_templates_with_and_without_tools(file):
    tools = environment(file, ground_truth="5")
    start = tools.init()
    assert start.tools is None
    lines = start.messages[0]["content"].splitlines()
    assert lines[0].startswith("call add ")
    assert lines[1:] == [HOW_TO_CALL, "2+3?"]
    turn = tools.step({"role": "assistant", "content": 'call add {"a": 2, "b": 3}'})
    assert (turn.done, turn.reward) == (False, None)
    assert turn.messages == [{"role": "user", "content": "result of add: 5"}]
    assert tools.step({"role": "assistant", "content": "5"}).reward == {"reward": 1.0}
    tools = environment(file, "trl", "hermes", level=2)
    start = tools.init()
    assert start.messages == [{"role": "user", "content": "2+3?"}]
    assert start.tools[0]["function"]["parameters"]["required"] == ["a", "b"]
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
    assert tools.step({"role": "assistant", "content": call}).messages[0]["content"] == "5"
    assert tools.step({"role": "assistant", "content": "5"}).reward == {"reward": 3.0}


def test_unusable_tools_are_refused_before_the_run(file):
    for tools, reward, message in [
        (["untyped"], "score", "tool 'untyped': parameter 'a' needs a type hint"),
        (["missing"], "score", r"environment.tools=.* has no function 'missing'"),
        (["add", "add"], "score", "two functions are named 'add'"),
        (["add"], None, r"environment.kwargs.reward is not set"),
    ]:
        kwargs = {"tools": [f"{file}:{tool}" for tool in tools]}
        kwargs |= {"reward": reward and f"{file}:{reward}"}
        with pytest.raises(ConfigError, match=message):
            FunctionTools.check_kwargs(kwargs)


def test_tools_are_an_environment_that_brings_its_tasks():
    tools = EnvironmentConfig(tools=("m:f",), kwargs={"reward": "m:r"})
    assert tools.is_set
    assert tools.arguments == {"tools": ["m:f"], "reward": "m:r"}
    assert tools.setting == "environment.tools=['m:f']"
    values = {"environment": {"factory": "m:C"}, "reward": {"function": None}}
    config = OmegaConf.create({**values, "data": {"train": {"source": "???"}}})
    assert "data.train.source is not set" in with_built_in_task(config)
    assert [row.columns for row in read_rows(config.data.train.source, {"count": 2})] == [{}, {}]
    config = OmegaConf.create({**values, "data": {"train": {"source": "rows.jsonl"}}})
    assert with_built_in_task(config) == ""
    assert config.data.train.source == "rows.jsonl"


@pytest.mark.integration
def test_a_repetition_mends_no_error_of_the_code(file):
    """An error of `begin` is final if it depends on seed and row only; others may be temporary."""
    begin = {
        "final": ["['text']", "nothing", "1 + 'a'", "[].a", "{}['key']", "int('x')", "[][0]"],
        "raised": ["self.fail('OSError')", "self.fail('JSONDecodeError')"],
    }
    step = {
        "final": ["[]", "nothing", "__import__('no')", "Turn()", "Turn([{}])", "Turn((), '1', 1)"],
        "fault": ["None.group()", "len(1)"],
        "raised": ["{}['key']", "int('x')", "Turn((), 1e99, True)", "self.fail('OSError')"],
    }
    cases = [("init", k, code) for k, codes in begin.items() for code in codes]
    cases += [("step", k, code) for k, codes in step.items() for code in codes]
    with EnvironmentPool(f"{file}:Fails", {}, ["init", "step"]) as pool:
        for name, kind, code in cases:
            answer = answers_of(pool, [Call(0, "begin", (0, {name: code}), 30.0)])[0]
            if name == "step":
                assert not isinstance(answer, Failure), answer
                answer = answers_of(pool, [Call(0, "step", {"content": "5"}, 30.0)])[0]
            assert (name, code, answer.kind) == (name, code, kind)
