"""Sets of tokens that vLLM's top-k and top-p kept, as ``kept_ids``.

vLLM calls them sampling masks (``return_sampling_mask``, its page docs/training/sampling_mask.md):
``sampling_mask`` of a ``vllm.outputs.CompletionOutput`` is None, or its ``token_ids`` contain for
each generated token the list of ids that it was sampled from.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

from aligner.errors import ConfigError, WorkerError

SINCE = "0.28"  # the first release of vLLM with sampling masks
_KEY = "model.ppo.record_kept_tokens"


def engine_arguments(size: int) -> dict[str, bool]:
    """Return arguments of ``vllm.LLM`` that enable sampling masks if ``size`` is above 0.

    Raises `ConfigError` if the installed vLLM's engine has no ``return_sampling_mask``.
    """
    if not size:
        return {}
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    if "return_sampling_mask" not in {field.name for field in dataclasses.fields(EngineArgs)}:
        raise ConfigError(
            f"{_KEY}={size}: vLLM {vllm.__version__} does not return the tokens it kept. Install "
            f"vLLM {SINCE} or newer, or set it to 0"
        )
    return {"return_sampling_mask": True}


def add_sets(sets: list[Sequence[int]], output: Any, tokens: int) -> None:
    """Add the sets of an output to the sets of a response, in place.

    The first releases with sampling masks return the sets of all tokens with the last output of a
    response. Release 0.32 returns with each output the sets of the output's tokens.

    Args:
        sets: sets of the response's earlier tokens.
        output: ``vllm.outputs.CompletionOutput`` with the new tokens.
        tokens: number of the response's tokens, including the output's.

    Raises:
        WorkerError: the sets are neither of all tokens nor of the output's tokens.
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
            f"of a response's {tokens} tokens. Set it to 0, or use another release of vLLM"
        )


def check_sets(sets: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
    """Check that there is a set for each of a response's ``tokens``.

    Raises `WorkerError` if sets are missing, or a set lacks the token that was sampled from it.
    """
    if len(sets) != len(tokens):
        raise WorkerError(
            f"{_KEY}: vLLM returned the kept tokens of {len(sets)} of a response's {len(tokens)} "
            "tokens. Releases before 0.32 return none for a response with a stop string, or if "
            "they share sampling among tensor-parallel ranks. Set it to 0, or use 0.32"
        )
    for index, (ids, token) in enumerate(zip(sets, tokens, strict=True)):
        if token not in ids:
            raise WorkerError(
                f"{_KEY}: token {token} at index {index} of a response is not among the "
                f"{len(ids)} tokens that vLLM kept. Set it to 0, or use another release of vLLM"
            )
