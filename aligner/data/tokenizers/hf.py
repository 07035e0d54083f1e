"""Hugging Face tokenizers, straight on the ``tokenizers`` package."""

import copy
import json
import re
from codecs import BOM_UTF8
from collections.abc import Mapping, Sequence
from inspect import signature
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as RustTokenizer

from aligner.data.tokenizers.clock import RunClock
from aligner.data.tokenizers.tokenizer import (
    GENERATION_CONFIG,
    generation_ends,
    json_object,
    known_ids,
)
from aligner.errors import DataError, TokenizerError, raised_as

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_SPECIAL_NAMES = (
    *("eos_token", "bos_token", "pad_token"),
    *("unk_token", "sep_token", "cls_token", "mask_token"),  # templates may name them
)
_ANSWER = "an answer"  # what is looked for in a rendered chat


class HuggingFaceTokenizer:
    """A ``tokenizer.json`` and the special tokens of ``tokenizer_config.json``."""

    def __init__(
        self,
        backend: RustTokenizer,
        config: Mapping[str, Any],
        *,
        generation_config: Mapping[str, Any] | None = None,
        origin: str = "tokenizer.json",
    ) -> None:
        """Wrap ``backend``.

        Args:
            backend: the tokenizer itself.
            config: ``eos_token`` (required), ``bos_token``, ``pad_token`` as text,
                ``chat_template`` as Jinja text, or a list of named ones; other keys are carried
                along to ``files()``.
            generation_config: its ``eos_token_id`` names further tokens that end a response; the
                rest is carried along to ``files()``.
            origin: where it comes from, for error messages.
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
        eos_id, self.bos_id, pad_id = map(self._special_id, ("eos_token", "bos_token", "pad_token"))
        if eos_id is None:
            raise TokenizerError(
                f"{origin} names no end-of-sequence token; add eos_token to the "
                "tokenizer_config.json beside it"
            )
        self.eos_id = eos_id
        self.pad_id = eos_id if pad_id is None else pad_id

    @classmethod
    def from_files(
        cls, files: Mapping[str, bytes], *, origin: str = "the tokenizer files"
    ) -> "HuggingFaceTokenizer":
        """Build from ``tokenizer.json`` and its neighbours."""
        config = _read_config(files, origin)
        with raised_as(TokenizerError, f"{origin} is not a readable tokenizer"):
            backend = RustTokenizer.from_buffer(files["tokenizer.json"].removeprefix(BOM_UTF8))
        _add_missing_tokens(backend, config)
        generation_ends(files, origin)  # refuses what cannot be used
        generation = json_object(files, GENERATION_CONFIG, origin)
        return cls(backend, config, generation_config=generation, origin=origin)

    @property
    def end_ids(self) -> tuple[int, ...]:
        """Every token that ends a response; see `aligner.data.tokenizers.tokenizer.Tokenizer`."""
        if self._ends is None:
            named = generation_ends(self._generation_file(), self._origin)
            self._ends = tuple(dict.fromkeys((self.eos_id, *named, self.turn_end_id)))
        return self._ends

    @property
    def turn_end_id(self) -> int:
        """The token that ends an assistant's message in the chat template; else EOS."""
        if not self._config.get("chat_template"):
            return self.eos_id
        chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": _ANSWER}]
        try:
            text = self.apply_chat_template(chat, add_generation_prompt=False)
        except DataError:  # a template for other chats
            return self.eos_id
        behind = text.rpartition(_ANSWER)[2].lstrip() if _ANSWER in text else ""
        added = self._backend.get_added_tokens_decoder()
        fitting = [end for end, token in added.items() if behind.startswith(token.content)]
        return max(fitting, key=lambda end: len(added[end].content), default=self.eos_id)

    @property
    def special_ids(self) -> frozenset[int]:
        """Added tokens that structure a text and are no part of it."""
        added = self._backend.get_added_tokens_decoder()
        return frozenset(number for number, token in added.items() if token.special)

    @property
    def added_tokens(self) -> dict[int, str]:
        """Text of every added token, special or not; `encode` finds them in any text."""
        added = self._backend.get_added_tokens_decoder()
        return {number: token.content for number, token in added.items()}

    def encode(self, text: str) -> list[int]:
        """Token ids of ``text``; the post-processor adds nothing."""
        ids: list[int] = self._backend.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ``ids``, special tokens spelt out."""
        text: str = self._backend.decode(known_ids(ids, self.vocab_size), skip_special_tokens=False)
        return text

    def with_end_tokens(self, tokens: Sequence[str | int]) -> "HuggingFaceTokenizer":
        """The same, for which ``tokens`` end a response as well; ``files()`` remembers them."""
        ids = []
        for token in tokens:
            found = token if isinstance(token, int) else self._backend.token_to_id(token)
            if found is None or not 0 <= found < self.vocab_size:
                raise TokenizerError(
                    f"end_tokens: {token!r} is no token of {self._origin}; text of several tokens "
                    "goes into end_strings"
                )
            ids.append(found)
        ends = tuple(dict.fromkeys((*self.end_ids, *ids)))
        if ends == self.end_ids:
            return self
        other = copy.copy(self)
        other._generation, other._ends = {**self._generation, "eos_token_id": list(ends)}, ends
        return other

    def with_template_kwargs(self, values: Mapping[str, Any]) -> "HuggingFaceTokenizer":
        """The same, whose chat template has these variables.

        Raises:
            DataError: no template reads one of them, or its name is taken.
        """
        from transformers import PreTrainedTokenizerFast

        others = set(signature(PreTrainedTokenizerFast.apply_chat_template).parameters)
        taken = ((others - {"documents"}) | {"messages", "conversations"}) & values.keys()
        if taken:
            raise DataError(f"chat_template_kwargs: {', '.join(taken)}: no variable of a template")
        text = str(self._config.get("chat_template"))
        unused = [name for name in values if not re.search(rf"\b{re.escape(name)}\b", text)]
        if unused:
            raise DataError(
                f"chat_template_kwargs={dict(values)!r:.200}: the model's chat template reads no "
                f"{', '.join(unused):.200}; leave it out"
            )
        other = copy.copy(self)
        other._template_kwargs, other._ends = {**self._template_kwargs, **values}, None
        return other

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """Render ``messages`` and, by default, the opening of the assistant's answer."""
        if not self._config.get("chat_template"):
            raise TokenizerError(
                f"{self._origin} has no chat template, so chat messages cannot become a prompt; "
                "use a tokenizer with a chat_template or plain-text prompts"
            )
        if self._renderer is None:
            self._renderer = self._make_renderer()
        # Jinja's errors, and what templates raise themselves.
        with raised_as(DataError, "the chat template refuses the messages"):
            text = self._renderer.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                tools=None if tools is None else [dict(tool) for tool in tools],
                **self._template_kwargs,
            )
            str(text).encode()  # half a character, which JSON text can hold, is no text
        return str(text)

    def files(self) -> dict[str, bytes]:
        """``tokenizer.json``, a ``tokenizer_config.json`` that includes the chat template and,
        where there was one or ends were added, ``generation_config.json``.
        """
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
            raise TokenizerError(f"{self._origin}: {name}={text!r} is not in the vocabulary")
        return token_id

    def _make_renderer(self) -> "PreTrainedTokenizerFast":
        from transformers import PreTrainedTokenizerFast
        from transformers.utils import chat_template_utils

        chat_template_utils.datetime = RunClock  # which `strftime_now` of templates asks
        special: dict[str, Any] = {  # templates may name them
            name: text
            for name, token in self._config.items()
            if name.endswith("_token")
            and isinstance(text := token.get("content") if isinstance(token, dict) else token, str)
        }
        further = self._config.get("extra_special_tokens")
        if isinstance(further, Mapping):
            special["extra_special_tokens"] = dict(further)
        template = self._config["chat_template"]
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}
        return PreTrainedTokenizerFast(
            tokenizer_object=self._backend, chat_template=template, **special
        )


