"""Answers as OpenAI's interface has them, whole or in pieces, from what the engine sampled.

Log-probs are of every token that was sampled, the one that ended the answer included, as the engine
computed them: at the sampling temperature, over the tokens that top-k and top-p left. A
token has the text that it completes: a character of several tokens stands at the last of them, and
special tokens, skipped, and the one that ended the answer have none.
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
from aligner.generation.rows import EndKind, Progress
from aligner.serving.openai_types import (
    ChatLogprobs,
    ChatMessage,
    Completion,
    CompletionChoice,
    TextLogprobs,
    TokenLogprob,
    Usage,
)
from aligner.serving.requests import ChatRequest, CompletionRequest
from aligner.serving.tools import split_calls


class Choice:
    """One answer as it comes: its tokens, and its text up to a stop string.

    ``ids`` and ``logprobs``: every token that was sampled. ``pieces`` and ``offsets``: the text
    that each completed, all pieces together are the text; and the characters before it. ``text``:
    what can be shown of it. ``finish``: why it ended; None: it has not.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt: Sequence[int],
        stop: Sequence[str],
        *,
        holds: bool,
        min_tokens: int = 0,
        skips_special: bool = False,
    ) -> None:
        """``holds``: show nothing before the end. ``min_tokens``: no stop string ends it before.

        ``skips_special``: special tokens have no text.
        """
        self.prompt, self.ids, self.logprobs = list(prompt), list[int](), list[float]()
        self.pieces, self.offsets = list[str](), list[int]()
        self._min_tokens, self._skips = min_tokens, skips_special
        self._special = getattr(tokenizer, "special_ids", frozenset[int]())
        self._plain = ""  # the text without special tokens,
        self._spelt: list[tuple[int, int]] = []  # which stand there, and have so many characters
        self._least = (0, 0)  # characters of both texts that no stop string ends
        self.text = ""
        self.finish: EndKind | None = None
        self._ends, self._stop, self._holds = frozenset(tokenizer.end_ids), tuple(stop), holds
        self._tokenizer, self._decoder = tokenizer, IncrementalDecoder(tokenizer, prompt)
        self._decoded = ""

    def push(self, progress: Progress) -> str:
        """Take what came; the text that can be shown now."""
        self.logprobs += progress.logprobs
        for token in progress.ids:
            self.ids.append(token)
            is_special = token in self._special
            has_no_text = token in self._ends or (is_special and self._skips and not self._holds)
            piece = "" if has_no_text else self._decoder.push(token)
            self.offsets.append(len(self._decoded))
            self.pieces.append(piece)
            self._decoded += piece
            if is_special:
                self._spelt.append((len(self._plain), len(piece)))
            else:
                self._plain += piece
            if len(self.ids) < self._min_tokens:
                self._least = len(self._decoded), len(self._plain)
        if progress.end is not None:
            rest = self._decoder.flush()
            self._decoded, self._plain = self._decoded + rest, self._plain + rest
            self.pieces[-1:] = [piece + rest for piece in self.pieces[-1:]]
            self.finish = progress.end
        shown, begin = self._shown(), len(self.text)
        self.text = shown
        return shown[begin:]

    @property
    def whole_text(self) -> str:
        """Text of all that was sampled, stop strings and the token that ended it included."""
        ended = [token for token in self.ids[-1:] if token in self._ends]
        text = decode_response(self._tokenizer, self.prompt, self.ids)
        return text + self._tokenizer.decode(ended)

    @property
    def plain_text(self) -> str:
        """The text that can be shown, without special tokens also where it was held for calls."""
        text = self.text
        for token in set(self.ids) & self._special if self._skips else ():
            text = text.replace(self._tokenizer.decode([token]), "")
        return text

    def _shown(self) -> str:
        """The text without a stop string, and before the end without what may become one."""
        spelt, plain = self._decoded, self._plain
        found = self._stops(spelt, self._least[0])
        found += map(self._place, self._stops(plain, self._least[1]))
        if found and self.finish is not None:
            self.finish = "stop"
        elif self.finish is None and not found:
            found = [len(spelt) - self._held(spelt), self._place(len(plain) - self._held(plain))]
        text = spelt[: min(found, default=len(spelt))]
        return "" if self._holds and self.finish is None else text

    def _stops(self, text: str, least: int) -> list[int]:
        """Places of stop strings that end behind the first ``least`` characters."""
        places = (text.find(stop, max(0, least - len(stop) + 1)) for stop in self._stop)
        return [place for place in places if place >= 0]

    def _held(self, text: str) -> int:
        """Characters at the end of a text that may become a stop string."""
        lengths = (n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n]))
        return max(lengths, default=0)

    def _place(self, plain: int) -> int:
        """The place in the text of one in the text without special tokens."""
        return plain + sum(length for place, length in self._spelt if place <= plain)


