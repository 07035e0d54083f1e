"""Games for small models, with a reward for every turn, and generators of their data."""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError

_NUMBER = re.compile(r"-?\d+")


def _number(message: dict[str, Any]) -> int | None:
    """Return the number at the beginning of a message, or None if there is none."""
    match = _NUMBER.match(message["content"].strip())
    return None if match is None else int(match.group()[:9])


class GuessingGame:
    """A game in which the policy guesses a number, with the answers ``higher`` and ``lower``.

    The reward of a turn is 1 for the number, ``hint_reward`` for another number that agrees with
    all earlier answers, and 0 otherwise. The game ends with the right guess or after ``guesses``.
    ``accuracy`` is 1 if the number was found.
    """

    def __init__(
        self,
        *,
        seed: int,
        secret: int | None = None,
        low: int = 1,
        high: int = 9,
        guesses: int = 4,
        hint_reward: float = 0.1,
        **columns: Any,
    ) -> None:
        """Choose the number by ``seed``, unless the row contains the column ``secret``."""
        del columns
        if not low < high:
            raise ConfigError(f"the guessing game needs low < high, got low={low} and high={high}")
        self._secret = random.Random(seed).randint(low, high) if secret is None else secret
        self._low, self._high = low, high
        self._left, self._hint_reward = guesses, hint_reward

    def init(self) -> Start:
        """Return the prompt with the range of the number."""
        return Start([{"role": "user", "content": f"{self._low}-{self._high}?"}])

    def step(self, message: dict[str, Any]) -> Turn:
        """Compare the number at the beginning of a message with the secret number."""
        self._left -= 1
        guess = _number(message)
        right = guess == self._secret
        reward = {"reward": 1.0 if right else 0.0, "accuracy": float(right)}
        # A guess narrows the range, inside of which later guesses earn `hint_reward`.
        answer = "a number?"
        if guess is not None and not right:
            if self._low <= guess <= self._high:
                reward["reward"] = self._hint_reward
            answer = "higher" if guess < self._secret else "lower"
            if guess < self._secret:
                self._low = max(self._low, guess + 1)
            else:
                self._high = min(self._high, guess - 1)
        return Turn(
            [] if right else [{"role": "user", "content": answer}],
            reward,
            done=right or self._left == 0,
        )


def guessing_games(
    split: str = "train", size: int = 1024, *, seed: int = 0, low: int = 1, high: int = 9
) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows with the column secret, a number from ``low`` to ``high``.

    Row ``i`` depends only on (seed, split, i).
    """
    _check_split(split, "guessing games")
    for index in range(size):
        yield {"secret": random.Random(f"{seed}/{split}/{index}").randint(low, high)}


class NextNumber:
    """A game in which the policy answers each of several numbers with the next larger number.

    The reward of a turn is 1 for that number, ``hint_reward`` for a number that would be right in
    another turn of such a game, and 0 otherwise. Turns are independent, so that all other rewards
    of the conversation are noise for a turn. ``accuracy`` is the share of right turns.
    """

    def __init__(
        self,
        *,
        seed: int,
        asked: Sequence[int] | None = None,
        low: int = 1,
        high: int = 4,
        turns: int = 8,
        hint_reward: float = 0.1,
        **columns: Any,
    ) -> None:
        """Choose ``turns`` numbers by ``seed``, unless the row contains the column ``asked``.

        Raises:
            ConfigError: the range or the sequence of numbers is empty.
        """
        del columns
        _check_numbers(low, high, turns if asked is None else len(asked))
        rng = random.Random(seed)
        self._numbers = _draw_numbers(rng, low, high, turns) if asked is None else [*asked]
        self._low, self._high, self._hint_reward = low, high, hint_reward
        self._turn = self._right_turns = 0

    def init(self) -> Start:
        """Return the prompt with the first number."""
        return Start([{"role": "user", "content": str(self._numbers[0])}])

    def step(self, message: dict[str, Any]) -> Turn:
        """Compare the number at the beginning of a message, and answer with the next number."""
        answer = _number(message)
        right = answer == self._numbers[self._turn] + 1
        # Right for another number between `low` and `high`.
        fits = answer is not None and self._low < answer <= self._high + 1
        self._turn += 1
        self._right_turns += right
        is_over = self._turn == len(self._numbers)
        return Turn(
            [] if is_over else [{"role": "user", "content": str(self._numbers[self._turn])}],
            {
                "reward": 1.0 if right else self._hint_reward if fits else 0.0,
                "accuracy": self._right_turns / len(self._numbers),
            },
            is_over,
        )


def next_numbers(
    split: str = "train",
    size: int = 1024,
    *,
    seed: int = 0,
    low: int = 1,
    high: int = 4,
    turns: int = 8,
) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows with the column asked, ``turns`` numbers from ``low`` to ``high``.

    Row ``i`` depends only on (seed, split, i).
    """
    _check_split(split, "next numbers")
    _check_numbers(low, high, turns)
    for index in range(size):
        rng = random.Random(f"{seed}/{split}/{index}")
        yield {"asked": _draw_numbers(rng, low, high, turns)}


