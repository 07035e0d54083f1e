"""Estimates the longest prompt, response or example of a run."""

from aligner.config.run import (
    BaseRunConfig,
    DistillRunConfig,
    SamplingRunConfig,
    SupervisedRunConfig,
)
from aligner.errors import ConfigError

_NO_LIMIT = 1 << 30
# Default lengths in tokens, if neither the configuration nor the data determine them.
_PROMPT, _EXAMPLE = 512, 2048


def longest_lengths(
    config: BaseRunConfig,
    positions: int | None = None,
    *,
    prompt: int | None = None,
    length: int | None = None,
    read: int | None = None,
) -> tuple[int, int]:
    """Return the maximum numbers of tokens (in a prompt, in a response) of a run.

    For a run on given examples, return 0 and the maximum number of tokens in an example.

    Args:
        config: configuration of a training run.
        positions: maximum sequence length of the model. None means no limit.
        prompt: maximum prompt length, in place of the configured limit, ``read`` or 512.
        length: maximum length of a response or an example, in place of the configured limit.
            Without a limit, an example has at most ``read`` or 2048 tokens.
        read: length of the longest prompt or example in the data, or None if it is unknown.

    Raises `ConfigError` if prompt and response together are longer than ``positions``.
    """
    # The configured limit of a prompt or an example.
    positions = positions or _NO_LIMIT
    limit = None
    max_response = config.model.rollout.length_params.max_length
    if isinstance(config, SamplingRunConfig):
        limit = config.data.max_prompt_length
        if config.environment.is_set:  # the prompt of a conversation's last response
            limit = config.environment.max_tokens - max_response
    elif isinstance(config, SupervisedRunConfig):
        limit = config.data.max_length

    # Given examples.
    if not samples_responses(config):
        budgets = config.model.token_budgets
        default = _EXAMPLE if budgets is None else budgets.train_mb_tokens
        return 0, length or min(limit or read or default, positions)

    # Sampled responses. The prompt must leave room for the response.
    response = length or max_response
    prompt = prompt or max(1, min(limit or read or _PROMPT, positions - response))
    if prompt + response > positions:
        raise ConfigError(
            f"a prompt of {prompt} tokens and a response of {response} exceed the model's "
            f"{positions} positions. Lower plan.prompt_length or plan.length"
        )
    return prompt, response


def samples_responses(config: BaseRunConfig) -> bool:
    """Return whether the model learns from its own samples rather than from given examples."""
    if isinstance(config, DistillRunConfig):
        return config.trainer.distill.on_policy
    return isinstance(config, SamplingRunConfig)
