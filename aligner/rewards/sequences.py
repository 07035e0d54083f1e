"""Tokenizes prompts and responses for a reward model, as in its training data.

A sequence is ``prompt + response + EOS``, encoded with the reward model's tokenizer. If the model
was trained with another end token, which its file records, that token replaces EOS. The score is
read at the end token. A response that the length limit cut gets an end token, too.
"""

from collections.abc import Sequence

from aligner.checkpoint.model_source import ModelSource
from aligner.data.batches import pad_right
from aligner.data.supervised import encode_pair
from aligner.data.tokenizers.decoding import (
    common_prefix,
    decode_response,
    response_texts,
    token_rows,
)
from aligner.data.tokenizers.tokenizer import Tokenizer, with_bos
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, RewardError, TokenizerError
from aligner.models.gpt.role.reward import SequenceForm


class SequenceEncoder:
    """Tokenizes prompts and responses for a reward model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        add_bos: bool = False,
        end_id: int | None = None,
    ) -> None:
        """Store the reward model's tokenizer and its maximum sequence length in tokens.

        ``add_bos``: prepend BOS to a sequence unless its text begins with BOS. ``end_id``: token
        that ends a sequence, by default EOS.
        """
        if add_bos and tokenizer.bos_id is None:
            raise TokenizerError(
                "reward.model.add_bos=true, but the reward model's tokenizer has no BOS token. "
                "Set reward.model.add_bos=null"
            )
        self.tokenizer, self.max_length, self.add_bos = tokenizer, max_length, add_bos
        self.end_id = tokenizer.eos_id if end_id is None else end_id

    @classmethod
    def of_checkpoint(cls, checkpoint: ModelSource, add_bos: bool | None) -> "SequenceEncoder":
        """Return the encoder for a reward model, with the BOS and the end token of its training.

        ``add_bos``: whether sequences begin with BOS, for an older checkpoint that does not say so.
        Raises `ConfigError` if the checkpoint says the opposite.
        """
        form = SequenceForm.of_config(checkpoint.config) or SequenceForm(bool(add_bos), None)
        if add_bos is not None and add_bos != form.add_bos:
            raise ConfigError(
                f"reward.model.add_bos={str(add_bos).lower()}, but the reward model was trained on "
                f"sequences {'with' if form.add_bos else 'without'} BOS. Set add_bos=null, which "
                "uses the value in the model's file"
            )
        positions = checkpoint.architecture.max_position_embeddings
        return cls(checkpoint.tokenizer, positions, add_bos=form.add_bos, end_id=form.end_id)

    def ids(self, prompt: str, response: str) -> list[int]:
        """Return the ids of prompt, response and end token. Raises `RewardError` if too long."""
        # The pair ends with EOS, which the model's own end token replaces.
        ids, _ = encode_pair(self.tokenizer, prompt, response)
        ids[-1] = self.end_id
        if self.add_bos:
            ids = with_bos(self.tokenizer, ids)
        if len(ids) > self.max_length:
            raise RewardError(
                f"a prompt with its response has {len(ids)} tokens in the reward model's "
                f"tokenizer, but the reward model accepts at most {self.max_length}. Lower "
                f"length_params.max_length or data.max_prompt_length. The prompt begins "
                f"{prompt[:60]!r}"
            )
        return ids

    def collate(self, sequences: Sequence[Sequence[int]]) -> BatchedDataDict:
        """Return a batch: ``input_ids`` int64 [B, S], right-padded, and ``input_lengths`` [B]."""
        ids, lengths = pad_right(sequences, self.tokenizer.pad_id)
        return BatchedDataDict({"input_ids": ids, "input_lengths": lengths})


def scored_texts(
    tokenizer: Tokenizer, data: BatchedDataDict, end_strings: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Return the response texts, and the same texts without the stop strings that ended them.

    ``end_strings``: the stop strings. Reads the columns of `response_texts`, and ``is_end``, bool
    [B], which is False if the length limit cut the response.
    """
    responses = response_texts(tokenizer, data)
    if not end_strings:
        return responses, responses
    rows = zip(responses, data["is_end"].tolist(), token_rows(data), strict=True)
    return responses, [
        _without_stop(tokenizer, *tokens, text, end_strings) if ended else text
        for text, ended, tokens in rows
    ]


def _without_stop(
    tokenizer: Tokenizer, prompt: list[int], ids: list[int], text: str, end_strings: Sequence[str]
) -> str:
    """Return a response's ``text`` up to the stop string that its last token completes."""
    if ids[-1] in tokenizer.end_ids:
        return text
    text_without_last = decode_response(tokenizer, prompt, ids[:-1])
    count = common_prefix(text_without_last, text)
    starts = (text.find(string, max(0, count - len(string) + 1)) for string in end_strings)
    text = text[: min((start for start in starts if start >= 0), default=len(text))]
    # Earlier stop strings, before ``min_length``, remain, except repetitions at the end.
    while stop := next((string for string in end_strings if text.endswith(string)), None):
        text = text.removesuffix(stop)
    return text
