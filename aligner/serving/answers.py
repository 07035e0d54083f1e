"""Answers as OpenAI's interface has them, whole or in pieces, from what the engine sampled.

Log-probs are of every token that was sampled, the one that ended the answer included, as the engine
computed them: at the sampling temperature, over the tokens that top-k and top-p left. ``token_ids``
and ``prompt_token_ids`` stand where vLLM has them.
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from aligner.data.tokenizers.decoding import IncrementalDecoder
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.environments.calls import Form
from aligner.serving.queue import EndKind, Progress
from aligner.serving.tools import split_calls

Json = dict[str, Any]


class Choice:
    """One answer as it comes: its tokens, and its text up to a stop string.

    ``ids`` and ``logprobs``: every token that was sampled. ``text``: what can be shown of it.
    ``finish``: why it ended; None: it has not.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt: Sequence[int], stop: Sequence[str], *, holds: bool
    ) -> None:
        """``holds``: show nothing before the end."""
        self.prompt, self.ids, self.logprobs = list(prompt), list[int](), list[float]()
        self.text = ""
        self.finish: EndKind | None = None
        self._ends, self._stop, self._holds = frozenset(tokenizer.end_ids), tuple(stop), holds
        self._tokenizer, self._decoder = tokenizer, IncrementalDecoder(tokenizer, prompt)
        self._decoded = ""

    def push(self, progress: Progress) -> str:
        """Take what came; the text that can be shown now."""
        self.ids += progress.ids
        self.logprobs += progress.logprobs
        for token in progress.ids:
            if token not in self._ends:
                self._decoded += self._decoder.push(token)
        if progress.end is not None:
            self._decoded += self._decoder.flush()
            self.finish = progress.end
        shown, begin = self._shown(), len(self.text)
        self.text = shown
        return shown[begin:]

    @property
    def whole_text(self) -> str:
        """Text of all that was sampled, stop strings and the token that ended it included."""
        ended = self.ids[-1:] if self.ids and self.ids[-1] in self._ends else []
        return self._decoded + (self._tokenizer.decode(ended) if ended else "")

    def _shown(self) -> str:
        """The text without a stop string, and before the end without what may become one."""
        text = self._decoded
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            text = text[: min(found)]
            if self.finish is not None:
                self.finish = "stop"
        elif self.finish is None:
            held = [
                n for stop in self._stop for n in range(1, len(stop)) if text.endswith(stop[:n])
            ]
            text = text[: len(text) - max(held, default=0)]
        return "" if self._holds and self.finish is None else text


@dataclass(frozen=True)
class Wants:
    """Contents of the answers that a request wants.

    ``per_prompt``: answers to each prompt. ``form``: of calls; None: it offers no tools.
    """

    model: str
    per_prompt: int = 1
    logprobs: bool = False
    token_ids: bool = False
    usage: bool = False
    form: Form | None = None


class Answer(ABC):
    """Writes the answers to one request."""

    object: str
    piece_object: str
    prefix: str

    def __init__(self, tokenizer: Tokenizer, wants: Wants, choices: Sequence[Choice]) -> None:
        """``choices``: as they will be filled."""
        self.choices = choices
        self._tokenizer, self._wants = tokenizer, wants
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time())}

    def whole(self) -> Json:
        """The answer, where every choice has ended."""
        choices = [self._choice(number, one) for number, one in enumerate(self.choices)]
        return {**self._envelope(self.object), "choices": choices, "usage": self._usage()}

    def first(self) -> list[Json]:
        """Pieces before anything came."""
        return []

    def piece(self, progress: Progress) -> list[Json]:
        """Pieces by which the answer grows."""
        choice = self.choices[progress.row]
        text = choice.push(progress)
        pieces = self._grown(progress, text)
        return [self._piece(progress.row, one) for one in pieces]

    def last(self) -> list[Json]:
        """Pieces after everything came."""
        if not self._wants.usage:
            return []
        return [{**self._envelope(self.piece_object), "choices": [], "usage": self._usage()}]

    @abstractmethod
    def _choice(self, number: int, choice: Choice) -> Json:
        """A choice that has ended."""

    @abstractmethod
    def _grown(self, progress: Progress, text: str) -> list[Json]:
        """Choices of pieces, without their index."""

    @abstractmethod
    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float], begin: int) -> Json:
        """Log-probs of tokens; ``begin``: characters before them."""

    def _details(self, progress: Progress, begin: int) -> Json:
        """Log-probs and ids of a piece, where they are wanted."""
        details: Json = {"logprobs": None}
        if self._wants.logprobs:
            details["logprobs"] = self._logprobs(progress.ids, progress.logprobs, begin)
        if self._wants.token_ids:
            details["token_ids"] = progress.ids
        return details

    def _tells(self, progress: Progress, text: str) -> bool:
        """Return whether a piece is due."""
        details = self._wants.logprobs or self._wants.token_ids
        return bool(text) or (details and bool(progress.ids))

    def _piece(self, index: int, choice: Json) -> Json:
        return {**self._envelope(self.piece_object), "choices": [{"index": index, **choice}]}

    def _envelope(self, kind: str) -> Json:
        return {**self._head, "object": kind, "model": self._wants.model}

    def _usage(self) -> Json:
        asked = sum(len(choice.prompt) for choice in self.choices[:: self._wants.per_prompt])
        made = sum(len(choice.ids) for choice in self.choices)
        return {
            "prompt_tokens": asked,
            "completion_tokens": made,
            "total_tokens": asked + made,
        }


