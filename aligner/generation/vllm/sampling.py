"""Conversion of this library's sampling parameters to vLLM's, without importing vLLM."""

from collections.abc import Sequence
from typing import Any, Literal

from aligner.config import LengthParams, SamplingParams


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
    ``logprobs=0`` returns the sampled token's log-prob only. An engine that returns kept tokens
    rejects temperature 0: ``by_top_k`` samples the likeliest token with top-k 1 and log-prob 0.
    """
    likeliest = {"temperature": 1.0, "top_k": 1} if by_top_k else {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        **(likeliest if greedy else {}),
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
    """Return vLLM's name of the log-probs under the sampled distribution.

    ``processed_logprobs`` include temperature, top-k, top-p and repetition penalty, but also the
    ban of EOS before ``min_length``, which the policy's log-probs do not include. If sampling is
    unmodified, ``raw_logprobs`` equal the policy's log-probs to the bit.
    """
    is_unmodified = (
        sampling.temperature == 1.0
        and sampling.top_k == 0
        and sampling.top_p == 1.0
        and sampling.repetition_penalty == 1.0
    )
    return "raw_logprobs" if is_unmodified else "processed_logprobs"
