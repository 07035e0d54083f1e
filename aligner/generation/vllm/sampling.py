"""Arguments of vLLM for sampling and log-probs, and the tokens that top-k and top-p kept.

vLLM calls sets of kept tokens sampling masks (its page docs/training/sampling_mask.md). The
``sampling_mask`` of a ``vllm.outputs.CompletionOutput`` is None, or its ``token_ids`` contain for
each generated token the list of ids that it was sampled from.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from aligner.config import LengthParams, SamplingParams
from aligner.errors import ConfigError, WorkerError

SINCE = "0.28"  # the first release of vLLM with sampling masks
_KEY = "model.ppo.record_kept_tokens"


def sampling_arguments(
    length: LengthParams,
    sampling: SamplingParams,
    *,
    eos_ids: Sequence[int],
    seed: int,
    greedy: bool,
    by_top_k: bool = False,
) -> dict[str, Any]:
    """Return arguments of ``vllm.SamplingParams`` for one response.

    Stop strings are not included: this library finds them in its own tokenizer's text.
    ``logprobs=0`` returns only the sampled token's log-prob. ``by_top_k``: sample greedily by top-k
    1 (log-prob 0) instead of temperature 0, which engines that return kept tokens reject.
    """
    greedy_arguments = {"temperature": 1.0, "top_k": 1} if by_top_k else {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        **(greedy_arguments if greedy else {}),
        "repetition_penalty": sampling.repetition_penalty,
        # vLLM's min_tokens does not count the end token, but our min_length does.
        "min_tokens": max(0, length.min_length - 1),
        "max_tokens": length.max_length,
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,  # stop_token_ids contains all ids that end a response
        "seed": None if greedy else seed,
        "logprobs": 0,
        "detokenize": False,
    }


def logprobs_mode(sampling: SamplingParams) -> Literal["raw_logprobs", "processed_logprobs"]:
    """Return vLLM's name for log-probs under the distribution that is sampled from.

    ``processed_logprobs`` also include the ban of EOS before ``min_length``, unlike the policy's
    log-probs. If sampling is unmodified, ``raw_logprobs`` equal the policy's to the bit.
    """
    is_unmodified = (
        sampling.temperature == 1.0
        and sampling.top_k == 0
        and sampling.top_p == 1.0
        and sampling.repetition_penalty == 1.0
    )
    return "raw_logprobs" if is_unmodified else "processed_logprobs"


def engine_arguments(size: int) -> dict[str, bool]:
    """Return arguments of ``vllm.LLM`` that enable sampling masks if ``size`` is above 0.

    Raises `ConfigError` if the installed vLLM has no sampling masks.
    """
    if not size:
        return {}
    import vllm
    from vllm.engine.arg_utils import EngineArgs

    if "return_sampling_mask" not in {field.name for field in dataclasses.fields(EngineArgs)}:
        raise ConfigError(
            f"{_KEY}={size}: vLLM {vllm.__version__} does not return the tokens that top-k and "
            f"top-p kept. Install vLLM {SINCE} or newer, or set the key to 0"
        )
    return {"return_sampling_mask": True}


def add_sets(sets: list[Sequence[int]], output: Any, tokens: int) -> None:
    """Add the sets of kept tokens in ``output`` to ``sets``, the response's sets so far.

    ``output``: a ``vllm.outputs.CompletionOutput``. ``tokens``: number of the response's tokens,
    including those of ``output``. The first releases with sampling masks return all sets of a
    response with its last output. Release 0.32 returns with each output the sets of its tokens.
    Raises `WorkerError` for another number of sets.
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
            f"of a response's {tokens} tokens. Set the key to 0, or use another release of vLLM"
        )


def check_sets(sets: Sequence[Sequence[int]], tokens: Sequence[int]) -> None:
    """Raise `WorkerError` unless each of a response's ``tokens`` has a set that contains it."""
    if len(sets) != len(tokens):
        raise WorkerError(
            f"{_KEY}: vLLM returned the kept tokens of {len(sets)} of a response's {len(tokens)} "
            "tokens. vLLM before 0.32 returns none for a response with a stop string, or if it "
            "shares sampling among tensor-parallel ranks. Set the key to 0, or use vLLM 0.32"
        )
    for index, (ids, token) in enumerate(zip(sets, tokens, strict=True)):
        if token not in ids:
            raise WorkerError(
                f"{_KEY}: token {token} at index {index} of a response is not among the "
                f"{len(ids)} tokens that vLLM kept. Set the key to 0, or use another vLLM release"
            )
