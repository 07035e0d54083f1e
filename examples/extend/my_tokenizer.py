"""A tokenizer of one's own, by path: ``model.tokenizer=examples/extend/my_tokenizer.py:by_line``.

The function is called without arguments and returns a tokenizer of transformers or of this library
(`aligner.data.tokenizers.tokenizer`), whose files go into the trained ``.nemo``.
"""

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer


def by_line() -> Tokenizer:
    """A token for every byte; a line break ends a response."""
    return byte_level_tokenizer().with_end_tokens([ord("\n")])
