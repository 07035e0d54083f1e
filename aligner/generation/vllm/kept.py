"""Sets of tokens that vLLM's top-k and top-p kept, as ``kept_ids``.

vLLM calls them sampling masks (``return_sampling_mask``; its page docs/training/sampling_mask.md):
``sampling_mask`` of a ``vllm.outputs.CompletionOutput`` is None, or has ``token_ids``, for each
generated token the list of ids that it was sampled from.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from aligner.errors import ConfigError, WorkerError

SINCE = "0.28"  # the first release of vLLM with sampling masks
_KEY = "model.ppo.record_kept_tokens"


def engine_arguments(most: int) -> dict[str, bool]:
    """Arguments of ``vllm.LLM`` with which it says what it kept, where ``most`` is above 0.

    Raises:
        ConfigError: the installed vLLM's engine has no ``return_sampling_mask``.
    """
    if not most:
        return {}
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    if "return_sampling_mask" not in {each.name for each in dataclasses.fields(EngineArgs)}:
        raise ConfigError(
            f"{_KEY}={most}: vLLM {vllm.__version__} does not say which tokens it kept; install "
            f"vLLM {SINCE} or newer, or set it to 0"
        )
    return {"return_sampling_mask": True}


def add_sets(sets: list[Sequence[int]], output: Any, tokens: int) -> None:
    """Add the sets of an output to those of a response, in place.

    The first releases that had them return the sets of all tokens with a response's last output,
    0.32 those of an output's own tokens with each.

    Args:
        sets: of the response's tokens before, as far as they came.
        output: ``vllm.outputs.CompletionOutput`` with the new tokens.
        tokens: number of the response's tokens, with the output's.

    Raises:
        WorkerError: they are neither of all tokens nor of the output's.
    """
    mask = getattr(output, "sampling_mask", None)
    if mask is None:
        return
    rows = mask.token_ids
    if len(rows) == tokens:
        sets[:] = rows
    elif len(rows) == len(output.token_ids) and len(sets) + len(rows) == tokens:
        sets.extend(rows)
    else:
        raise WorkerError(
            f"{_KEY}: vLLM returned {len(rows)} sets of kept tokens with {len(output.token_ids)} "
            f"of a response's {tokens} tokens; set it to 0, or take another release of vLLM"
        )


def check_sets(sets: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
    """Refuse sets that are not those of a response's ``tokens``.

    Raises:
        WorkerError: some are missing, or one lacks the token that was sampled from it.
    """
    if len(sets) != len(tokens):
        raise WorkerError(
            f"{_KEY}: vLLM returned the kept tokens of {len(sets)} of a response's {len(tokens)} "
            "tokens; releases before 0.32 have none of a response that a stop string ends, nor "
            "where they share out sampling over tensor-parallel ranks. Set it to 0, or take 0.32"
        )
    for place, (kept, token) in enumerate(zip(sets, tokens, strict=True)):
        if token not in kept:
            raise WorkerError(
                f"{_KEY}: token {token} at place {place} of a response is not among the "
                f"{len(kept)} tokens that vLLM says it kept; set it to 0, or take another release "
                "of vLLM"
            )


def kept_rows(sets: Sequence[Sequence[int]], most: int) -> Tensor:
    """``kept_ids`` of a response, int32 [n, most], -1 where there are fewer.

    A set of more than ``most`` ids is not recorded: its row is -1 throughout.
    """
    found = torch.full((len(sets), most), -1, dtype=torch.int32)
    for row, kept in zip(found, sets, strict=True):
        if len(kept) <= most:
            row[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return found
