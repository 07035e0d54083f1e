"""Advantage estimators of users, named by ``trainer.ppo.advantage.estimator``."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.importing import accepted_keywords, check_call, load_function, user_errors

KEY = "trainer.ppo.advantage.estimator"
# Possible arguments of the function, in addition to ``values`` in runs with a critic.
_ARGUMENTS = (
    *("rewards", "groups", "penalty", "token_mask", "sample_mask", "is_end", "input_ids"),
    *("input_lengths", "prompt_lengths", "generation_logprobs", "prev_logprobs"),
    *("discount_factor", "gae_lambda"),
)


class AdvantageEstimator(Protocol):
    """Signature of a user's function that computes advantages.

    ``trainer.ppo.advantage.estimator`` names the function. It is called once per step with the
    whole rollout of ``B`` responses. The function receives the following keyword arguments if it
    has parameters of these names, or all arguments if it accepts ``**others``:

    ``rewards``          float32 [B], after ``trainer.ppo.reward`` and ``improper_end``
    ``groups``           int64 [B], equal for responses to the same prompt
    ``penalty``          float32 [B, S], KL penalty β·kl to subtract from the reward at each token,
                         0 without a penalty
    ``token_mask``       float32 [B, S], 1 for generated tokens
    ``sample_mask``      float32 [B], 0 for excluded samples, whose reward may be any value
    ``values``           float32 [B, S], the critic's values, only in runs with a critic
    ``is_end``           bool [B], True if the model ended the response, not a length limit
    ``input_ids``        int64 [B, S], tokens of prompt and response
    ``input_lengths``    int64 [B], number of tokens in prompt and response
    ``prompt_lengths``   int64 [B], number of tokens in the prompt
    ``prev_logprobs``    float32 [B, S], log-probs of the policy before the step's updates
    ``generation_logprobs``   float32 [B, S], log-probs of the sampling engine
    ``discount_factor``, ``gae_lambda``   float, keys of ``trainer.ppo``

    Position ``t`` of a column describes token ``t``. Entries of ``trainer.ppo.advantage.kwargs``
    are additional arguments, and replace arguments of the same name.
    """

    def __call__(self, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Return advantages, float [B, S], or [B] for the same advantage at all tokens.

        In a run with a critic, return a pair of advantages and the critic's targets, float [B, S].
        Values at masked positions are ignored. If ``trainer.ppo.normalize_advantages`` is true, the
        advantages are whitened afterwards.
        """
        ...


class UserEstimator:
    """A user's `AdvantageEstimator`, with checks of its parameters and results."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], *, has_critic: bool) -> None:
        """Import the function ``name``. Raises `ConfigError` if an argument is unavailable."""
        self.name, self._kwargs, self._has_critic = name, dict(kwargs), has_critic
        self._function = load_function(name, key=KEY)
        offered = [*_ARGUMENTS, *(["values"] if has_critic else [])]
        accepted = accepted_keywords(self._function, offered) - self._kwargs.keys()
        self._names = [name for name in offered if name in accepted]
        note = "" if has_critic else " (values only in a run with a critic)"
        remedy = (
            f"Possible arguments are {', '.join(offered)}{note}. Set any other argument in "
            "trainer.ppo.advantage.kwargs"
        )
        check_call(self._function, [*self._names, *self._kwargs], str(self), remedy)

    def __str__(self) -> str:
        return f"{KEY}={self.name}"

    def takes(self, name: str) -> bool:
        """Return whether the function accepts the keyword ``name``."""
        return bool(accepted_keywords(self._function, [name]))

    def __call__(self, rollout: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return advantages and the critic's targets, if any, float32 [B, S], 0 where masked."""
        # Copy tensors: an in-place change of an argument must not affect the run.
        arguments = {
            name: value.clone() if isinstance(value := rollout[name], Tensor) else value
            for name in self._names
        }
        result = self._function(**arguments, **self._kwargs)
        expected = "a pair: advantages and the critic's targets" if self._has_critic else "a tensor"
        columns = result if isinstance(result, tuple) else (result,)
        if isinstance(result, tuple) != self._has_critic or len(columns) != 1 + self._has_critic:
            raise ConfigError(f"{self}: returned {_shown(result)}. Return {expected}, float [B, S]")
        mask = rollout["token_mask"].bool() & rollout["sample_mask"].bool()[:, None]
        advantages, *targets = (self._checked(column, mask) for column in columns)
        return advantages, targets[0] if targets else None

    def _checked(self, column: Any, mask: Tensor) -> Tensor:
        """Return ``column`` as float32 [B, S], 0 where ``mask`` is False."""
        rows, width = mask.shape
        if not isinstance(column, Tensor) or column.shape not in ((rows, width), (rows,)):
            raise ConfigError(
                f"{self}: returned {_shown(column)} for {rows} responses of width {width}. "
                f"Return float [{rows}, {width}], or [{rows}] for the same value at all tokens"
            )
        # Replace values at masked positions before the check, because they may be NaN.
        spread = column if column.ndim == 2 else column[:, None]
        spread = torch.where(mask, spread.to(torch.float32), 0).detach()
        if not spread.isfinite().all():
            row = int((~spread.isfinite()).any(1).nonzero()[0])
            raise ConfigError(
                f"{self}: the result for response {row} of {rows} is NaN or infinite. Check "
                "whether the function divides by a standard deviation or a count of 0"
            )
        return spread

    def try_out(self, rollouts_per_prompt: int) -> None:
        """Call the function with synthetic data. Raises `ConfigError` if it fails."""
        # Two prompts of 2 tokens, and responses of 2 to 4 tokens.
        rows, width = 2 * rollouts_per_prompt, 6
        generator = torch.Generator().manual_seed(0)
        position, lengths = torch.arange(width), torch.arange(rows) % 3 + 4
        token_mask = ((position >= 2) & (position < lengths[:, None])).float()
        tensors = {
            name: -torch.rand(rows, width, generator=generator) * token_mask
            for name in ("penalty", "values", "generation_logprobs", "prev_logprobs")
        }
        rollout = {
            **tensors,
            "rewards": (torch.arange(rows) % 2).float(),
            "groups": torch.arange(rows) // rollouts_per_prompt,
            "token_mask": token_mask,
            "sample_mask": torch.ones(rows),
            "is_end": torch.ones(rows, dtype=torch.bool),
            "input_ids": torch.randint(3, 9, (rows, width), generator=generator),
            "input_lengths": lengths,
            "prompt_lengths": torch.full((rows,), 2),
            "discount_factor": 1.0,
            "gae_lambda": 0.95,
        }
        # The message of a failed call names the arguments of the function.
        names = ", ".join([*self._names, *self._kwargs])
        call = f"a test rollout of {rows} responses to 2 prompts with the arguments {names}"
        with user_errors(str(self), call):
            self(rollout)


def _shown(value: Any) -> str:
    return f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
