"""User-defined tokenizer: ``model.tokenizer=examples/extend/my_tokenizer.py:by_line``.

The function is called without arguments and returns a tokenizer of transformers or of this library
(`aligner.data.tokenizers.tokenizer`), whose files are saved in the trained ``.nemo``.
"""

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.tokenizer import Tokenizer


def by_line() -> Tokenizer:
    """Return a tokenizer with a token per byte, for which a line break ends a response."""
    return byte_level_tokenizer().with_end_tokens([ord("\n")])
