"""GRPO in an environment, from Python: a guessing game of two turns. A minute on a CPU."""

import random

import aligner
from aligner.environments import Start, Turn


class Guess:
    """Reward 1 for the right number, 0.1 for another. A wrong guess is answered by the number."""

    def __init__(self, *, seed: int, **columns: object) -> None:
        self.number = str(random.Random(seed).randint(1, 3))

    def init(self) -> Start:
        """Return the first message."""
        return Start([{"role": "user", "content": "1, 2 or 3?"}])

    def step(self, message: dict) -> Turn:
        """Score a guess."""
        guess = message["content"][:1]
        is_right = guess == self.number
        reward = 1.0 if is_right else 0.1 * (guess in ("1", "2", "3"))
        hint = [{"role": "user", "content": f"no, {self.number}"}]
        return Turn(messages=hint, reward=reward, done=is_right)


result = aligner.train_grpo(
    model="models/tiny.nemo",
    data=[{"game": i} for i in range(64)],
    environment=Guess,
    max_steps=50,
    lr=6e-3,
    samples_per_step=64,
    max_new_tokens=2,
    output_dir="results/python_environment",
    overrides={"environment.max_turns": 2, "environment.max_tokens": 128},
)
print(result.metrics[-1]["train_rollouts/rewards"])
