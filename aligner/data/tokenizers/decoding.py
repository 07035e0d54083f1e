"""Decoding of response tokens, completely or incrementally, and detection of stop strings."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.errors import TokenizerError

if TYPE_CHECKING:  # readers of data need no PyTorch
    from aligner.distributed.batched_data_dict import BatchedDataDict

# Number of earlier tokens on which a token's text can depend: SentencePiece drops the space of the
# first piece, and a character may consist of up to four byte tokens.
_CONTEXT = 8
_INCOMPLETE = "�"


def known_ids(ids: Sequence[int], size: int) -> list[int]:
    """Return the ids below ``size``. Higher ids have no text: they are padding of an embedding.

    Raises `TokenizerError` if an id is negative.
    """
    if min(ids, default=0) < 0:
        raise TokenizerError(f"token id {min(ids)} is negative. Give token ids from 0 on")
    return [int(token) for token in ids if token < size]


def decode_response(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], response_ids: Sequence[int]
) -> str:
    """Return the text of a response that follows a prompt, without its final end token.

    Unlike ``tokenizer.decode``, the space at the start of a SentencePiece response is kept.
    """
    response_ids = list(response_ids)
    if response_ids and response_ids[-1] in tokenizer.end_ids:
        response_ids.pop()
    context, context_text = _context_of(tokenizer, prompt_ids)
    return tokenizer.decode([*context, *response_ids])[len(context_text) :]


def token_rows(data: "BatchedDataDict") -> Iterator[tuple[list[int], list[int]]]:
    """Yield the token ids of the prompt and of the response for each row of a rollout."""
    names = ("input_ids", "prompt_lengths", "input_lengths")
    for ids, start, end in zip(*(data[name].tolist() for name in names), strict=True):
        yield ids[:start], ids[start:end]


def response_texts(tokenizer: Tokenizer, data: "BatchedDataDict") -> list[str]:
    """Return the text of each response in a rollout, without its end token.

    Reads ``input_ids`` int64 [B, S], ``prompt_lengths`` and ``input_lengths`` int64 [B].
    """
    return [decode_response(tokenizer, *row) for row in token_rows(data)]


class IncrementalDecoder:
    """Decoder of a response that grows token by token.

    The results of all calls of `push` and of `flush` together are the complete text. If several
    tokens form a character, only the last `push` returns it.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._window, self._emitted = _context_of(tokenizer, prompt_ids)

    def push(self, token_id: int) -> str:
        """Add a token and return the text that it completes."""
        self._window.append(int(token_id))
        text = self._tokenizer.decode(self._window)
        return "" if text.endswith(_INCOMPLETE) else self._emit(text)

    def flush(self) -> str:
        """Return the remaining text after the last token. Incomplete characters become U+FFFD."""
        return self._emit(self._tokenizer.decode(self._window))

    def _emit(self, text: str) -> str:
        new = text[len(self._emitted) :]
        # Keep only the context, so that the cost of a push does not grow with the response.
        self._window = self._window[-_CONTEXT:]
        self._emitted = self._tokenizer.decode(self._window)
        return new


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts or sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _context_of(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], limit: int = _CONTEXT
) -> tuple[list[int], str]:
    """Return the last ``limit`` prompt ids and their text. Both are empty if a character is cut."""
    context = list(prompt_ids[max(0, len(prompt_ids) - limit) :])
    text = tokenizer.decode(context) if context else ""
    return ([], "") if text.endswith(_INCOMPLETE) else (context, text)


class StopStrings:
    """Detector of stop ``strings`` in a response that grows token by token.

    A token can complete a stop string only if its text contains the string's last character. The
    class caches this property of a token id, so that most tokens need no decoding.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        assert all(strings)
        self._tokenizer, self._strings = tokenizer, tuple(strings)
        self._last_characters = {string[-1] for string in strings}
        self._may_complete: dict[int, bool] = {}
        # A character consists of at most four byte tokens.
        self._tail = _CONTEXT + 4 * max(len(string) for string in strings)

    def completed(self, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Return whether the last token completes a stop string that begins in ``response``."""
        if not self._is_candidate(response[-1]):
            return False
        response = response[-self._tail :]
        # Decode the end of the response, with the end of the prompt if the response is short.
        context, context_text = _context_of(self._tokenizer, prompt, self._tail - len(response))
        previous = self._tokenizer.decode([*context, *response[:-1]])
        text = self._tokenizer.decode([*context, *response])
        # The last token may complete a character, which replaces U+FFFD in the previous text.
        unchanged = common_prefix(previous, text)
        return any(
            text.find(string, max(len(context_text), unchanged - len(string) + 1)) >= 0
            for string in self._strings
        )

    def _is_candidate(self, token: int) -> bool:
        if token not in self._may_complete:
            text = self._tokenizer.decode([token])
            # Parts of characters and leading spaces depend on earlier text: never exclude these.
            is_unsure = not text.strip() or _INCOMPLETE in text or text[0].isspace()
            is_candidate = is_unsure or not self._last_characters.isdisjoint(text)
            self._may_complete[token] = is_candidate
        return self._may_complete[token]
