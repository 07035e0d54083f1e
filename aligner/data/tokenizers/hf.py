"""Hugging Face tokenizers. Only chat templates need transformers."""

import copy
import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from aligner.data.tokenizers.decoding import known_ids
from aligner.data.tokenizers.tokenizer import (
    GENERATION_CONFIG,
    RunClock,
    config_of,
    generation_ends,
)
from aligner.errors import DataError, TokenizerError, raised_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL_NAMES = (
    *("eos_token", "bos_token", "pad_token"),
    *("unk_token", "sep_token", "cls_token", "mask_token"),  # variables of templates
)
_ANSWER = "an answer"  # text to find in a rendered chat


class HuggingFaceTokenizer:
    """Tokenizer of a ``tokenizer.json`` with the special tokens of ``tokenizer_config.json``."""

    def __init__(
        self,
        backend: RustTokenizer,
        config: Mapping[str, Any],
        *,
        generation_config: Mapping[str, Any] | None = None,
        origin: str = "tokenizer.json",
    ) -> None:
        """Create a tokenizer. Raises `TokenizerError` if ``config`` names no EOS token.

        Args:
            backend: tokenizer of the package ``tokenizers``. Its truncation and padding are turned
                off.
            config: ``eos_token`` (required), ``bos_token`` and ``pad_token`` as text, and
                ``chat_template`` as Jinja text or a list of named templates.
            generation_config: content of ``generation_config.json``. Its ``eos_token_id`` lists
                additional tokens that end a response.
            origin: name of the tokenizer's source, for errors.
        """
        self._backend = backend
        self._backend.no_truncation()
        self._backend.no_padding()
        self._config = dict(config)
        self._generation = dict(generation_config or {})
        self._ends: tuple[int, ...] | None = None
        self._origin = origin
        self._renderer: PreTrainedTokenizerFast | None = None
        self._template_kwargs: dict[str, Any] = {}
        self.vocab_size = 1 + max(backend.get_vocab(with_added_tokens=True).values())
        self.bos_id = self._special_id("bos_token")
        eos_id, pad_id = self._special_id("eos_token"), self._special_id("pad_token")
        if eos_id is None:
            raise TokenizerError(
                f"{origin} names no end-of-sequence token. Set eos_token in the "
                "tokenizer_config.json of the same directory"
            )
        self.eos_id = eos_id
        self.pad_id = eos_id if pad_id is None else pad_id

    @classmethod
    def from_files(
        cls, files: Mapping[str, bytes], *, origin: str = "the tokenizer files"
    ) -> "HuggingFaceTokenizer":
        """Build a tokenizer from ``files``, name → content of ``tokenizer.json`` and other files.

        Raises `TokenizerError` if a file is damaged.
        """
        config = _read_config(files, origin)
        with raised_as(TokenizerError, f"{origin} is not a readable tokenizer"):
            backend = RustTokenizer.from_buffer(files["tokenizer.json"].removeprefix(BOM_UTF8))
        _add_missing_tokens(backend, config)
        generation_ends(files, origin)  # raises for invalid ids
        generation = config_of(files, GENERATION_CONFIG, origin)
        return cls(backend, config, generation_config=generation, origin=origin)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Tokens that end a response, without duplicates. The first is ``eos_id``."""
        if self._ends is None:
            configured = generation_ends(self._generation_file(), self._origin)
            self._ends = tuple(dict.fromkeys((self.eos_id, *configured, self.turn_end_id)))
        return self._ends

    @property
    def turn_end_id(self) -> int:
        """Token that ends an assistant's message in the chat template. Default: EOS."""
        if not self._config.get("chat_template"):
            return self.eos_id
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self.apply_chat_template(chat, add_generation_prompt=False)
        except DataError:  # the template does not accept this chat
            return self.eos_id
        suffix = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
        added = self._backend.get_added_tokens_decoder()
        candidates = [end for end, token in added.items() if suffix.startswith(token.content)]
        return max(candidates, key=lambda end: len(added[end].content), default=self.eos_id)

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the added tokens that are marked as special."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def added_tokens(self) -> dict[int, str]:
        """Id → text of every added token, special or not. `encode` recognises them in any text."""
        added = self._backend.get_added_tokens_decoder()
        return {token_id: token.content for token_id, token in added.items()}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``. No BOS or EOS token is added."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ``ids``, including special tokens."""
        text: str = self._backend.decode(known_ids(ids, self.vocab_size), skip_special_tokens=False)
        return text

    def with_end_tokens(self, tokens: Sequence[str | int]) -> "HuggingFaceTokenizer":
        """Return a copy for which ``tokens`` (texts or ids) also end a response.

        The `files` of the copy contain these tokens.

        Raises `TokenizerError` if a text or id is not a token.
        """
        ids = []
        for token in tokens:
            token_id = token if isinstance(token, int) else self._backend.token_to_id(token)
            if token_id is None or not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"end_tokens: {token!r} is not a single token of {self._origin}. Use "
                    "end_strings for longer text"
                )
            ids.append(token_id)
        # Store the end tokens as ``eos_token_id`` of the generation configuration.
        ends = tuple(dict.fromkeys((*self.end_ids, *ids)))
        if ends == self.end_ids:
            return self
        result = copy.copy(self)
        result._generation, result._ends = {**self._generation, "eos_token_id": list(ends)}, ends
        return result

    def with_template_kwargs(self, values: Mapping[str, Any]) -> "HuggingFaceTokenizer":
        """Return a copy that passes ``values`` (name → value) as variables to its chat template.

        Raises `DataError` if the template does not read a variable, or its name is reserved.
        """
        from transformers import PreTrainedTokenizerFast

        reserved = set(signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
        reserved = ((reserved - {"documents"}) | {"messages", "conversations"}) & values.keys()
        if reserved:
            raise DataError(
                f"chat_template_kwargs: {', '.join(reserved)} is an argument of transformers' "
                "apply_chat_template. Remove this key"
            )
        # Refuse a variable without effect.
        text = str(self._config.get("chat_template"))
        unused = [name for name in values if not re.search(rf"\b{re.escape(name)}\b", text)]
        if unused:
            raise DataError(
                f"chat_template_kwargs={dict(values)!r:.200}: the model's chat template does not "
                f"read {', '.join(unused):.200}. Remove the unread keys"
            )
        result = copy.copy(self)
        result._template_kwargs, result._ends = {**self._template_kwargs, **values}, None
        return result

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render ``messages`` to text. For the arguments see `Tokenizer.apply_chat_template`.

        Raises `DataError` if the template refuses the messages, and `TokenizerError` if the
        tokenizer has no template.
        """
        if not self._config.get("chat_template"):
            raise TokenizerError(
                f"{self._origin} has no chat template, so chat messages cannot become a prompt. "
                "Use a tokenizer with a chat_template, or plain-text prompts"
            )
        if self._renderer is None:
            self._renderer = self._make_renderer()
        # Jinja and the template itself can raise errors.
        with raised_as(DataError, "the chat template refuses the messages"):
            text = self._renderer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **self._template_kwargs,
            )
            str(text).encode()  # fails for half a character, which JSON text can contain
        return str(text)

    def files(self) -> dict[str, bytes]:
        """Return name → content of the files, from which `from_files` builds an equal tokenizer."""
        return {
            "tokenizer.json": self._backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(self._config, indent=2).encode(),
            **self._generation_file(),
        }

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_renderer": None}

    def _generation_file(self) -> dict[str, bytes]:
        if not self._generation:
            return {}
        return {GENERATION_CONFIG: json.dumps(self._generation, indent=2).encode()}

    def _special_id(self, name: str) -> int | None:
        text = self._config.get(name)
        if text is None:
            return None
        token_id: int | None = self._backend.token_to_id(text)
        if token_id is None:
            raise TokenizerError(
                f"{self._origin}: {name}={text!r} is not in the vocabulary. Correct "
                "tokenizer_config.json"
            )
        return token_id

    def _make_renderer(self) -> "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = RunClock  # for `strftime_now` of templates
        special: dict[str, Any] = {  # variables of templates
            name: text
            for name, token in self._config.items()
            if name.endswith("_token")
            and isinstance(text := token.get("content") if isinstance(token, dict) else token, str)
        }
        extra = self._config.get("extra_special_tokens")
        if isinstance(extra, Mapping):
            special["extra_special_tokens"] = dict(extra)
        # Convert a list of named templates to a mapping.
        template = self._config["chat_template"]
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend, chat_template=template, **special
        )


def _read_config(files: Mapping[str, bytes], origin: str) -> dict[str, Any]:
    """Return ``tokenizer_config.json`` with special tokens as text, and with the chat template."""
    # Merge both files, and replace special tokens that are mappings by their text.
    settings: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        settings |= config_of(files, name, origin)
    for name in _SPECIAL_NAMES:
        token = settings.get(name)
        if token is None:
            continue
        text = token.get("content") if isinstance(token, dict) else token
        if not isinstance(text, str):
            raise TokenizerError(f"{origin}: {name}={token!r} is not a text. Correct the file")
        settings[name] = text
    # Read the chat template: a text, or a list of named templates.
    if "chat_template.jinja" in files:
        settings["chat_template"] = files["chat_template.jinja"].decode("utf-8-sig")
    template = settings.get("chat_template")
    if isinstance(template, list) and all(
        isinstance(entry, Mapping)
        and all(isinstance(entry.get(key), str) for key in ("name", "template"))
        for entry in template
    ):
        # transformers uses the template "default". A single template needs no such name.
        names = {entry["name"] for entry in template}
        if len(names) == 1 and "default" not in names:
            settings["chat_template"] = template[-1]["template"]
    elif not isinstance(template, str | None):
        raise TokenizerError(
            f"{origin}: chat_template is neither a text nor a list of named templates. Correct "
            "tokenizer_config.json"
        )
    return settings


def _add_missing_tokens(backend: RustTokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens to ``backend`` that ``tokenizer_config.json`` has and ``tokenizer.json`` lacks."""
    declared = config.get("added_tokens_decoder") or {}
    text = "added_tokens_decoder of tokenizer_config.json is not a mapping of ids to tokens"
    with raised_as(TokenizerError, text, AttributeError, KeyError, TypeError, ValueError):
        tokens = sorted(
            (int(token_id), str(token["content"]), bool(token.get("special")))
            for token_id, token in declared.items()
        )
    # Check that each token gets the id that the file gives.
    for token_id, content, special in tokens:
        if backend.token_to_id(content) is None:
            backend.add_tokens([AddedToken(content, special=special)])
            if backend.token_to_id(content) != token_id:
                raise TokenizerError(
                    f"tokenizer_config.json gives the added token {content!r} the id {token_id}, "
                    "but this is not the next free id of tokenizer.json. Give a tokenizer.json "
                    "that contains the token"
                )
