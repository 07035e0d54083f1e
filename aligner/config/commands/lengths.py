"""The longest sequences that a run can meet."""

from aligner.config.run import (
    BaseRunConfig,
    DistillRunConfig,
    SamplingRunConfig,
    SupervisedRunConfig,
)
from aligner.errors import ConfigError

_MOST_POSITIONS = 1 << 30
# Tokens, where neither the configuration nor the data give a number.
_PROMPT, _EXAMPLE = 512, 2048


def longest_lengths(
    config: BaseRunConfig,
    positions: int | None = None,
    *,
    prompt: int | None = None,
    length: int | None = None,
    read: int | None = None,
) -> tuple[int, int]:
    """Tokens of a prompt and of what follows it, of a run's longest sequences.

    Of examples the second number is the whole example, the first is 0.

    Args:
        config: of a training run.
        positions: the model has no more. None means it has any number.
        prompt: tokens of a prompt. None means the longest that the configuration lets pass and the
            response leaves room for.
        length: tokens of a response, or of an example. None means as configured.
        read: tokens of the longest prompt, or example, of the data, which counts where the
            configuration lets any pass. None means nobody has looked.

    Raises:
        ConfigError: the response leaves no room for a prompt.
    """
    most = positions or _MOST_POSITIONS
    limit = None
    if isinstance(config, SamplingRunConfig):
        limit = config.data.max_prompt_length
        if config.environment.is_set:  # what a response is added to, of any turn
            answer = config.model.rollout.length_params.max_length
            limit = config.environment.max_tokens - answer
    elif isinstance(config, SupervisedRunConfig):
        limit = config.data.max_length
    if not samples_responses(config):
        budgets = config.model.token_budgets
        usual = _EXAMPLE if budgets is None else budgets.train_mb_tokens
        return 0, length or min(limit or read or usual, most)
    response = length or config.model.rollout.length_params.max_length
    prompt = prompt or max(1, min(limit or read or _PROMPT, most - response))
    if prompt + response > most:
        raise ConfigError(
            f"a prompt of {prompt} tokens and a response of {response} are more than the model's "
            f"{most} positions. Set plan.prompt_length or plan.length"
        )
    return prompt, response


def samples_responses(config: BaseRunConfig) -> bool:
    """Return whether the model learns from responses that it samples, not from given examples."""
    if isinstance(config, DistillRunConfig):
        return config.trainer.distill.on_policy
    return isinstance(config, SamplingRunConfig)
