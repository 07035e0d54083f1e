"""Answers in OpenAI's format, complete or streamed, built from the tokens of the engine.

Answers and the pieces of a stream are JSON objects. The keys ``token_ids`` and ``prompt_token_ids``
are vLLM's. Log-probs are those of the sampling distribution, for every sampled token, the end token
included. A token's text consists of the characters that the token completes. End tokens and skipped
special tokens have no text.
"""

import secrets
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from aligner.data.tokenizers.decoding import IncrementalDecoder, decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.environments.calls import Form
from aligner.generation.rows import EndKind, Progress, Row
from aligner.serving.requests import ChatRequest, CompletionRequest
from aligner.serving.tools import split_calls

Json = dict[str, Any]


class Choice:
    """One of the answers to a request, during and after sampling.

    ``ids`` and ``logprobs``: all sampled tokens. ``pieces``: the text that each token adds.
    ``offsets``: number of characters before each piece. ``text``: the text sent to the client so
    far, which ends before a stop string. ``finish``: why the answer ended, or None.
    """

    def __init__(
        self, tokenizer: Tokenizer, row: Row, *, is_buffered: bool, skips_special: bool = False
    ) -> None:
        """Create an empty answer to the prompt of ``row``.

        ``is_buffered``: send no text before the end. ``skips_special``: leave out the text of
        special tokens.
        """
        assert row.options is not None, "requests have their own options"
        self._stop = row.options.sampling.end_strings
        self._min_tokens = row.options.length.min_length  # before them, stop strings are ignored
        self.prompt, self.ids, self.logprobs = row.prompt, list[int](), list[float]()
        self.pieces, self.offsets = list[str](), list[int]()
        self.text = ""
        self.finish: EndKind | None = None
        self._is_buffered, self._skips_special = is_buffered, skips_special
        self._end_ids = frozenset(tokenizer.end_ids)
        self._special = getattr(tokenizer, "special_ids", frozenset[int]())
        self._tokenizer, self._decoder = tokenizer, IncrementalDecoder(tokenizer, row.prompt)
        # Stop strings are searched for in the decoded text and, because special tokens may
        # interrupt a stop string, in that text without special tokens.
        self._decoded, self._plain = "", ""
        self._special_spans: list[tuple[int, int]] = []  # offset in `_plain`, characters
        self._least_characters = (0, 0)  # of both texts: stop strings that end earlier are ignored

    def push(self, progress: Progress) -> str:
        """Add sampled tokens. Return the new text that can be sent to the client."""
        self.logprobs += progress.logprobs
        for token in progress.ids:
            self.ids.append(token)
            is_special = token in self._special
            is_skipped = is_special and self._skips_special and not self._is_buffered
            piece = "" if token in self._end_ids or is_skipped else self._decoder.push(token)
            self.offsets.append(len(self._decoded))
            self.pieces.append(piece)
            self._decoded += piece
            if is_special:
                self._special_spans.append((len(self._plain), len(piece)))
            else:
                self._plain += piece
            if len(self.ids) < self._min_tokens:
                self._least_characters = len(self._decoded), len(self._plain)
        if progress.end is not None:
            # The last token also completes the text of incomplete characters.
            last = self._decoder.flush()
            self._decoded, self._plain = self._decoded + last, self._plain + last
            self.pieces[-1:] = [piece + last for piece in self.pieces[-1:]]
            self.finish = progress.end
        start, self.text = len(self.text), self._shown()
        return self.text[start:]

    @property
    def full_text(self) -> str:
        """Text of all sampled tokens, with stop strings and the end token."""
        ended = [token for token in self.ids[-1:] if token in self._end_ids]
        text = decode_response(self._tokenizer, self.prompt, self.ids)
        return text + self._tokenizer.decode(ended)

    @property
    def plain_text(self) -> str:
        """`text` without the special tokens that the request skips."""
        text = self.text
        for token in set(self.ids) & self._special if self._skips_special else ():
            text = text.replace(self._tokenizer.decode([token]), "")
        return text

    def _shown(self) -> str:
        """Return the text before a stop string. While sampling, omit a possible start of one."""
        text, plain = self._decoded, self._plain
        ends = self._stops(text, self._least_characters[0])
        ends += map(self._offset_in_text, self._stops(plain, self._least_characters[1]))
        if ends and self.finish is not None:
            self.finish = "stop"
        elif self.finish is None and not ends:
            ends = [self._certain(text), self._offset_in_text(self._certain(plain))]
        shown = text[: min(ends, default=len(text))]
        return "" if self._is_buffered and self.finish is None else shown

    def _stops(self, text: str, least: int) -> list[int]:
        """Return the offset of each stop string that ends after the first ``least`` characters."""
        offsets = (text.find(stop, max(0, least - len(stop) + 1)) for stop in self._stop)
        return [offset for offset in offsets if offset >= 0]

    def _certain(self, text: str) -> int:
        """Return the length of ``text`` without an end that may be the start of a stop string."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return len(text) - max(lengths, default=0)

    def _offset_in_text(self, plain: int) -> int:
        """Convert an offset in the text without special tokens to an offset in the full text."""
        return plain + sum(length for offset, length in self._special_spans if offset <= plain)


class Answer(ABC):
    """Formats the choices of a request as JSON: a complete answer, or chunks of a stream."""

    object: str
    piece_object: str
    prefix: str
    empty_content: ClassVar[Json]  # content of a choice's last piece

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        request: ChatRequest | CompletionRequest,
        choices: Sequence[Choice],
        form: Form | None = None,
    ) -> None:
        """Prepare an answer to ``request``. ``form``: format of tool calls, None without tools."""
        self.choices = choices
        self._tokenizer, self._request, self._form = tokenizer, request, form
        unique = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head: Json = {"id": unique, "created": int(time.time()), "model": model}

    def complete(self) -> Json:
        """Return the complete answer as JSON. Every choice must have ended."""
        choices = []
        for index, choice in enumerate(self.choices):
            content, finish = self._content(choice)
            details = self._details(choice)
            choices.append({"index": index, **content, "finish_reason": finish, **details})
        return self._completion(self.object, choices, usage=self._usage())

    def first(self) -> list[Json]:
        """Return the chunks to send before any token is sampled."""
        return []

    def pieces(self, progress: Progress) -> list[Json]:
        """Add new tokens to a choice. Return the chunks to send."""
        choice = self.choices[progress.row]
        text = choice.push(progress)
        content, finish = self._new_content(choice, text)
        pieces, row = [], progress.row
        has_details = self._request.wants_logprobs or self._request.return_token_ids
        if text or (has_details and progress.ids):
            details = self._details(choice, len(choice.ids) - len(progress.ids))
            pieces.append(self._piece(row, **content, finish_reason=None, **details))
        if finish is not None:
            end: Json = {**self.empty_content, "finish_reason": finish, "logprobs": None}
            pieces.append(self._piece(row, **end))
        return pieces

    def last(self) -> list[Json]:
        """Return the chunks to send after all choices have ended."""
        if not self._request.stream_options.include_usage:
            return []
        return [self._completion(self.piece_object, [], usage=self._usage())]

    @abstractmethod
    def _content(self, choice: Choice) -> tuple[Json, str | None]:
        """Return (content, finish reason) of a choice that has ended."""

    @abstractmethod
    def _new_content(self, choice: Choice, text: str) -> tuple[Json, str | None]:
        """Return (content of a chunk with new ``text``, finish reason or None before the end)."""

    @abstractmethod
    def _logprobs(self, choice: Choice, start: int) -> Json:
        """Return the log-probs of a choice's tokens from index ``start`` on, in OpenAI's format."""

    def _details(self, choice: Choice, start: int = 0) -> Json:
        """Return log-probs and token ids from index ``start`` on, if they are requested."""
        details: Json = {"logprobs": None}
        if self._request.wants_logprobs:
            details["logprobs"] = self._logprobs(choice, start)
        if self._request.return_token_ids:
            details["token_ids"] = choice.ids[start:]
        return details

    def _piece(self, index: int, **fields: Any) -> Json:
        piece = self._completion(self.piece_object, [{"index": index, **fields}])
        if self._request.stream_options.include_obfuscation:
            # Random text hides the length of the piece from observers of the traffic.
            piece["obfuscation"] = secrets.token_urlsafe(16)[: 1 + secrets.randbelow(20)]
        return piece

    def _completion(self, kind: str, choices: list[Json], **fields: Any) -> Json:
        return {**self._head, "object": kind, "choices": choices, **fields}

    def _usage(self) -> dict[str, int]:
        prompt = sum(len(choice.prompt) for choice in self.choices[:: self._request.n])
        sampled = sum(len(choice.ids) for choice in self.choices)
        counts = {"prompt_tokens": prompt, "completion_tokens": sampled}
        return {**counts, "total_tokens": prompt + sampled}


class ChatAnswer(Answer):
    """Answers of ``/v1/chat/completions``."""

    object, piece_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    empty_content: ClassVar[Json] = {"delta": {}}

    def complete(self) -> Json:
        """Return the complete answer. Every choice must have ended."""
        answer = super().complete()
        if self._request.return_token_ids:
            answer["prompt_token_ids"] = self.choices[0].prompt
        return answer

    def first(self) -> list[Json]:
        """Return a chunk with the role for each choice. The first may have the prompt's ids."""
        delta = {"role": "assistant", "content": ""}
        pieces = [
            self._piece(index, delta=delta, finish_reason=None, logprobs=None)
            for index in range(len(self.choices))
        ]
        if self._request.return_token_ids:
            pieces[0]["prompt_token_ids"] = self.choices[0].prompt
        return pieces

    def _content(self, choice: Choice) -> tuple[Json, str | None]:
        message, finish = self._message(choice)
        return {"message": {"role": "assistant", "refusal": None, **message}}, finish

    def _new_content(self, choice: Choice, text: str) -> tuple[Json, str | None]:
        delta: Json = {"content": text} if text else {}
        finish: str | None = choice.finish
        if choice.finish is not None and self._form is not None:
            message, finish = self._message(choice)
            delta = {key: value for key, value in message.items() if value is not None}
            for index, call in enumerate(delta.get("tool_calls", [])):
                call["index"] = index
        return {"delta": delta}, finish

    def _message(self, choice: Choice) -> tuple[Json, str | None]:
        """Return (content and tool calls, finish reason) of a choice that has ended."""
        if self._form is not None:
            content, calls = split_calls(choice.text, self._form)
            if calls:
                return {"content": content, "tool_calls": calls}, "tool_calls"
        return {"content": choice.plain_text}, choice.finish

    def _logprobs(self, choice: Choice, start: int) -> Json:
        content = []
        for index in range(start, len(choice.ids)):
            piece, decoded = choice.pieces[index], self._tokenizer.decode([choice.ids[index]])
            # A part of a character, or a token without text, is decoded separately.
            token = decoded if "\ufffd" in decoded or not piece else piece
            entry: Json = {"token": token, "logprob": choice.logprobs[index]}
            content.append({**entry, "bytes": list(piece.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """Answers of ``/v1/completions``."""

    object, piece_object, prefix = "text_completion", "text_completion", "cmpl"
    empty_content: ClassVar[Json] = {"text": ""}

    def _content(self, choice: Choice) -> tuple[Json, str | None]:
        return {"text": choice.text}, choice.finish

    def _new_content(self, choice: Choice, text: str) -> tuple[Json, str | None]:
        return {"text": text}, choice.finish

    def _details(self, choice: Choice, start: int = 0) -> Json:
        details = super()._details(choice, start)
        if self._request.return_token_ids and start == 0:
            details["prompt_token_ids"] = choice.prompt
        return details

    def _logprobs(self, choice: Choice, start: int) -> Json:
        return {
            "tokens": choice.pieces[start:],
            "token_logprobs": choice.logprobs[start:],
            "top_logprobs": None,
            "text_offset": choice.offsets[start:],
        }
