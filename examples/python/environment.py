"""GRPO in an environment, from Python: a guessing game of two turns. A minute on a CPU."""

import random

import aligner
from aligner.environments import Start, Turn


class Guess:
    """Reward 1 for the right number. After a wrong guess the environment tells the number."""

    def __init__(self, *, seed: int, **columns: object) -> None:
        self.number = str(random.Random(seed).randint(1, 3))

    def init(self) -> Start:
        """Return the first message."""
        return Start([{"role": "user", "content": "1, 2 or 3?"}])

    def step(self, message: dict) -> Turn:
        """Score a guess."""
        is_right = message["content"][:1] == self.number
        hint = [{"role": "user", "content": f"no, {self.number}"}]
        return Turn(messages=hint, reward=float(is_right), done=is_right)


result = aligner.train_grpo(
    model="models/tiny.nemo",
    data=[{"game": i} for i in range(64)],
    environment=Guess,
    max_steps=30,
    lr=6e-3,
    samples_per_step=64,
    max_new_tokens=2,
    output_dir="results/python_environment",
    overrides={"environment.max_turns": 2, "environment.max_tokens": 128},
)
print(result.metrics[-1]["train_rollouts/rewards"])