class ChatAnswer(Answer):
    """Answers of ``/v1/chat/completions``."""

    object, piece_object, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self) -> Json:
        """The answer, where every choice has ended."""
        answer = super().whole()
        if self._wants.token_ids:
            answer["prompt_token_ids"] = self.choices[0].prompt
        return answer

    def first(self) -> list[Json]:
        """The role of each message, and the prompt's tokens."""
        said = {"delta": {"role": "assistant", "content": ""}, "logprobs": None}
        pieces = [
            self._piece(index, {**said, "finish_reason": None})
            for index in range(len(self.choices))
        ]
        if self._wants.token_ids:
            pieces[0]["prompt_token_ids"] = self.choices[0].prompt
        return pieces

    def _choice(self, number: int, choice: Choice) -> Json:
        message, finish = self._message(choice)
        whole = Progress(number, choice.ids, choice.logprobs)
        return {
            "index": number,
            "message": {"role": "assistant", "refusal": None, **message},
            "finish_reason": finish,
            **self._details(whole, 0),
        }

    def _grown(self, progress: Progress, text: str) -> list[Json]:
        choice = self.choices[progress.row]
        delta: Json = {"content": text} if text else {}
        finish: str | None = choice.finish
        if choice.finish is not None and self._wants.form is not None:
            message, finish = self._message(choice)
            delta = {key: value for key, value in message.items() if value is not None}
            for number, call in enumerate(delta.get("tool_calls", [])):
                call["index"] = number
        pieces = []
        if self._tells(progress, text):
            details = self._details(progress, 0)
            pieces.append({"delta": delta, "finish_reason": None, **details})
        if finish is not None:
            pieces.append({"delta": {}, "finish_reason": finish, "logprobs": None})
        return pieces

    def _message(self, choice: Choice) -> tuple[Json, str | None]:
        if self._wants.form is not None:
            content, calls = split_calls(choice.text, self._wants.form)
            if calls:
                return {"content": content, "tool_calls": calls}, "tool_calls"
        return {"content": choice.text}, choice.finish

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float], begin: int) -> Json:
        content = []
        for token, logprob in zip(ids, logprobs, strict=True):
            text = self._tokenizer.decode([token])
            found = None if "�" in text else list(text.encode())
            content.append({"token": text, "logprob": logprob, "bytes": found, "top_logprobs": []})
        return {"content": content, "refusal": None}


class CompletionAnswer(Answer):
    """Answers of ``/v1/completions``."""

    object, piece_object, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, number: int, choice: Choice) -> Json:
        whole = Progress(number, choice.ids, choice.logprobs)
        details = self._details(whole, 0)
        if self._wants.token_ids:
            details["prompt_token_ids"] = choice.prompt
        return {"index": number, "text": choice.text, "finish_reason": choice.finish, **details}

    def _grown(self, progress: Progress, text: str) -> list[Json]:
        choice = self.choices[progress.row]
        pieces = []
        if self._tells(progress, text):
            details = self._details(progress, len(choice.text) - len(text))
            if self._wants.token_ids and len(choice.ids) == len(progress.ids):
                details["prompt_token_ids"] = choice.prompt
            pieces.append({"text": text, "finish_reason": None, **details})
        if choice.finish is not None:
            pieces.append({"text": "", "finish_reason": choice.finish, "logprobs": None})
        return pieces

    def _logprobs(self, ids: Sequence[int], logprobs: Sequence[float], begin: int) -> Json:
        texts = [self._tokenizer.decode([token]) for token in ids]
        offsets, place = [], begin
        for text in texts:
            offsets.append(place)
            place += len(text)
        return {
            "tokens": texts,
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": offsets,
        }
