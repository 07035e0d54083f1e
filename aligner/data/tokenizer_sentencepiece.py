"""SentencePiece models, as NeMo's Llama-style checkpoints carry them."""

from collections.abc import Mapping, Sequence

from sentencepiece import SentencePieceProcessor

from aligner.errors import TokenizerError


class SentencePieceTokenizer:
    """One ``.model`` file. Plain text only: it has no chat template."""

    def __init__(self, model: bytes, *, origin: str = "tokenizer.model") -> None:
        """Load from the file's content; ``origin`` is for error messages."""
        self._model = model
        self._origin = origin
        self._processor = SentencePieceProcessor()
        try:
            # Not the constructor: it ignores an empty or damaged serialized model.
            self._processor.LoadFromSerializedProto(model)
        except Exception as error:
            raise TokenizerError(f"{origin} is not a SentencePiece model: {error}") from error
        if self._processor.eos_id() < 0:
            raise TokenizerError(
                f"{origin} has no end-of-sequence piece; train it with eos_id >= 0"
            )

    @property
    def vocab_size(self) -> int:
        """Number of pieces."""
        return int(self._processor.get_piece_size())

    @property
    def eos_id(self) -> int:
        """End-of-sequence piece."""
        return int(self._processor.eos_id())

    @property
    def bos_id(self) -> int | None:
        """Beginning-of-sequence piece, if the model has one."""
        bos = int(self._processor.bos_id())
        return None if bos < 0 else bos

    @property
    def pad_id(self) -> int:
        """Padding piece; the end-of-sequence piece where there is none."""
        pad = int(self._processor.pad_id())
        return self.eos_id if pad < 0 else pad

    def encode(self, text: str) -> list[int]:
        """Piece ids of ``text``."""
        ids: list[int] = self._processor.encode(text, out_type=int)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``; control pieces (BOS, EOS, padding) have none."""
        ids = [int(token) for token in ids]
        if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
            raise TokenizerError(
                f"token ids {min(ids)}..{max(ids)} leave the vocabulary of {self.vocab_size}"
            )
        text: str = self._processor.decode(ids)
        return text

    def apply_chat_template(
        self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = True
    ) -> str:
        """Refuse: a SentencePiece model holds no template."""
        raise TokenizerError(
            f"{self._origin} is a SentencePiece model without a chat template, so "
            f"{len(messages)} chat messages cannot become a prompt; use plain-text prompts or a "
            "Hugging Face tokenizer"
        )

    def files(self) -> dict[str, bytes]:
        """The model under the name ``tokenizer.model``."""
        return {"tokenizer.model": self._model}

    def __getstate__(self) -> tuple[bytes, str]:
        return self._model, self._origin

    def __setstate__(self, state: tuple[bytes, str]) -> None:
        self.__init__(state[0], origin=state[1])  # type: ignore[misc]
