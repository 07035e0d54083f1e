"""The byte-level tokenizer: a token a byte, and three special ones."""

from hypothesis import given
from hypothesis import strategies as st

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.data.tokenizers.loading import tokenizer_from_files

TOKENIZER = byte_level_tokenizer()


@given(st.text().filter(lambda text: "<|" not in text))  # special tokens
def test_a_token_is_a_byte(text):
    assert TOKENIZER.encode(text) == list(text.encode())
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_special_tokens_and_files():
    assert TOKENIZER.encode("a<|im_end|>") == [97, 258]
    assert (TOKENIZER.vocab_size, TOKENIZER.eos_id, TOKENIZER.bos_id) == (259, 258, 257)
    assert TOKENIZER.pad_id == TOKENIZER.eos_id
    prompt = TOKENIZER.apply_chat_template([{"role": "user", "content": "hi"}])
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    again = tokenizer_from_files(TOKENIZER.files())
    assert again.files() == TOKENIZER.files()
    assert again.encode("é 2+3=5\n") == TOKENIZER.encode("é 2+3=5\n")