class Answer(ABC):
    """Writes the answers to one request, whole or in pieces; ``nothing``: content of the last."""

    object: str
    piece_object: str
    prefix: str
    nothing: ClassVar[dict[str, Any]]

    def __init__(
        self,
        tokenizer: Tokenizer,
        model: str,
        request: ChatRequest | CompletionRequest,
        choices: Sequence[Choice],
        form: Form | None = None,
    ) -> None:
        """``choices``: as they will be filled. ``form``: of calls; None: there are no tools."""
        self.choices = choices
        self._tokenizer, self._request, self._form = tokenizer, request, form
        unique = f"{self.prefix}-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": unique, "created": int(time.time()), "model": model}

    def whole(self) -> Completion:
        """The answer, once every choice has ended."""
        choices = [
            CompletionChoice(index=number, **self._content(choice), **self._details(choice))
            for number, choice in enumerate(self.choices)
        ]
        return self._completion(self.object, choices, usage=self._usage())

    def first(self) -> list[Completion]:
        """Pieces before anything was sampled."""
        return []

    def piece(self, progress: Progress) -> list[Completion]:
        """Pieces by which the answer grows."""
        choice = self.choices[progress.row]
        text = choice.push(progress)
        content, finish = self._growth(choice, text)
        pieces = []
        has_details = self._request.wants_logprobs or self._request.return_token_ids
        if text or (has_details and progress.ids):
            details = self._details(choice, len(choice.ids) - len(progress.ids))
            pieces.append(self._piece(progress.row, **content, finish_reason=None, **details))
        if finish is not None:
            ending = {**self.nothing, "finish_reason": finish, "logprobs": None}
            pieces.append(self._piece(progress.row, **ending))
        return pieces

    def last(self) -> list[Completion]:
        """Pieces after everything was sampled."""
        if not self._request.stream_options.include_usage:
            return []
        return [self._completion(self.piece_object, [], usage=self._usage())]

    @abstractmethod
    def _content(self, choice: Choice) -> dict[str, Any]:
        """Content of a choice that has ended, and why it ended."""

    @abstractmethod
    def _growth(self, choice: Choice, text: str) -> tuple[dict[str, Any], str | None]:
        """Content of a piece by which a choice grows by ``text``; and why the choice ended."""

    @abstractmethod
    def _logprobs(self, choice: Choice, begin: int) -> ChatLogprobs | TextLogprobs:
        """Log-probs of a choice's tokens from number ``begin`` on."""

    def _details(self, choice: Choice, begin: int = 0) -> dict[str, Any]:
        """Log-probs and ids of a choice's tokens from ``begin`` on, as the request wants them."""
        details: dict[str, Any] = {"logprobs": None}
        if self._request.wants_logprobs:
            details["logprobs"] = self._logprobs(choice, begin)
        if self._request.return_token_ids:
            details["token_ids"] = choice.ids[begin:]
        return details

    def _piece(self, index: int, **fields: Any) -> Completion:
        further, options = {}, self._request.stream_options
        if options.include_obfuscation:  # hides the length of a piece from who sees the traffic
            further["obfuscation"] = secrets.token_urlsafe(16)[: 1 + secrets.randbelow(20)]
        choice = CompletionChoice(index=index, **fields)
        return self._completion(self.piece_object, [choice], **further)

    def _completion(self, kind: str, choices: list[CompletionChoice], **further: Any) -> Completion:
        return Completion(**self._head, object=kind, choices=choices, **further)

    def _usage(self) -> Usage:
        read = sum(len(choice.prompt) for choice in self.choices[:: self._request.n])
        sampled = sum(len(choice.ids) for choice in self.choices)
        return Usage(prompt_tokens=read, completion_tokens=sampled, total_tokens=read + sampled)


