"""Tokens of a text that follows another one."""

from collections.abc import Sequence

from aligner.data.tokenizers.tokenizer import Tokenizer


def encode_after(tokenizer: Tokenizer, ids: Sequence[int], text: str, more: str) -> list[int]:
    """Ids of ``more`` where it follows ``text``, whose ids stay as they are."""
    whole = tokenizer.encode(text + more)
    if whole[: len(ids)] == list(ids):
        return whole[len(ids) :]
    return encode_fragment(tokenizer, more)  # a token reaches over the border


def encode_fragment(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of a text that is not the beginning of one.

    Encoded by itself it could get a space of its own before it, as some tokenizers begin every
    text, so something else begins it.
    """
    for before in ("\n", ".", "x", "0"):
        head = tokenizer.encode(before)
        whole = tokenizer.encode(before + text)
        if head and whole[: len(head)] == head:
            return whole[len(head) :]
    return tokenizer.encode(text)
