"""The environments of docs/environments.md play as the page says."""

import pytest
from played import Game, write_files

pytestmark = pytest.mark.integration


@pytest.fixture
def folder(tmp_path):
    write_files(tmp_path, "docs/environments.md")
    return tmp_path


def test_the_page_s_environment_counts(folder):
    assert len((folder / "my_game.py").read_text().splitlines()) <= 32
    with Game(f"{folder}/my_game.py:Counting", {"turns": 2}, {"anything": 1}) as game:
        (first,) = game.begin().messages
        number = int(first["content"].removeprefix("Count on from ").rstrip("."))
        right = game.say(f" {number + 1}\n")
        assert (right.score, right.done, right.messages[0]["content"]) == (1.0, False, "yes")
        wrong = game.say("many")
        assert (wrong.score, wrong.done, wrong.parts) == (0.0, True, {"accuracy": 0.0})
        assert game.call("close").value is None


def test_the_page_s_tools_are_called(folder):
    columns = {"prompt": "Which number is it?"}
    with Game(f"{folder}/my_tools.py:Secret", {"form": "plain"}, columns, seed=3) as game:
        assert 'call is_below {"number": "<integer>"}' in game.begin().messages[0]["content"]
        turn = game.say('call is_below {"number": 50}')
        assert (turn.score, turn.done) == (None, False)
        assert "yes" in turn.messages[0]["content"]
        end = game.say(" 42\n")
        assert (end.score, end.done, end.parts) == (1.0, True, {"accuracy": 1.0})
