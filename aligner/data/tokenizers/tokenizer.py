"""One interface for all tokenizers; `aligner.data.tokenizers.loading` finds the right one."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aligner.errors import TokenizerError, raised_as

GENERATION_CONFIG = "generation_config.json"
# What a tokenizer is made of, beside SentencePiece models (`is_tokenizer_file`).
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"),
    GENERATION_CONFIG,
)
_SENTENCEPIECE = re.compile(r"\w[\w -]*(\.[\w -]+)*\.model")


def is_tokenizer_file(name: object) -> bool:
    """Return whether this is a name that files of tokenizers have.

    A name that another file brings along becomes a path where the tokenizer is written: one that is
    none of these is to be refused.
    """
    return isinstance(name, str) and (
        name in TOKENIZER_FILES or _SENTENCEPIECE.fullmatch(name) is not None
    )


@runtime_checkable
class Tokenizer(Protocol):
    """Text to token ids and back. Picklable, so that it can travel to workers."""

    vocab_size: int  # largest token id plus one: the rows an embedding needs before padding
    eos_id: int  # the token that ends a response
    bos_id: int | None  # the token that begins a text, if there is one
    pad_id: int  # the token to fill with; the end-of-sequence token if there is no other

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every token that ends a response, ``eos_id`` first.

        Further ones come from ``generation_config.json``, from the end of an assistant's message in
        the chat template, and from `with_end_tokens`.
        """
        ...

    @property
    def turn_end_id(self) -> int:
        """The token that ends an assistant's message in the chat template; else ``eos_id``."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; none are added. Special tokens spelt out in it are found."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens spelt out; incomplete UTF-8 shows as U+FFFD.

        Ids from ``vocab_size`` on have no text: an embedding may be wider than its tokenizer, and
        sampling and log-probs are over all of its rows.

        For a response use :func:`aligner.data.tokenizers.decoding.decode_response`, which knows the
        prompt.
        """
        ...

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The text of a chat, by default with the opening of the assistant's next message.

        ``tools``: JSON schemas of functions that the assistant may call.
        """
        ...

    def with_template_kwargs(self, values: Mapping[str, Any]) -> "Tokenizer":
        """The same tokenizer, whose chat template has these variables; ``files`` forget them."""
        ...

    def with_end_tokens(self, tokens: Sequence[str | int]) -> "Tokenizer":
        """The same tokenizer, for which these tokens (text or ids) end a response as well.

        Raises:
            TokenizerError: one of them is no token.
        """
        ...

    def files(self) -> dict[str, bytes]:
        """File name → content of everything ``tokenizer_from_files`` needs to rebuild this."""
        ...


def known_ids(ids: Sequence[int], size: int) -> list[int]:
    """The ids below ``size``, without those of rows that an embedding has beyond the tokenizer.

    Raises:
        TokenizerError: one of them is negative.
    """
    if min(ids, default=0) < 0:
        raise TokenizerError(f"token id {min(ids)} is negative; a vocabulary begins at 0")
    return [int(token) for token in ids if token < size]


def differing_token(one: Tokenizer, other: Tokenizer) -> str | None:
    """The first token id that means something else to the two, in words; None: there is none."""
    if one.files() == other.files():
        return None
    if one.vocab_size != other.vocab_size:
        return f"{one.vocab_size:,} tokens, and {other.vocab_size:,}"
    for token in range(one.vocab_size):
        texts = one.decode([token]), other.decode([token])
        if texts[0] != texts[1]:
            return f"token {token} is {texts[0]!r}, and {texts[1]!r}"
    return None


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


def with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return ``ids`` with a BOS token before, if the tokenizer has one and ``ids`` lack it."""
    bos = tokenizer.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def json_object(files: Mapping[str, bytes], name: str, origin: str) -> dict[str, Any]:
    """Content of one of a tokenizer's files; empty if there is no such file.

    Raises:
        TokenizerError: it is not a JSON object.
    """
    with raised_as(TokenizerError, f"{origin}: {name} is not JSON", ValueError, RecursionError):
        content = json.loads(files.get(name, b"{}"))
    if not isinstance(content, dict):
        raise TokenizerError(f"{origin}: {name} does not hold a JSON object")
    return content


def generation_ends(files: Mapping[str, bytes], origin: str) -> tuple[int, ...]:
    """``eos_token_id`` of ``generation_config.json``, one number or a list; () where it is silent.

    Raises:
        TokenizerError: the file is not JSON, or has no valid token id.
    """
    ends = json_object(files, GENERATION_CONFIG, origin).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and end >= 0 for end in ends):
        raise TokenizerError(
            f"{origin}: eos_token_id={ends!r} of {GENERATION_CONFIG} must be a token id or a list "
            "of them"
        )
    return tuple(ends)
