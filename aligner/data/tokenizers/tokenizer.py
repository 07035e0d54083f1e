"""Interface of all tokenizers, and names and contents of their files."""

import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, tzinfo
from typing import Any, Protocol, Self, runtime_checkable

from aligner.errors import TokenizerError, json_object

GENERATION_CONFIG = "generation_config.json"
# Files of a tokenizer, in addition to SentencePiece models (`is_tokenizer_file`).
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("chat_template.jinja", "tokenizer.model", "vocab.json", "merges.txt"),
    GENERATION_CONFIG,
)
_SENTENCEPIECE = re.compile(r"\w[\w -]*(\.[\w -]+)*\.model")


def is_tokenizer_file(name: object) -> bool:
    """Return whether ``name`` is a file name of a tokenizer, and not a path to another file."""
    return isinstance(name, str) and (
        name in TOKENIZER_FILES or _SENTENCEPIECE.fullmatch(name) is not None
    )


@runtime_checkable
class Tokenizer(Protocol):
    """Converter between text and token ids. It can be pickled and sent to workers."""

    vocab_size: int  # largest token id plus one
    eos_id: int  # token that ends a response
    bos_id: int | None  # token that begins a text, if any
    pad_id: int  # padding token, by default the end-of-sequence token

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a response, without duplicates. The first is ``eos_id``.

        The others are from ``generation_config.json``, `turn_end_id` and `with_end_tokens`.
        """

    @property
    def turn_end_id(self) -> int:
        """Token that ends an assistant's message in the chat template. Default: ``eos_id``."""

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``. No BOS or EOS token is added.

        The text of a special token in ``text`` becomes this token.
        """

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, with the text of special tokens.

        Incomplete UTF-8 becomes U+FFFD. Ids of ``vocab_size`` and above have no text, because they
        are padding of an embedding. For a response after a prompt, use `decode_response`.
        """

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Return a chat as text. ``tools``: JSON schemas of functions that the model may call."""

    def with_template_kwargs(self, values: Mapping[str, Any]) -> "Tokenizer":
        """Return a copy that passes variables, ``values``, to its chat template. Not in `files`."""

    def with_end_tokens(self, tokens: Sequence[str | int]) -> "Tokenizer":
        """Return a copy for which these tokens (text or ids) also end a response.

        Raises `TokenizerError` if a text or id is not a token.
        """

    def files(self) -> dict[str, bytes]:
        """Return name → content of the files from which an equal tokenizer can be built."""


def differing_token(first: Tokenizer, second: Tokenizer) -> str | None:
    """Return a text about the first difference between two vocabularies, or None if equal."""
    if first.files() == second.files():
        return None
    if first.vocab_size != second.vocab_size:
        return f"{first.vocab_size:,} tokens, and {second.vocab_size:,}"
    for token in range(first.vocab_size):
        texts = first.decode([token]), second.decode([token])
        if texts[0] != texts[1]:
            return f"token {token} is {texts[0]!r}, and {texts[1]!r}"
    return None


def encode_after(tokenizer: Tokenizer, ids: Sequence[int], text: str, added: str) -> list[int]:
    """Return the token ids of ``added`` after ``text``, whose token ids are ``ids``."""
    all_ids = tokenizer.encode(text + added)
    if all_ids[: len(ids)] == list(ids):
        return all_ids[len(ids) :]
    return encode_fragment(tokenizer, added)  # a token spans both texts


def encode_fragment(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return the ids of ``text`` inside a longer text, where no tokenizer prepends a space."""
    for prefix in ("\n", ".", "x", "0"):
        prefix_ids = tokenizer.encode(prefix)
        all_ids = tokenizer.encode(prefix + text)
        if prefix_ids and all_ids[: len(prefix_ids)] == prefix_ids:
            return all_ids[len(prefix_ids) :]
    return tokenizer.encode(text)


def with_bos(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Prepend the BOS token to ``ids``, unless it is there or the tokenizer has none."""
    bos = tokenizer.bos_id
    return ids if bos is None or ids[:1] == [bos] else [bos, *ids]


def config_of(files: Mapping[str, bytes], name: str, origin: str) -> dict[str, Any]:
    """Return the JSON object in ``files[name]``, empty if there is no such file."""
    return json_object(files.get(name, b"{}"), TokenizerError, f"{origin}: {name} is not JSON")


def named_templates(named: Mapping[str, str], default: Any) -> list[dict[str, str]]:
    """Return Hugging Face's list of named chat templates. ``default``: template named "default"."""
    templates = {"default": default, **named} if isinstance(default, str) and default else named
    return [{"name": name, "template": text} for name, text in templates.items()]


def generation_file(ends: Iterable[int]) -> dict[str, bytes]:
    """Return name → content of a ``generation_config.json`` with the end tokens ``ends``."""
    return {GENERATION_CONFIG: json.dumps({"eos_token_id": list(ends)}).encode()}


def generation_ends(files: Mapping[str, bytes], origin: str) -> tuple[int, ...]:
    """Return the end tokens in ``generation_config.json``, empty if there are none.

    Raises `TokenizerError` if the file is not JSON, or contains an invalid token id.
    """
    ends = config_of(files, GENERATION_CONFIG, origin).get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    if not all(isinstance(end, int) and end >= 0 for end in ends):
        raise TokenizerError(
            f"{origin}: eos_token_id={ends!r} of {GENERATION_CONFIG} must be a token id or a list "
            "of token ids"
        )
    return tuple(ends)


# Environment variable with the current time for chat templates, fixed at the start of a run. A
# resumed run uses the same time.
TEMPLATE_TIME = "ALIGNER_TEMPLATE_TIME"


class RunClock(datetime):
    """Clock for chat templates, with a fixed time if `TEMPLATE_TIME` is set."""

    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Self:
        """Return the fixed local time, or the current time if none is fixed."""
        fixed = os.environ.get(TEMPLATE_TIME)
        return cls.fromisoformat(fixed) if fixed else super().now(tz)


@contextmanager
def fixed_time(moment: str) -> Iterator[None]:
    """Fix chat templates' time in the ``with`` block to ``moment``, local time in ISO format."""
    os.environ[TEMPLATE_TIME] = moment
    try:
        yield
    finally:
        os.environ.pop(TEMPLATE_TIME, None)
