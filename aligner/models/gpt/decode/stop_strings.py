"""Search for the token that completes a stop string, on decoded text at little cost per token."""

from collections.abc import Sequence

from aligner.data.tokenizers.decoding import common_prefix
from aligner.data.tokenizers.tokenizer import Tokenizer

_CONTEXT = 8  # tokens that a token's text may depend on (`aligner.data.tokenizers.decoding`)
_INCOMPLETE = "�"


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
        # Where the tail reaches back into the prompt its text is separated by its length.
        context = list(prompt[len(prompt) - min(len(prompt), self._tail - len(response)) :])
        context_text = self._tokenizer.decode(context) if context else ""
        if context_text.endswith(_INCOMPLETE):
            context, context_text = [], ""
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
