"""SentencePiece models, as in NeMo's Llama-style checkpoints."""

from collections.abc import Mapping, Sequence
from typing import Any

from sentencepiece import SentencePieceProcessor

from aligner.data.tokenizers.decoding import known_ids
from aligner.data.tokenizers.tokenizer import generation_file
from aligner.errors import DataError, TokenizerError, raised_as


class SentencePieceTokenizer:
    """Tokenizer of one ``.model`` file, for plain text. The file has no chat template."""

    def __init__(
        self, model: bytes, *, extra_ends: Sequence[int] = (), origin: str = "tokenizer.model"
    ) -> None:
        """Load ``model``, the file's content. Raises `TokenizerError` if it is damaged.

        ``extra_ends``: ids that end a response in addition to EOS. ``origin``: name of the file,
        for errors.
        """
        self._model, self._extra_ends, self._origin = model, tuple(extra_ends), origin
        self._processor = SentencePieceProcessor()
        with raised_as(TokenizerError, f"{origin} is not a SentencePiece model"):
            # The constructor ignores an empty or damaged serialized model.
            self._processor.LoadFromSerializedProto(model)
        self.vocab_size = int(self._processor.get_piece_size())
        self.eos_id = self.turn_end_id = int(self._processor.eos_id())
        if self.eos_id < 0:
            raise TokenizerError(
                f"{origin} has no end-of-sequence piece. Train the SentencePiece model with "
                "eos_id >= 0"
            )
        bos_id, pad_id = int(self._processor.bos_id()), int(self._processor.pad_id())
        self.bos_id = None if bos_id < 0 else bos_id
        self.pad_id = self.eos_id if pad_id < 0 else pad_id
        self.end_ids = tuple(dict.fromkeys((self.eos_id, *self._extra_ends)))

    @property
    def added_tokens(self) -> dict[int, str]:
        """Id → text of every user-defined piece. `encode` recognises them in any text."""
        from sentencepiece.sentencepiece_model_pb2 import ModelProto  # type: ignore[attr-defined]

        pieces = ModelProto.FromString(self._model).pieces
        return {n: p.piece for n, p in enumerate(pieces) if p.type == p.USER_DEFINED}

    def encode(self, text: str) -> list[int]:
        """Return the piece ids of ``text``."""
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``. Control pieces (BOS, EOS, padding) have no text."""
        text: str = self._processor.decode(known_ids(ids, self.vocab_size))
        return text

    def with_end_tokens(self, tokens: Sequence[str | int]) -> "SentencePieceTokenizer":
        """Return a copy for which these pieces (text or ids) also end a response.

        Raises `TokenizerError` if a text or id is not a piece.
        """
        ids = [
            token if isinstance(token, int) else int(self._processor.piece_to_id(token))
            for token in tokens
        ]
        # An unknown text gets the id of the unknown piece.
        for token, piece_id in zip(tokens, ids, strict=True):
            is_piece = 0 <= piece_id < self.vocab_size
            if not (is_piece and token in (piece_id, self._processor.id_to_piece(piece_id))):
                raise TokenizerError(
                    f"end_tokens: {token!r} is not a piece of {self._origin}. Use end_strings for "
                    "text of several pieces"
                )
        return SentencePieceTokenizer(
            self._model, extra_ends=(*self._extra_ends, *ids), origin=self._origin
        )

    def with_template_kwargs(self, values: Mapping[str, Any]) -> "SentencePieceTokenizer":
        """Return this tokenizer. Raises `DataError` for any values, because it has no template."""
        if values:
            raise DataError(
                f"chat_template_kwargs: {self._origin} has no chat template. Remove the key"
            )
        return self

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Raise `TokenizerError`, because a SentencePiece model has no template."""
        raise TokenizerError(
            f"{self._origin} is a SentencePiece model without a chat template, so "
            f"{len(messages)} chat messages cannot become a prompt. Use plain-text prompts or a "
            "Hugging Face tokenizer"
        )

    def files(self) -> dict[str, bytes]:
        """Return name → content of ``tokenizer.model``, and of an end-token file if set."""
        ends = generation_file(self.end_ids) if self._extra_ends else {}
        return {"tokenizer.model": self._model, **ends}

    def __getstate__(self) -> tuple[bytes, tuple[int, ...], str]:
        return self._model, self._extra_ends, self._origin

    def __setstate__(self, state: tuple[bytes, tuple[int, ...], str]) -> None:
        model, ends, origin = state
        self.__init__(model, extra_ends=ends, origin=origin)  # type: ignore[misc]
