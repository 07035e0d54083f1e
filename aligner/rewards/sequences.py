"""Sequence that a reward model reads of a response: the same form as in its training data.

That is ``prompt + response + EOS`` in the reward model's own tokens, whatever tokens the policy
sampled; in place of EOS the token that ended all sequences of its training, where its file names
one (the end of a turn in a chat template). The score is read there. A stop string that ended the
response is no part of it. A response that ran into the length limit gets that token too, for a
score elsewhere would mean nothing: PPO can charge for it by ``trainer.ppo.improper_end``; rejection
sampling cannot.
"""

from collections.abc import Iterator, Sequence

from aligner.checkpoint.nemo.model_file import NemoCheckpoint
from aligner.data.prompts import pad_right
from aligner.data.supervised import encode_pair
from aligner.data.tokenizers.decoding import common_prefix, decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import ConfigError, RewardError, TokenizerError
from aligner.models.gpt.megatron.reward import SequenceForm


class SequenceEncoder:
    """Texts to the token sequences of one reward model."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        max_length: int,
        *,
        add_bos: bool = False,
        end_id: int | None = None,
    ) -> None:
        """Set up.

        Args:
            tokenizer: the reward model's.
            max_length: positions of the model.
            add_bos: begin with BOS unless text does.
            end_id: the token that a sequence ends with; None: EOS.
        """
        if add_bos and tokenizer.bos_id is None:
            raise TokenizerError(
                "reward.model.add_bos=true, but the reward model's tokenizer has no BOS token; "
                "leave it at null"
            )
        self.tokenizer, self.max_length, self.add_bos = tokenizer, max_length, add_bos
        self.end_id = tokenizer.eos_id if end_id is None else end_id

    @classmethod
    def of_checkpoint(cls, checkpoint: NemoCheckpoint, add_bos: bool | None) -> "SequenceEncoder":
        """Encoder for a reward model's file, which has the form of its training's sequences.

        ``add_bos``: of the configuration; None: not set. It decides where an older file has no
        form: None means no BOS there.

        Raises:
            ConfigError: the two differ.
        """
        form = SequenceForm.of_config(checkpoint.config) or SequenceForm(bool(add_bos), None)
        if add_bos is not None and add_bos != form.add_bos:
            raise ConfigError(
                f"reward.model.add_bos={str(add_bos).lower()}, but the reward model was trained on "
                f"sequences {'with' if form.add_bos else 'without'} BOS; leave it at null"
            )
        return cls(
            checkpoint.tokenizer,
            checkpoint.architecture.max_position_embeddings,
            add_bos=form.add_bos,
            end_id=form.end_id,
        )

    def ids(self, prompt: str, response: str) -> list[int]:
        """Tokens of prompt, response and end; `RewardError` where they are too many."""
        ids, _ = encode_pair(self.tokenizer, prompt, response)
        ids[-1] = self.end_id
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


def _token_rows(data: BatchedDataDict) -> Iterator[tuple[list[int], list[int]]]:
    """Tokens of prompt and response of each row of a rollout."""
    rows = zip(
        data["input_ids"].tolist(),
        data["prompt_lengths"].tolist(),
        data["input_lengths"].tolist(),
        strict=True,
    )
    for ids, start, end in rows:
        yield ids[:start], ids[start:end]


def response_texts(tokenizer: Tokenizer, data: BatchedDataDict) -> list[str]:
    """The responses of a rollout, without the end-of-sequence token.

    Reads ``input_ids`` int64 [B, S], ``prompt_lengths`` and ``input_lengths`` int64 [B].
    """
    return [decode_response(tokenizer, *row) for row in _token_rows(data)]


def scored_texts(
    tokenizer: Tokenizer,
    data: BatchedDataDict,
    responses: Sequence[str],
    end_strings: Sequence[str],
) -> list[str]:
    """``responses`` as a reward model is shown them: without the stop string that ended them.

    Args:
        tokenizer: the policy's.
        data: of the rollout: what `response_texts` reads, and ``is_end`` bool [B].
        responses: what that returned.
        end_strings: the policy's stop strings.
    """
    if not end_strings:
        return list(responses)
    rows = zip(responses, data["is_end"].tolist(), _token_rows(data), strict=True)
    return [
        _without_stop(tokenizer, *tokens, text, end_strings) if ended else text
        for text, ended, tokens in rows
    ]


def _without_stop(
    tokenizer: Tokenizer,
    prompt_ids: list[int],
    response_ids: list[int],
    text: str,
    end_strings: Sequence[str],
) -> str:
    """A stop string ended the response where its last token completed one.

    Earlier ones, before ``min_length``, are part of it, but for repetitions at the very end. The
    last token may hold more than the stop string: what follows it goes too.
    """
    if response_ids[-1] in tokenizer.end_ids:
        return text
    before = decode_response(tokenizer, prompt_ids, response_ids[:-1])
    old = common_prefix(before, text)
    begins = (text.find(string, max(0, old - len(string) + 1)) for string in end_strings)
    text = text[: min((at for at in begins if at >= 0), default=len(text))]
    while stop := next((string for string in end_strings if text.endswith(string)), None):
        text = text.removesuffix(stop)
    return text
