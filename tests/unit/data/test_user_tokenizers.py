"""A user's own tokenizer is what its files make."""

import pytest
from user_code import directory_with

from aligner.data.tokenizers.loading import named_tokenizer
from aligner.errors import ConfigError

TOKENIZERS = """
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer

def good():
    return byte_level_tokenizer()

def wants(path):
    return byte_level_tokenizer()

def raises():
    raise OSError("no vocabulary")

def none():
    return None

def not_what_its_files_are():
    made = byte_level_tokenizer()
    made.encode = lambda text: [0] * len(text)
    return made
"""


@pytest.fixture
def here(tmp_path, monkeypatch):
    yield from directory_with(tmp_path, monkeypatch, "my_tokenizers", TOKENIZERS)


def test_a_tokenizer_of_a_function(here):
    made = named_tokenizer("my_tokenizers.py:good", key="model.tokenizer")
    assert made.encode("a") == [ord("a")]
    for name, words in {
        "wants": "missing a required argument: 'path'.*without arguments",
        "raises": "raised OSError: no vocabulary",
        "none": "returned a NoneType. Return a tokenizer of transformers",
        "not_what_its_files_are": "encodes text or ends responses differently",
        "gone": "has no function 'gone'",
    }.items():
        with pytest.raises(ConfigError, match=rf"model\.tokenizer='?my_tokenizers.*{words}"):
            named_tokenizer(f"my_tokenizers.py:{name}", key="model.tokenizer")
