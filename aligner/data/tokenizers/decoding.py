"""Text of response tokens: whole, as they come, and whether a stop string is complete in it."""

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


def common_prefix(first: Sequence[object], second: Sequence[object]) -> int:
    """Return the length of the common prefix of two texts or sequences."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))


def _context_of(
    tokenizer: Tokenizer, prompt_ids: Sequence[int], limit: int = _CONTEXT
) -> tuple[list[int], str]:
    """Last tokens of the prompt and their text; none if the prompt ends within a character."""
    context = list(prompt_ids[max(0, len(prompt_ids) - limit) :])
    text = tokenizer.decode(context) if context else ""
    return ([], "") if text.endswith(_INCOMPLETE) else (context, text)


class StopStrings:
    """Tells when a response has come to contain one of ``strings``.

    A token whose own text does not hold the last character of any stop string cannot complete one;
    that is remembered per token id, so for most tokens nothing is decoded.
    """

    def __init__(self, tokenizer: Tokenizer, strings: Sequence[str]) -> None:
        assert all(strings)
        self._tokenizer = tokenizer
        self._strings = tuple(strings)
        self._last_characters = {string[-1] for string in strings}
        self._may_complete: dict[int, bool] = {}
        # A character takes at most four byte tokens.
        self._tail = _CONTEXT + 4 * max(len(string) for string in strings)

    def completed(self, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Return whether the last token of ``response`` completes a stop string.

        The string must begin in the response: what the prompt ends with does not count.
        """
        if not self._candidate(response[-1]):
            return False
        response = response[-self._tail :]
        # If the tail reaches back into the prompt its text is separated by its length.
        context, context_text = _context_of(self._tokenizer, prompt, self._tail - len(response))
        before = self._tokenizer.decode([*context, *response[:-1]])
        text = self._tokenizer.decode([*context, *response])
        # What the last token changed; it may have turned U+FFFD into the character it completes.
        old = common_prefix(before, text)
        return any(
            text.find(string, max(len(context_text), old - len(string) + 1)) >= 0
            for string in self._strings
        )

    def _candidate(self, token: int) -> bool:
        known = self._may_complete.get(token)
        if known is None:
            text = self._tokenizer.decode([token])
            # Part of a character, or a space that shows only after other text: decode to be sure.
            unsure = not text.strip() or _INCOMPLETE in text or text[0].isspace()
            known = unsure or not self._last_characters.isdisjoint(text)
            self._may_complete[token] = known
        return known
