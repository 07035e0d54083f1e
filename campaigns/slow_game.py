"""The guessing game, slowly: a conversation that lasts can be ended anywhere in it."""

import time
from typing import Any

from aligner.environments import Turn
from aligner.examples.tasks.games import GuessingGame


class SlowGame(GuessingGame):
    """`GuessingGame` whose answers take ``seconds``."""

    def __init__(self, *, seconds: float = 0.0, **options: Any) -> None:
        """Set the delay. ``options``: see `GuessingGame`."""
        super().__init__(**options)
        self._seconds = seconds

    def step(self, message: dict[str, Any]) -> Turn:
        """Answer after the delay."""
        time.sleep(self._seconds)
        return super().step(message)
