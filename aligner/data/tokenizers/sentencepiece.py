"""SentencePiece models, as NeMo's Llama-style checkpoints carry them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sentencepiece import SentencePieceProcessor

from aligner.data.tokenizers.tokenizer import GENERATION_CONFIG, known_ids
from aligner.errors import DataError, TokenizerError, raised_as


class SentencePieceTokenizer:
    """One ``.model`` file. Plain text only: it has no chat template."""

    def __init__(
        self, model: bytes, *, further_ends: Sequence[int] = (), origin: str = "tokenizer.model"
    ) -> None:
        """Load from the file's content.

        ``further_ends``: pieces that end a response beside EOS; ``origin`` is for error messages.
        """
        self._model = model
        self._further_ends = tuple(further_ends)
        self._origin = origin
        self._processor = SentencePieceProcessor()
        with raised_as(TokenizerError, f"{origin} is not a SentencePiece model"):
            # Not the constructor: it ignores an empty or damaged serialized model.
            self._processor.LoadFromSerializedProto(model)
        self.vocab_size = int(self._processor.get_piece_size())
        self.eos_id = self.turn_end_id = int(self._processor.eos_id())
        if self.eos_id < 0:
            raise TokenizerError(
                f"{origin} has no end-of-sequence piece; train it with eos_id >= 0"
            )
        bos_id, pad_id = int(self._processor.bos_id()), int(self._processor.pad_id())
        self.bos_id = None if bos_id < 0 else bos_id
        self.pad_id = self.eos_id if pad_id < 0 else pad_id
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *self._further_ends)))

    @property
    def added_tokens(self) -> dict[int, str]:
        """Text of every user-defined piece; `encode` finds them in any text."""
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

        pieces = ModelProto.FromString(self._model).pieces
        return {n: each.piece for n, each in enumerate(pieces) if each.type == each.USER_DEFINED}

    def encode(self, text: str) -> list[int]:
        """Piece ids of ``text``."""
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; control pieces (BOS, EOS, padding) have none."""
        text: str = self._processor.decode(known_ids(ids, self.vocab_size))
        return text

    def with_end_tokens(self, tokens: Sequence[str | int]) -> "SentencePieceTokenizer":
        """The same, for which these pieces end a response as well."""
        ids = [
            token if isinstance(token, int) else int(self._processor.piece_to_id(token))
            for token in tokens
        ]
        for token, found in zip(tokens, ids, strict=True):
            is_piece = 0 <= found < self.vocab_size
            if not (is_piece and token in (found, self._processor.id_to_piece(found))):
                raise TokenizerError(
                    f"end_tokens: {token!r} is no piece of {self._origin}; text of several pieces "
                    "goes into end_strings"
                )
        return SentencePieceTokenizer(
            self._model, further_ends=(*self._further_ends, *ids), origin=self._origin
        )

    def with_template_kwargs(self, values: Mapping[str, Any]) -> "SentencePieceTokenizer":
        """The same; `DataError`: there are values, and no template that reads them."""
        if values:
            raise DataError(f"chat_template_kwargs: {self._origin} has no template; leave it out")
        return self

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Refuse: a SentencePiece model holds no template."""
        raise TokenizerError(
            f"{self._origin} is a SentencePiece model without a chat template, so "
            f"{len(messages)} chat messages cannot become a prompt; use plain-text prompts or a "
            "Hugging Face tokenizer"
        )

    def files(self) -> dict[str, bytes]:
        """``tokenizer.model``, and ``generation_config.json`` where more than EOS ends."""
        files = {"tokenizer.model": self._model}
        if self._further_ends:
            files[GENERATION_CONFIG] = json.dumps({"eos_token_id": list(self.end_ids)}).encode()
        return files

    def __getstate__(self) -> tuple[bytes, tuple[int, ...], str]:
        return self._model, self._further_ends, self._origin

    def __setstate__(self, state: tuple[bytes, tuple[int, ...], str]) -> None:
        model, ends, origin = state
        self.__init__(model, further_ends=ends, origin=origin)  # type: ignore[misc]