class ChatAnswer(Answer):
    """Answers of ``/v1/chat/completions``."""

    object, piece_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"
    nothing: ClassVar[dict[str, Any]] = {"delta": ChatMessage()}

    def whole(self) -> Completion:
        """The answer, once every choice has ended."""
        answer = super().whole()
        if self._request.return_token_ids:
            answer.prompt_token_ids = self.choices[0].prompt
        return answer

    def first(self) -> list[Completion]:
        """The role of each message, and the prompt's tokens."""
        delta = ChatMessage(role="assistant", content="")
        pieces = [
            self._piece(index, delta=delta, finish_reason=None, logprobs=None)
            for index in range(len(self.choices))
        ]
        if self._request.return_token_ids:
            pieces[0].prompt_token_ids = self.choices[0].prompt
        return pieces

    def _content(self, choice: Choice) -> dict[str, Any]:
        message, finish = self._message(choice)
        whole = ChatMessage(role="assistant", refusal=None, **message)
        return {"message": whole, "finish_reason": finish}

    def _growth(self, choice: Choice, text: str) -> tuple[dict[str, Any], str | None]:
        delta: dict[str, Any] = {"content": text} if text else {}
        finish: str | None = choice.finish
        if choice.finish is not None and self._form is not None:
            message, finish = self._message(choice)
            delta = {key: value for key, value in message.items() if value is not None}
            for number, call in enumerate(delta.get("tool_calls", [])):
                call.index = number
        return {"delta": ChatMessage(**delta)}, finish

    def _message(self, choice: Choice) -> tuple[dict[str, Any], str | None]:
        """Fields of the message that a choice is, and why it ended."""
        if self._form is not None:
            content, calls = split_calls(choice.text, self._form)
            if calls:
                return {"content": content, "tool_calls": calls}, "tool_calls"
        return {"content": choice.plain_text}, choice.finish

    def _logprobs(self, choice: Choice, begin: int) -> ChatLogprobs:
        content = []
        for number in range(begin, len(choice.ids)):
            piece, alone = choice.pieces[number], self._tokenizer.decode([choice.ids[number]])
            # A part of a character, or a token without text, is shown as it is by itself.
            token = alone if "\ufffd" in alone or not piece else piece
            logprob, spelt = choice.logprobs[number], list(piece.encode())
            content.append(TokenLogprob(token=token, logprob=logprob, bytes=spelt, top_logprobs=[]))
        return ChatLogprobs(content=content, refusal=None)


class CompletionAnswer(Answer):
    """Answers of ``/v1/completions``."""

    object, piece_object, prefix = "text_completion", "text_completion", "cmpl"
    nothing: ClassVar[dict[str, Any]] = {"text": ""}

    def _content(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text, "finish_reason": choice.finish}

    def _growth(self, choice: Choice, text: str) -> tuple[dict[str, Any], str | None]:
        return {"text": text}, choice.finish

    def _details(self, choice: Choice, begin: int = 0) -> dict[str, Any]:
        details = super()._details(choice, begin)
        if self._request.return_token_ids and begin == 0:
            details["prompt_token_ids"] = choice.prompt
        return details

    def _logprobs(self, choice: Choice, begin: int) -> TextLogprobs:
        return TextLogprobs(
            tokens=choice.pieces[begin:],
            token_logprobs=choice.logprobs[begin:],
            top_logprobs=None,
            text_offset=choice.offsets[begin:],
        )
