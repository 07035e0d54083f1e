"""Games for small models: a reward for every turn, and rows of data to play them on."""

import random
import re
from collections.abc import Iterator, Sequence
from typing import Any

from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError

_NUMBER = re.compile(r"-?\d+")


def _number(message: dict[str, Any]) -> int | None:
    """The number that a message begins with. None means it begins with none."""
    found = _NUMBER.match(message["content"].strip())
    return None if found is None else int(found.group()[:9])


class GuessingGame:
    """A number is to be found; every guess is answered with ``higher`` or ``lower``.

    A turn earns 1 where it names the number, ``hint_reward`` where it names another one that fits
    all that was said before, and 0 else. The game is over when the number was found or ``guesses``
    are used up. ``accuracy`` is 1 where it was found.
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
        """Choose the number by ``seed``, unless the row has it in the column ``secret``."""
        del columns
        if not low < high:
            raise ConfigError(f"the guessing game needs low < high, got low={low} and high={high}")
        self._secret = random.Random(seed).randint(low, high) if secret is None else secret
        self._low, self._high = low, high
        self._left, self._hint_reward = guesses, hint_reward

    def init(self) -> Start:
        """Say between which numbers it lies."""
        return Start([{"role": "user", "content": f"{self._low}-{self._high}?"}])

    def step(self, message: dict[str, Any]) -> Turn:
        """Compare the first number of a message with the one that is to be found."""
        self._left -= 1
        guess = _number(message)
        right = guess == self._secret
        reward = {"reward": 1.0 if right else 0.0, "accuracy": float(right)}
        said = "a number?"
        if guess is not None and not right:
            if self._low <= guess <= self._high:
                reward["reward"] = self._hint_reward
            said = "higher" if guess < self._secret else "lower"
            if guess < self._secret:
                self._low = max(self._low, guess + 1)
            else:
                self._high = min(self._high, guess - 1)
        return Turn(
            [] if right else [{"role": "user", "content": said}],
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
    """Numbers are named one after another, and each is answered with the next larger one.

    A turn earns 1 where it says that number, ``hint_reward`` where it says what is right for
    another number of the game, and 0 else. No turn depends on the ones before: what a turn earns is
    its own doing, and all other rewards of the conversation are noise to it. ``accuracy`` is the
    share of turns that were right.
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
        """Choose ``turns`` numbers by ``seed``, unless the row has them in the column ``asked``.

        Raises:
            ConfigError: no number to ask for.
        """
        del columns
        _check_numbers(low, high, turns if asked is None else len(asked))
        self._asked = _asked(random.Random(seed), low, high, turns) if asked is None else [*asked]
        self._low, self._high, self._hint_reward = low, high, hint_reward
        self._at = self._right = 0

    def init(self) -> Start:
        """Name the first number."""
        return Start([{"role": "user", "content": str(self._asked[0])}])

    def step(self, message: dict[str, Any]) -> Turn:
        """Compare the number that a message begins with. Name the next one."""
        said = _number(message)
        right = said == self._asked[self._at] + 1
        fits = said is not None and self._low < said <= self._high + 1
        self._at += 1
        self._right += right
        done = self._at == len(self._asked)
        return Turn(
            [] if done else [{"role": "user", "content": str(self._asked[self._at])}],
            {
                "reward": 1.0 if right else self._hint_reward if fits else 0.0,
                "accuracy": self._right / len(self._asked),
            },
            done,
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
        yield {"asked": _asked(random.Random(f"{seed}/{split}/{index}"), low, high, turns)}


def _asked(rng: random.Random, low: int, high: int, turns: int) -> list[int]:
    return [rng.randint(low, high) for _ in range(turns)]


def _check_numbers(low: int, high: int, turns: int) -> None:
    if not (low <= high and turns >= 1):
        raise ConfigError(
            f"the game of next numbers needs low={low} of at most high={high}, and turns={turns} "
            "of at least 1"
        )


class SlidingPuzzle:
    """Tiles with numbers around a gap are to be put in order, the gap last.

    A message names the direction in which a tile slides into the gap. A turn earns
    ``progress_reward`` times the fall of the tiles' distances to their places (steps along rows and
    columns, summed), and 1 more where all are in place. There and back earns nothing, for the
    rewards are differences of a potential (Ng et al., 1999, "Policy Invariance Under Reward
    Transformations"). A message without a move that is possible earns 0 and counts. The game is
    over when the tiles are in order or ``moves`` are used up. ``accuracy`` is 1 where they are in
    order.
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
        """Mix the tiles by ``seed`` in ``scramble`` moves, unless the row has a ``board``.

        ``board``: the tiles row by row, 0 the gap.

        Raises:
            ConfigError: fewer than two rows or columns, or a board that cannot be put in order.
        """
        del columns
        self._width, self._height = width, height
        self._board = _mixed(random.Random(seed), width, height, scramble)
        if board is not None:
            self._board = _checked(board, width, height)
        self._left, self._progress_reward = moves, progress_reward

    def init(self) -> Start:
        """Show the board and say what moves there are."""
        text = f"{self._shown()}\n{', '.join(_SLIDES)}?"
        return Start([{"role": "user", "content": text}])

    def step(self, message: dict[str, Any]) -> Turn:
        """Make the move that a message begins with."""
        self._left -= 1
        found = _SLIDE.match(message["content"].lower())
        gap = self._board.index(0)
        tile = None if found is None else _tile(gap, _named(found[1]), self._width, self._height)
        before = _distance(self._board, self._width)
        if tile is not None:
            self._board[gap], self._board[tile] = self._board[tile], 0
        after = _distance(self._board, self._width)
        right = after == 0
        reward = self._progress_reward * (before - after) + (1.0 if right else 0.0)
        said = self._shown() if tile is not None else f"no such move\n{self._shown()}"
        return Turn(
            [] if right else [{"role": "user", "content": said}],
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


# Where the tile that slides is, seen from the gap: rows down, columns to the right.
_SLIDES = {"up": (1, 0), "down": (-1, 0), "left": (0, 1), "right": (0, -1)}
_SLIDE = re.compile(r"\W*(up|down|left|right|[udlr])\b")


def _named(word: str) -> str:
    return next(name for name in _SLIDES if name.startswith(word))


def _tile(gap: int, slide: str, width: int, height: int) -> int | None:
    """Place of the tile that slides into the gap. None means the board ends there."""
    row, column = gap // width + _SLIDES[slide][0], gap % width + _SLIDES[slide][1]
    inside = 0 <= row < height and 0 <= column < width
    return row * width + column if inside else None


def _distance(board: Sequence[int], width: int) -> int:
    """Steps of all tiles to their places, along rows and columns. `0` means they are in order."""
    return sum(_steps(place, tile - 1, width) for place, tile in enumerate(board) if tile)


def _steps(one: int, other: int, width: int) -> int:
    return abs(one // width - other // width) + abs(one % width - other % width)


def _mixed(rng: random.Random, width: int, height: int, scramble: int) -> list[int]:
    """A board that ``scramble`` moves, none of which undoes the one before, have put out of order.

    One more is made where that left it in order.
    """
    if min(width, height) < 2 or scramble < 1:
        raise ConfigError(
            f"the sliding puzzle needs width={width} and height={height} of at least 2, and "
            f"scramble={scramble} of at least 1"
        )
    board, gap = [*range(1, width * height), 0], width * height - 1
    before: int | None = None
    made = 0
    while made < scramble or _distance(board, width) == 0:
        tiles = [_tile(gap, slide, width, height) for slide in _SLIDES]
        tile = rng.choice([one for one in tiles if one is not None and one != before])
        board[gap], board[tile] = board[tile], 0
        gap, before, made = tile, gap, made + 1
    return board


def _checked(board: Sequence[int], width: int, height: int) -> list[int]:
    """The board, which must have every tile once and be one that moves can put in order.

    A move changes the parity of the permutation, and of the gap's distance to its place.
    """
    size = width * height
    wrong = sorted(board) != list(range(size))
    if not wrong:
        places = [(tile - 1) % size for tile in board]
        swaps = sum(a > b for at, a in enumerate(places) for b in places[at + 1 :])
        wrong = (swaps + _steps(list(board).index(0), size - 1, width)) % 2 == 1
    if wrong:
        raise ConfigError(
            f"the sliding puzzle cannot be put in order from board={list(board)} with "
            f"width={width} and height={height}: it needs every number from 0 to {size - 1} once, "
            "0 the gap, in an order that moves can come to"
        )
    return list(board)


def _check_split(split: str, what: str) -> None:
    if split not in ("train", "validation"):
        raise ConfigError(f"{what}: split={split!r} is not one of train, validation")
