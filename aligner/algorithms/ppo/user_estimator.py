"""A user's own estimator of advantages, by the path ``trainer.ppo.advantage.estimator`` gives."""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from aligner.errors import ConfigError
from aligner.importing import check_call, describe_exception, load_function, named_by

KEY = "trainer.ppo.advantage.estimator"
# What the function may name.
_ALWAYS = (
    *("rewards", "groups", "penalty", "token_mask", "sample_mask", "is_end", "input_ids"),
    *("input_lengths", "prompt_lengths", "generation_logprobs", "prev_logprobs"),
    *("discount_factor", "gae_lambda"),
)
_OF_A_CRITIC = ("values",)


class AdvantageEstimator(Protocol):
    """Signature of the function of ``trainer.ppo.advantage.estimator``.

    It is called by keyword, once a step with the whole rollout of ``B`` responses, and gets what
    its signature names of the following, all of it where it takes ``**others``:

    ``rewards``          float32 [B], after ``trainer.ppo.reward`` and ``improper_end``
    ``groups``           int64 [B], equal where the prompt is the same
    ``penalty``          float32 [B, S], what the KL takes off the reward at each token (β·kl); 0
                         without one
    ``token_mask``       float32 [B, S], 1 where the token was generated
    ``sample_mask``      float32 [B], 1 where the sample counts; the others' rewards may be anything
    ``values``           float32 [B, S], the critic's; only in runs with one
    ``is_end``           bool [B], the response ended by itself
    ``input_ids``        int64 [B, S], prompt and response
    ``input_lengths``    int64 [B], tokens of both
    ``prompt_lengths``   int64 [B], tokens of the prompt
    ``prev_logprobs``    float32 [B, S], of the policy that produced the rollout
    ``generation_logprobs``   float32 [B, S], of the sampling engine
    ``discount_factor``, ``gae_lambda``   the keys of ``trainer.ppo``

    and what ``trainer.ppo.advantage.kwargs`` holds, which wins. Position ``t`` speaks of token
    ``t``.
    """

    def __call__(self, **named: Any) -> Tensor | tuple[Tensor, Tensor]:
        """Advantages, float [B, S], or [B] for all tokens of a response the same.

        In a run with a critic a pair: advantages, and the critic's targets float [B, S]. What
        stands where a mask is 0 is not looked at. ``trainer.ppo.normalize_advantages`` whitens
        afterwards.
        """
        ...


class UserEstimator:
    """An `AdvantageEstimator` and its keyword arguments."""

    def __init__(self, name: str, kwargs: Mapping[str, Any], *, has_critic: bool) -> None:
        """Import the function ``name``.

        Raises:
            ConfigError: it cannot be imported, or names what no rollout of this run has.
        """
        self.name, self._kwargs, self._has_critic = name, dict(kwargs), has_critic
        self._function = load_function(name, key=KEY)
        offered = [*_ALWAYS, *(_OF_A_CRITIC if has_critic else ())]
        taken = named_by(self._function, offered) - self._kwargs.keys()
        self._names = [name for name in offered if name in taken]
        without = "" if has_critic else " (values only in a run with a critic)"
        check_call(
            self._function,
            [*self._names, *self._kwargs],
            str(self),
            f"It may name {', '.join(offered)}{without}; anything else it needs goes into "
            "trainer.ppo.advantage.kwargs",
        )

    def __str__(self) -> str:
        return f"{KEY}={self.name}"

    def takes(self, name: str) -> bool:
        """Return whether the function's signature has ``name``, or takes any keyword."""
        return bool(named_by(self._function, [name]))

    def __call__(self, rollout: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Advantages and, with a critic, its targets: float32 [B, S], 0 where a mask is 0.

        ``rollout``: everything that `AdvantageEstimator` may name.

        Raises:
            ConfigError: the function returned something else, or numbers that are not finite.
        """
        given = {name: rollout[name] for name in self._names}
        # Copies: what the function writes into a column must not reach the run.
        given = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in given.items()
        }
        result = self._function(**given, **self._kwargs)
        wanted = "a pair: advantages and the critic's targets" if self._has_critic else "a tensor"
        if isinstance(result, tuple) != self._has_critic or (self._has_critic and len(result) != 2):
            raise ConfigError(f"{self}: returned {_shown(result)}; return {wanted}, float [B, S]")
        advantages, *targets = result if self._has_critic else (result,)
        mask = rollout["token_mask"].bool() & rollout["sample_mask"].bool()[:, None]
        found = [self._checked(each, mask) for each in (advantages, *targets)]
        return found[0], found[1] if self._has_critic else None

    def _checked(self, found: Any, mask: Tensor) -> Tensor:
        """``found`` as float32 [B, S], 0 where ``mask`` is False."""
        rows, width = mask.shape
        if not isinstance(found, Tensor) or found.shape not in ((rows, width), (rows,)):
            raise ConfigError(
                f"{self}: returned {_shown(found)} of {rows} responses, {width} tokens wide; "
                f"return float [{rows}, {width}], or [{rows}] for all tokens of a response the same"
            )
        spread = found if found.ndim == 2 else found[:, None]
        spread = torch.where(mask, spread.to(torch.float32), 0).detach()
        if not spread.isfinite().all():
            row = int((~spread.isfinite()).any(1).nonzero()[0])
            raise ConfigError(
                f"{self}: of response {row} of {rows} it is NaN or infinite; look for a division "
                "by a deviation or a count that may be 0"
            )
        return spread

    def try_out(self, rollouts_per_prompt: int) -> None:
        """Call it on a made-up rollout: two prompts with this many responses each.

        Raises:
            ConfigError: it raised, or returned what `__call__` refuses.
        """
        rows, width = 2 * rollouts_per_prompt, 6
        generator = torch.Generator().manual_seed(0)
        position, lengths = torch.arange(width), torch.arange(rows) % 3 + 4
        token_mask = ((position >= 2) & (position < lengths[:, None])).float()
        numbers = {
            name: -torch.rand(rows, width, generator=generator) * token_mask
            for name in ("penalty", "values", "generation_logprobs", "prev_logprobs")
        }
        made_up = {
            **numbers,
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
        try:
            self(made_up)
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"{self}: raised {describe_exception(error)} on a made-up rollout of {rows} "
                f"responses to 2 prompts; it was given {', '.join([*self._names, *self._kwargs])}"
            ) from error


def _shown(found: Any) -> str:
    return f"a tensor {list(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
