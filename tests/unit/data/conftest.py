import pytest

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return byte_level_tokenizer()
