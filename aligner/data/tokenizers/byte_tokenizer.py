"""Tokenizer with one token per byte, which needs no training."""

import itertools

from tokenizers import AddedToken, decoders, pre_tokenizers
from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from aligner.data.tokenizers.hf import HuggingFaceTokenizer

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + "
    "message['content'] + '<|im_end|>' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_level_tokenizer() -> HuggingFaceTokenizer:
    """Build a tokenizer whose token ids are byte values, with a chat template in ChatML's format.

    The special tokens are ``<|endoftext|>`` 256, ``<|im_start|>`` 257 and ``<|im_end|>`` 258.
    ``<|im_end|>`` is both end and padding token.
    """
    vocab = {character: byte for byte, character in enumerate(_byte_characters())}
    backend = RustTokenizer(BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS]
    )
    # Settings in the form of Hugging Face.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "pad_token": "<|im_end|>",
        "unk_token": "<|endoftext|>",
        "chat_template": _CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    return HuggingFaceTokenizer(backend, config, origin="the byte-level tokenizer")


def _byte_characters() -> list[str]:
    """Return GPT-2's printable character for each byte: the byte's own, or one from U+0100 on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    replacements = itertools.count(256)
    return [chr(byte if byte in printable else next(replacements)) for byte in range(256)]
