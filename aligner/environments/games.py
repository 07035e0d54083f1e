"""Games for small models: a reward for every turn, and rows of data to play them on."""

import random
import re
from collections.abc import Iterator
from typing import Any

from aligner.environments.protocol import Start, Turn
from aligner.errors import ConfigError

_NUMBER = re.compile(r"-?\d+")


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
        found = _NUMBER.match(message["content"].strip())
        guess = None if found is None else int(found.group()[:9])
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
    if split not in ("train", "validation"):
        raise ConfigError(f"guessing games: split={split!r} is not one of train, validation")
    for index in range(size):
        yield {"secret": random.Random(f"{seed}/{split}/{index}").randint(low, high)}
