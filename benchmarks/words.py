"""A tokenizer of words w0, w1, …, and of an end that pads, for both sides of a comparison."""

from collections.abc import Sequence

from tokenizers import AddedToken, Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel

END = "</s>"


def word_backend(vocab: int) -> Tokenizer:
    """Return a tokenizer of ``vocab`` tokens."""
    words = {f"w{number}": number for number in range(vocab - 1)}
    backend = Tokenizer(WordLevel({**words, END: vocab - 1}, unk_token=END))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return backend


def text_of(ids: Sequence[int]) -> str:
    """Return the words of ``ids``."""
    return " ".join(f"w{number}" for number in ids)
