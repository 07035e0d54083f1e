"""The environment of docs/environments.md is one: it plays as the page says."""

import pytest
from documented import ROOT

from aligner.environments.pool import Call, EnvironmentPool

pytestmark = pytest.mark.integration

PAGE = (ROOT / "docs" / "environments.md").read_text()


@pytest.fixture
def pool(tmp_path):
    source = PAGE.split("```python\n", 1)[1].split("```", 1)[0]
    assert len(source.splitlines()) <= 32
    path = tmp_path / "my_game.py"
    path.write_text(source)
    pool = EnvironmentPool(f"{path}:Counting", {"turns": 2}, ["anything"])
    yield pool
    pool.close()


def test_the_page_s_environment_counts(pool):
    def call(name, argument=None):
        return pool.call([Call(0, name, argument, 30.0)])[0].value

    start = call("begin", (3, {"anything": 1}))
    number = int(start.messages[0]["content"].removeprefix("Count on from ").rstrip("."))
    right = call("step", {"role": "assistant", "content": f" {number + 1}\n"})
    assert (right.score, right.done, right.messages[0]["content"]) == (1.0, False, "yes")
    wrong = call("step", {"role": "assistant", "content": "many"})
    assert (wrong.score, wrong.done, wrong.parts) == (0.0, True, {"accuracy": 0.0})
    assert call("close") is None


def test_the_page_s_tools_are_called(tmp_path):
    """The subclass of the page shows its function, answers a call, and scores the answer."""
    source = next(
        block for block in PAGE.split("```python\n")[1:] if block.startswith("# my_tools.py")
    )
    path = tmp_path / "my_tools.py"
    path.write_text(source.split("```", 1)[0])
    kwargs = {"form": "plain"}
    pool = EnvironmentPool(f"{path}:Secret", kwargs, ["prompt"])

    def call(name, argument=None):
        return pool.call([Call(0, name, argument, 30.0)])[0].value

    try:
        start = call("begin", (3, {"prompt": "Which number is it?"}))
        assert 'call is_below {"number": "<integer>"}' in start.messages[0]["content"]
        text = 'call is_below {"number": 50}'
        turn = call("step", {"role": "assistant", "content": text})
        assert (turn.score, turn.done) == (None, False)
        assert "yes" in turn.messages[0]["content"]
        end = call("step", {"role": "assistant", "content": " 42\n"})
        assert (end.score, end.done, end.parts) == (1.0, True, {"accuracy": 1.0})
    finally:
        pool.close()
