"""The sampling that training log-probs must match."""

from dataclasses import dataclass

from aligner.errors import ConfigError


@dataclass(frozen=True)
class TrainingSamplingParams:
    """Sampling parameters of a rollout, for log-probs of the same distribution.

    ``top_k``: None, 0 or -1 is off. ``top_p``: 1 is off. ``temperature`` divides the logits here,
    so logits must not have been divided before.

    ``keep_target``: treatment of a target that the filter excludes. False, the published
    behaviour: its log-prob is -inf. True, that of this library's own trainers: it counts as kept,
    so that a token which the filter would exclude by now has a finite log-prob.
    """

    top_k: int | None = None
    top_p: float = 1.0
    temperature: float = 1.0
    keep_target: bool = False

    def __post_init__(self) -> None:
        if self.temperature <= 0:
            raise ConfigError(
                f"temperature={self.temperature} must be positive: log-probs at temperature 0 do "
                "not exist; sample greedily and train at temperature 1"
            )
        if (self.top_k or 0) < -1 or not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_k={self.top_k} must be None, 0 or -1 (off) or positive, and "
                f"top_p={self.top_p} in (0, 1] (1: off)"
            )

    @property
    def kept_count(self) -> int:
        """Top-k as a number, 0 where it is off."""
        return max(self.top_k or 0, 0)

    @property
    def restricts(self) -> bool:
        """True if some tokens are left out."""
        return self.kept_count > 0 or self.top_p < 1.0
