"""`environment.tools`: functions as tools, a reward function for the answer, no rows of its own."""

import pytest
from omegaconf import OmegaConf

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

class Broken:
    def __init__(self, *, seed, **columns):
        if seed == 1:
            raise OSError("busy")
    def init(self):
        return ["text"]
    def step(self, message):
        if message["content"] == "list":
            return []
        raise NameError if message["content"] == "name" else AssertionError

class Answers(Broken):
    def init(self):
        from aligner.environments import Start
        return Start([{"role": "user", "content": "2+3?"}])
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
def test_a_refused_start_is_final_and_an_exception_is_not(file):
    pool = EnvironmentPool(f"{file}:Broken", {}, [])
    try:
        refused, raised = (pool.call([Call(0, "begin", (seed, {}), 30.0)])[0] for seed in (0, 1))
    finally:
        pool.close()
    assert isinstance(refused, Failure)
    assert refused.is_final
    assert "init returned ['text']; it must return a Start" in refused.text
    assert not raised.is_final
    assert "OSError: busy" in raised.text


@pytest.mark.integration
@pytest.mark.parametrize(("content", "is_final"), [("list", True), ("name", True), ("5", False)])
def test_an_error_of_the_code_is_final(file, content, is_final):
    pool = EnvironmentPool(f"{file}:Answers", {}, [])
    try:
        pool.call([Call(0, "begin", (0, {}), 30.0)])
        failure = pool.call([Call(0, "step", {"content": content}, 30.0)])[0]
    finally:
        pool.close()
    assert failure.is_final == is_final