def _draw_numbers(rng: random.Random, low: int, high: int, turns: int) -> list[int]:
    return [rng.randint(low, high) for _ in range(turns)]


def _check_numbers(low: int, high: int, turns: int) -> None:
    if not (low <= high and turns >= 1):
        raise ConfigError(
            f"the game of next numbers needs low={low} of at most high={high}, and turns={turns} "
            "of at least 1"
        )


class SlidingPuzzle:
    """A puzzle of numbered tiles around a gap, to be sorted with the gap at the end.

    A message names the direction in which a tile slides into the gap. The reward of a turn is
    ``progress_reward`` times the decrease of the tiles' distances to their target positions (steps
    along rows and columns, summed), and 1 more if all tiles are sorted. Moving back and forth earns
    0 in total, because the rewards are differences of a potential (Ng et al., 1999, "Policy
    Invariance Under Reward Transformations"). A message without a possible move earns 0 and counts.
    The game ends when the tiles are sorted or after ``moves``. ``accuracy`` is 1 if sorted.
    """

    def __init__(
        self,
        *,
        seed: int,
        board: Sequence[int] | None = None,
        width: int = 3,
        height: int = 3,
        scramble: int = 8,
        moves: int = 16,
        progress_reward: float = 0.1,
        **columns: Any,
    ) -> None:
        """Mix the tiles by ``seed`` in ``scramble`` moves, unless the row contains a ``board``.

        ``board``: the tiles row by row, with 0 for the gap.

        Raises:
            ConfigError: there are fewer than two rows or columns, or the board cannot be sorted.
        """
        del columns
        self._width, self._height = width, height
        self._board = _mixed(random.Random(seed), width, height, scramble)
        if board is not None:
            self._board = _checked(board, width, height)
        self._left, self._progress_reward = moves, progress_reward

    def init(self) -> Start:
        """Return the prompt with the board and the names of the moves."""
        text = f"{self._shown()}\n{', '.join(_SLIDES)}?"
        return Start([{"role": "user", "content": text}])

    def step(self, message: dict[str, Any]) -> Turn:
        """Make the move at the beginning of a message."""
        self._left -= 1
        match = _SLIDE.match(message["content"].lower())
        gap, tile = self._board.index(0), None
        if match is not None:
            slide = next(name for name in _SLIDES if name.startswith(match[1]))
            tile = _tile(gap, slide, self._width, self._height)
        # Slide the tile, and compare the distances.
        old_distance = _distance(self._board, self._width)
        if tile is not None:
            self._board[gap], self._board[tile] = self._board[tile], 0
        distance = _distance(self._board, self._width)
        right = distance == 0
        reward = self._progress_reward * (old_distance - distance) + (1.0 if right else 0.0)
        answer = self._shown() if tile is not None else f"no such move\n{self._shown()}"
        return Turn(
            [] if right else [{"role": "user", "content": answer}],
            {"reward": reward, "accuracy": float(right)},
            done=right or self._left == 0,
        )

    def _shown(self) -> str:
        rows = range(0, len(self._board), self._width)
        cells = [str(tile) if tile else "." for tile in self._board]
        return "\n".join(" ".join(cells[row : row + self._width]) for row in rows)


