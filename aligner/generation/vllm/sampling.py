"""This library's sampling parameters as vLLM's. Imports nothing of vLLM's."""

import hashlib
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
    """Arguments of ``vllm.SamplingParams`` for one response.

    Stop strings are not among them: they are found by our own code on our own tokenizer's text.
    ``logprobs=0`` gives the sampled token's log-prob only. ``by_top_k``: the likeliest token is
    sampled as the only one that is kept, with log-prob 0, because an engine that returns what it
    kept takes no temperature of 0.
    """
    likeliest = {"temperature": 1.0, "top_k": 1} if by_top_k else {"temperature": 0.0}
    return {
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        **(likeliest if greedy else {}),
        "repetition_penalty": sampling.repetition_penalty,
        # vLLM bans the ends while fewer tokens are out; ours counts the end that is being sampled.
        "min_tokens": max(0, length.min_length - 1),
        "max_tokens": length.max_length,
        "stop_token_ids": list(eos_ids),
        "ignore_eos": True,  # stop_token_ids has all ids that end a response
        "seed": None if greedy else seed,
        "logprobs": 0,
        "detokenize": False,
    }


def logprobs_mode(sampling: SamplingParams) -> Literal["raw_logprobs", "processed_logprobs"]:
    """Name of the log-probs that belong to the distribution a token was sampled from.

    ``processed`` ones know temperature, top-k, top-p and repetition penalty, but also the ban of
    EOS before ``min_length``, which the policy's own do not have. Where none of these is on, the
    raw ones are the policy's own to the bit.
    """
    plain = (
        sampling.temperature == 1.0
        and sampling.top_k == 0
        and sampling.top_p == 1.0
        and sampling.repetition_penalty == 1.0
    )
    return "raw_logprobs" if plain else "processed_logprobs"


def request_seed(seed: int, sample_id: int) -> int:
    """Seed of one response, 0 <= seed < 2**63: of nothing but the run's seed and the sample."""
    digest = hashlib.blake2b(f"{seed} {sample_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