def _read_config(files: Mapping[str, bytes], origin: str) -> dict[str, Any]:
    """``tokenizer_config.json`` with plain-text special tokens and one chat template."""
    merged: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        merged |= json_object(files, name, origin)
    for name in _SPECIAL_NAMES:
        token = merged.get(name)
        text = token.get("content") if isinstance(token, dict) else token  # one spelt out
        if not isinstance(text, str | None) or (text is None and token is not None):
            raise TokenizerError(f"{origin}: {name}={token!r} is not a text")
        if token is not None:
            merged[name] = text
    if "chat_template.jinja" in files:
        merged["chat_template"] = files["chat_template.jinja"].decode("utf-8-sig")
    template = merged.get("chat_template")
    if isinstance(template, list) and all(
        isinstance(entry, Mapping)
        and all(isinstance(entry.get(key), str) for key in ("name", "template"))
        for entry in template
    ):  # several named ones, of which transformers takes one each time
        names = {entry["name"] for entry in template}
        if len(names) == 1 and "default" not in names:
            merged["chat_template"] = template[-1]["template"]
    elif not isinstance(template, str | None):
        raise TokenizerError(
            f"{origin}: chat_template is neither a text nor a list of names and templates"
        )
    return merged


def _add_missing_tokens(backend: RustTokenizer, config: Mapping[str, Any]) -> None:
    """Add tokens that ``tokenizer_config.json`` declares and ``tokenizer.json`` forgot."""
    declared = config.get("added_tokens_decoder") or {}
    text = "added_tokens_decoder of tokenizer_config.json is not numbers and tokens"
    with raised_as(TokenizerError, text, AttributeError, KeyError, TypeError, ValueError):
        tokens = sorted(
            (int(number), str(token["content"]), bool(token.get("special")))
            for number, token in declared.items()
        )
    for number, content, special in tokens:
        if backend.token_to_id(content) is None:
            backend.add_tokens([AddedToken(content, special=special)])
            if backend.token_to_id(content) != number:
                raise TokenizerError(
                    f"added token {content!r} should have id {number}, which tokenizer.json "
                    "leaves no room for"
                )