def sliding_puzzles(
    split: str = "train",
    size: int = 1024,
    *,
    seed: int = 0,
    width: int = 3,
    height: int = 3,
    scramble: int = 8,
) -> Iterator[dict[str, Any]]:
    """Yield ``size`` rows with the column board, mixed in ``scramble`` moves.

    Row ``i`` depends only on (seed, split, i).
    """
    _check_split(split, "sliding puzzles")
    for index in range(size):
        rng = random.Random(f"{seed}/{split}/{index}")
        yield {"board": _mixed(rng, width, height, scramble)}


# Position of the sliding tile relative to the gap: rows down, columns to the right.
_SLIDES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
_SLIDE = re.compile(r"\W*(up|down|left|right|[udlr])\b")


def _tile(gap: int, slide: str, width: int, height: int) -> int | None:
    """Return the position of the tile that slides into the gap, or None outside of the board."""
    row, column = gap // width + _SLIDES[slide][0], gap % width + _SLIDES[slide][1]
    inside = 0 <= row < height and 0 <= column < width
    return row * width + column if inside else None


def _distance(board: Sequence[int], width: int) -> int:
    """Return the steps of all tiles to their target positions, 0 if they are sorted."""
    return sum(_steps(position, tile - 1, width) for position, tile in enumerate(board) if tile)


def _steps(position: int, target: int, width: int) -> int:
    return abs(position // width - target // width) + abs(position % width - target % width)


def _mixed(rng: random.Random, width: int, height: int, scramble: int) -> list[int]:
    """Return a board after ``scramble`` random moves, none of which undoes the previous move.

    Moves are added until the board is not sorted.
    """
    if min(width, height) < 2 or scramble < 1:
        raise ConfigError(
            f"the sliding puzzle needs width={width} and height={height} of at least 2, and "
            f"scramble={scramble} of at least 1"
        )
    board, gap = [*range(1, width * height), 0], width * height - 1
    previous_gap: int | None = None
    moves = 0
    while moves < scramble or _distance(board, width) == 0:
        # A random tile next to the gap, except the one that was moved last.
        tiles = [_tile(gap, slide, width, height) for slide in _SLIDES]
        tile = rng.choice([item for item in tiles if item is not None and item != previous_gap])
        board[gap], board[tile] = board[tile], 0
        gap, previous_gap, moves = tile, gap, moves + 1
    return board


def _checked(board: Sequence[int], width: int, height: int) -> list[int]:
    """Return the board, or raise an error if it is incomplete or cannot be sorted.

    A move changes the parity of the permutation, and of the gap's distance to its target.
    """
    size = width * height
    is_valid = sorted(board) == list(range(size))
    if is_valid:
        # The parities of permutation and gap must agree.
        targets = [(tile - 1) % size for tile in board]
        swaps = sum(a > b for index, a in enumerate(targets) for b in targets[index + 1 :])
        is_valid = (swaps + _steps(list(board).index(0), size - 1, width)) % 2 == 0
    if not is_valid:
        raise ConfigError(
            f"the sliding puzzle board={list(board)} with width={width} and height={height} cannot "
            f"be sorted. Give every number from 0 (the gap) to {size - 1} once, in an order that "
            "moves can reach"
        )
    return list(board)


def _check_split(split: str, game: str) -> None:
    if split not in ("train", "validation"):
        raise ConfigError(f"{game}: split={split!r} must be train or validation")
