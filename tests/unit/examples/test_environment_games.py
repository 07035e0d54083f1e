"""The sliding puzzle: moves, rewards of turns, boards that can be solved. Next numbers: rewards."""

import itertools

import pytest
from played import say

from aligner.errors import ConfigError
from aligner.examples.tasks.games import NextNumber, SlidingPuzzle, next_numbers, sliding_puzzles


def test_tiles_slide_into_the_gap():
    game = SlidingPuzzle(seed=0, board=[1, 2, 3, 4, 0, 5, 7, 8, 6])
    assert game.init().messages[0]["content"] == "1 2 3\n4 . 5\n7 8 6\nup, down, left, right?"
    left = game.step(say(" Left, please"))
    assert left.messages[0]["content"] == "1 2 3\n4 5 .\n7 8 6"
    assert left.reward == {"reward": pytest.approx(0.1), "accuracy": 0.0}
    assert game.step(say("left")).messages[0]["content"].startswith("no such move\n1 2 3\n4 5 .")
    assert game.step(say("leftish")).score == 0.0
    back = game.step(say("right"))
    assert back.score == pytest.approx(-0.1)  # there and back earns nothing
    assert game.step(say("l")).score == pytest.approx(0.1)
    solved = game.step(say("up"))
    assert (solved.score, solved.done) == (pytest.approx(1.1), True)
    assert solved.parts == {"accuracy": 1.0}
    assert solved.messages == []


def test_the_game_ends_after_its_moves():
    game = SlidingPuzzle(seed=0, board=[1, 2, 0, 3], width=2, height=2, moves=2)
    first, last = game.step(say("down")), game.step(say("what?"))
    assert (first.done, last.done) == (False, True)
    assert last.parts == {"accuracy": 0.0}


def solvable(width, height):
    """Every board that moves come to from the one in order."""
    size = width * height
    found, new = set(), {(*range(1, size), 0)}
    while new:
        found |= new
        nexts = set()
        for board in new:
            for move in ("up", "down", "left", "right"):
                game = SlidingPuzzle(seed=0, width=width, height=height)
                game._board = list(board)
                game.step(say(move))
                nexts.add(tuple(game._board))
        new = nexts - found
    return found


def test_boards_that_cannot_be_solved_are_refused():
    """Of all orders of 2x2 and 3x2 half can, and it is that half."""
    for width, height in ((2, 2), (3, 2)):
        can, taken = solvable(width, height), set()
        for board in itertools.permutations(range(width * height)):
            try:
                SlidingPuzzle(seed=0, board=board, width=width, height=height)
                taken.add(board)
            except ConfigError:
                pass
        assert taken == can
        assert len(taken) in (12, 360)
    for board in ([1, 2, 3], [1, 1, 2, 0], [1, 2, 3, 4]):
        with pytest.raises(ConfigError, match=r"from 0 .* to 3 once"):
            SlidingPuzzle(seed=0, board=board, width=2, height=2)
    with pytest.raises(ConfigError, match="width=1 and height=3"):
        SlidingPuzzle(seed=0, width=1)


def test_rows_of_puzzles():
    rows = list(sliding_puzzles(size=20, scramble=3))
    assert rows == list(sliding_puzzles(size=30, scramble=3))[:20]
    assert rows != list(sliding_puzzles("validation", size=20, scramble=3))
    assert all(SlidingPuzzle(seed=0, **row)._board == row["board"] for row in rows)
    home = [*range(1, 9), 0]
    assert all(row["board"] != home for row in sliding_puzzles(size=50, scramble=4))
    boards = {tuple(SlidingPuzzle(seed=seed)._board) for seed in range(20)}
    assert len(boards) > 10
    with pytest.raises(ConfigError, match="split='test'"):
        next(sliding_puzzles("test"))


def test_every_number_has_a_reward_of_its_own():
    game = NextNumber(seed=0, asked=[2, 4, 1, 3])
    assert game.init().messages[0]["content"] == "2"
    turns = [game.step(say(text)) for text in ("3", " 2 or so", "5?", "what")]
    assert [turn.score for turn in turns] == [1.0, 0.1, 0.1, 0.0]
    assert [turn.parts["accuracy"] for turn in turns] == [0.25] * 4  # so far
    assert [turn.done for turn in turns] == [False, False, False, True]
    asked = [message["content"] for turn in turns for message in turn.messages]
    assert asked == ["4", "1", "3"]
    for nothing in ("1", "6", "-3", ""):  # right for no number from 1 to 4
        assert NextNumber(seed=0, asked=[2]).step(say(nothing)).score == 0.0


def test_rows_of_numbers():
    rows = list(next_numbers(size=20, high=9, turns=3))
    assert rows == list(next_numbers(size=30, high=9, turns=3))[:20]
    assert rows != list(next_numbers("validation", size=20, high=9, turns=3))
    assert {len(row["asked"]) for row in rows} == {3}
    assert {number for row in rows for number in row["asked"]} == set(range(1, 10))
    assert NextNumber(seed=4)._numbers == NextNumber(seed=4)._numbers != NextNumber(seed=5)._numbers
    for settings in ({"low": 5}, {"turns": 0}):
        with pytest.raises(ConfigError, match="next numbers needs low="):
            NextNumber(seed=0, **settings)
        with pytest.raises(ConfigError, match="next numbers needs low="):
            next(next_numbers(**settings))
    with pytest.raises(ConfigError, match="split='test'"):
        next(next_numbers("test"))
