"""What a reward model reads of a response: the sequence that its training data would have had.

That is ``prompt + response + EOS`` in the reward model's own tokens, whatever tokens the policy
drew. Its score stands at the EOS, where it was trained. A stop string that ended the response is no
part of it. A response that ran into the length limit gets the EOS too, for a score elsewhere would
mean nothing: charge for it by ``trainer.*.improper_end``.
"""

from collections.abc import Sequence

from aligner.data.collate import pad_right
from aligner.data.decoding import decode_response
from aligner.data.supervised import encode_pair
from aligner.data.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import RewardError, TokenizerError


class SequenceEncoder:
    """Texts to the token sequences of one reward model."""

    def __init__(self, tokenizer: Tokenizer, max_length: int, *, add_bos: bool = False) -> None:
        """``max_length``: positions of the model. ``add_bos``: begin with BOS unless text does."""
        if add_bos and tokenizer.bos_id is None:
            raise TokenizerError(
                "reward.model.add_bos=true, but the reward model's tokenizer has no BOS token; set "
                "it to false"
            )
        self.tokenizer, self.max_length, self.add_bos = tokenizer, max_length, add_bos

    def ids(self, prompt: str, response: str) -> list[int]:
        """Tokens of ``prompt + response + EOS``; `RewardError` where they are too many."""
        ids, _ = encode_pair(self.tokenizer, prompt, response)
        bos = self.tokenizer.bos_id
        if self.add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        if len(ids) > self.max_length:
            raise RewardError(
                f"a prompt with its response has {len(ids)} tokens for the reward model, which has "
                f"{self.max_length} positions; lower length_params.max_length or "
                f"data.max_prompt_length (the prompt begins {prompt[:60]!r})"
            )
        return ids

    def collate(self, sequences: Sequence[Sequence[int]]) -> BatchedDataDict:
        """``input_ids`` int64 [B, S] right-padded and ``input_lengths`` int64 [B]."""
        ids, lengths = pad_right(sequences, self.tokenizer.pad_id)
        return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def response_texts(tokenizer: Tokenizer, data: BatchedDataDict) -> list[str]:
    """The responses of a rollout, without the end-of-sequence token.

    Reads ``input_ids`` int64 [B, S], ``prompt_lengths`` and ``input_lengths`` int64 [B].
    """
    rows = zip(
        data["input_ids"].tolist(),
        data["prompt_lengths"].tolist(),
        data["input_lengths"].tolist(),
        strict=True,
    )
    return [decode_response(tokenizer, ids[:start], ids[start:end]) for ids, start, end in rows]


def scored_texts(
    responses: Sequence[str], is_end: Sequence[bool], end_strings: Sequence[str]
) -> list[str]:
    """Responses without the stop string (and repetitions of it) that ended them."""
    return [
        _without_stop(text, end_strings) if ended else text
        for text, ended in zip(responses, is_end, strict=True)
    ]


def _without_stop(text: str, end_strings: Sequence[str]) -> str:
    """The last token may hold more than the stop string: what follows it goes too."""
    last = max((text.rfind(string) for string in end_strings), default=-1)
    text = text if last < 0 else text[:last]
    while stop := next((string for string in end_strings if text.endswith(string)), None):
        text = text.removesuffix(stop)
    return text
