"""Decoding of response tokens to text, whole or as they come."""

from collections.abc import Sequence

from aligner.data.tokenizers.tokenizer import Tokenizer

# A token's text depends on few tokens before it: SentencePiece drops the space of a first piece,
# and a character may be spread over up to four byte tokens.
_CONTEXT = 8
_INCOMPLETE = "�"


def decode_response(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], response_ids: Sequence[int]
) -> str:
    """Text that ``response_ids`` add to the prompt; a final token that ends it adds none.

    Differs from ``tokenizer.decode(response_ids)`` where a token's text depends on what stands
    before it: SentencePiece swallows the space of a first piece.
    """
    response_ids = list(response_ids)
    if response_ids and response_ids[-1] in tokenizer.end_ids:
        response_ids.pop()
    context, before = _context_of(tokenizer, prompt_ids)
    return tokenizer.decode([*context, *response_ids])[len(before) :]


class IncrementalDecoder:
    """Text of a growing response, one token at a time.

    Each ``push`` returns the text that became certain, so ``"".join`` of all of them and
    ``flush()`` is the text of the whole. A character whose bytes are spread over several tokens
    appears with its last byte; until then the pushes return the empty string.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        """Start after ``prompt_ids``."""
        self._tokenizer = tokenizer
        self._window, self._emitted = _context_of(tokenizer, prompt_ids)

    def push(self, token_id: int) -> str:
        """Take one more token; return the text it completes."""
        self._window.append(int(token_id))
        text = self._tokenizer.decode(self._window)
        if text.endswith(_INCOMPLETE):
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """The rest, incomplete characters as U+FFFD; call once, at the end."""
        return self._emit(self._tokenizer.decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        # Forget all but the context, so that a push costs the same at any length.
        self._window = self._window[-_CONTEXT:]
        self._emitted = self._tokenizer.decode(self._window)
        return new


def common_prefix(one: str, other: str) -> int:
    """Number of characters with which both begin."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _context_of(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> tuple[list[int], str]:
    """The last tokens of the prompt and their text; nothing if it ends within a character."""
    context = list(prompt_ids[-_CONTEXT:])
    text = tokenizer.decode(context)
    return ([], "") if text.endswith(_INCOMPLETE) else (context, text)
