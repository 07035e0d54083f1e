"""The environment of docs/environments.md is one: it plays as the page says."""

from contextlib import contextmanager

import pytest
from documented import ROOT
from played import answers_of

from aligner.environments.pool import Call, EnvironmentPool

pytestmark = pytest.mark.integration

PAGE = (ROOT / "docs" / "environments.md").read_text()


@contextmanager
def played(tmp_path, source, name, *arguments):
    """``call(name, argument)`` of an environment of the page."""
    path = tmp_path / "mine.py"
    path.write_text(source.split("```", 1)[0])
    with EnvironmentPool(f"{path}:{name}", *arguments) as pool:
        yield lambda name, argument=None: answers_of(pool, [Call(0, name, argument, 30.0)])[0].value


def test_the_page_s_environment_counts(tmp_path):
    source = PAGE.split("```python\n", 1)[1]
    assert len(source.split("```", 1)[0].splitlines()) <= 32
    with played(tmp_path, source, "Counting", {"turns": 2}, ["anything"]) as call:
        start = call("begin", (3, {"anything": 1}))
        number = int(start.messages[0]["content"].removeprefix("Count on from ").rstrip("."))
        right = call("step", {"role": "assistant", "content": f" {number + 1}\n"})
        assert (right.score, right.done, right.messages[0]["content"]) == (1.0, False, "yes")
        wrong = call("step", {"role": "assistant", "content": "many"})
        assert (wrong.score, wrong.done, wrong.parts) == (0.0, True, {"accuracy": 0.0})
        assert call("close") is None


def test_the_page_s_tools_are_called(tmp_path):
    sources = PAGE.split("```python\n")
    (source,) = (block for block in sources if block.startswith("# my_tools.py"))
    with played(tmp_path, source, "Secret", {"form": "plain"}, ["prompt"]) as call:
        start = call("begin", (3, {"prompt": "Which number is it?"}))
        assert 'call is_below {"number": "<integer>"}' in start.messages[0]["content"]
        turn = call("step", {"role": "assistant", "content": 'call is_below {"number": 50}'})
        assert (turn.score, turn.done) == (None, False)
        assert "yes" in turn.messages[0]["content"]
        end = call("step", {"role": "assistant", "content": " 42\n"})
        assert (end.score, end.done, end.parts) == (1.0, True, {"accuracy": 1.0})
