"""Requests of OpenAI's interface, as far as they mean something here.

https://platform.openai.com/docs/api-reference has the keys; ``return_token_ids``, ``top_k``,
``min_tokens`` and ``repetition_penalty`` are vLLM's. A key that would change the answer, and which
nothing here can follow, is refused by name; one with the value that changes nothing is accepted.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from aligner.config import SamplingOptions
from aligner.data.chat import Message
from aligner.errors import DataError
from aligner.http.messages import parse_json, validated

# Values that change nothing, of keys that are not offered.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "best_of": (1,),
    "continue_final_message": (False,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "ignore_eos": (False,),
    "include_stop_str_in_output": (False,),
    "logit_bias": ({},),
    "min_p": (0,),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "suffix": ("",),
    "top_logprobs": (0,),
}
# Keys that say nothing of the answer.
_UNREAD = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
_MOST_CHOICES = 256
_MOST_STOPS, _LONGEST_STOP = 16, 256
_MOST_MESSAGES = 4096

_Ids = Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
_Messages = Annotated[list[dict[str, Any]], Field(max_length=_MOST_MESSAGES)]
_Positive = Annotated[int, Field(ge=1)]


def _temperature(value: float) -> float:
    if value != 0 and not 0.001 <= value <= 100:  # logits divided by less are no numbers any more
        raise ValueError("must be 0, or between 0.001 and 100")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ValueError("must be a text or a list of texts")
    if len(stops) > _MOST_STOPS:
        raise ValueError(f"{len(stops)} texts, at most {_MOST_STOPS} are taken")
    if not all(stops):
        raise ValueError("an empty text; leave it out")
    if max(map(len, stops), default=0) > _LONGEST_STOP:
        raise ValueError(f"a text of more than {_LONGEST_STOP} characters")
    return tuple(stops)


class _Request(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    model: str | None = None


class StreamOptions(BaseModel):
    """``stream_options``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Sampled(_Request):
    """Keys that both kinds of completions have."""

    n: Annotated[int, Field(ge=1, le=_MOST_CHOICES)] = 1
    max_tokens: _Positive | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, AfterValidator(_temperature)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    stop: Annotated[Any, AfterValidator(_stops)] = None
    skip_special_tokens: bool = False
    seed: int | None = None
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    return_token_ids: bool = False
    logprobs: bool | int | None = None

    @property
    def longest(self) -> int | None:
        """Most new tokens; None: the request does not say."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if the answer has log-probs; for ``logprobs=0`` those of sampled tokens alone."""
        return self.logprobs is not None and self.logprobs is not False

    def sampling_options(self, defaults: SamplingOptions, longest: int) -> SamplingOptions:
        """Sampling as the request has it, and as ``defaults`` where it says nothing.

        ``longest``: most new tokens. A temperature of 0 is greedy.
        """
        given: dict[str, Any] = {}
        if self.temperature is not None:
            given["use_greedy"] = self.temperature == 0
            given["temperature"] = self.temperature or 1.0
        if self.top_k is not None:
            given["top_k"] = max(0, self.top_k)
        further = {"top_p": self.top_p, "repetition_penalty": self.repetition_penalty}
        further["end_strings"] = self.stop
        given |= {key: value for key, value in further.items() if value is not None}
        least = defaults.length.min_length if self.min_tokens is None else self.min_tokens
        return SamplingOptions(
            dataclasses.replace(
                defaults.length, max_length=longest, min_length=min(least, longest)
            ),
            dataclasses.replace(defaults.sampling, **given),
        )


class ChatRequest(_Sampled):
    """``POST /v1/chat/completions``."""

    messages: _Messages
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: _Positive | None = None
    logprobs: bool = False

    @property
    def longest(self) -> int | None:
        """Most new tokens; ``max_completion_tokens`` goes before its older name."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Functions that the model may call.

        Raises:
            DataError: one of them is no function with a name and a mapping of parameters.
        """
        for number, tool in enumerate(self.tools):
            function = tool.get("function")
            if (
                not isinstance(function, Mapping)
                or not isinstance(function.get("name"), str)
                or not isinstance(function.get("parameters") or {}, Mapping)
            ):
                raise DataError(
                    f"tools.{number}: must be of the form "
                    '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
                )
        return [] if self.tool_choice == "none" else self.tools


class CompletionRequest(_Sampled):
    """``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each prompt, as text or as tokens.

        Raises:
            DataError: there is none, or one of them is neither.
        """
        if isinstance(self.prompt, str) or (self.prompt and _is_ids(self.prompt)):
            return [self.prompt]
        if not self.prompt:
            raise DataError("prompt: an empty list; give at least one prompt")
        if not all(isinstance(one, str) or _is_ids(one) for one in self.prompt):
            raise DataError("prompt: must be text, tokens, or a list of texts or of tokens' lists")
        return self.prompt


class TokenizeRequest(_Request):
    """``POST /tokenize``: of a text, or of a chat with the opening of the next answer."""

    prompt: str | None = None
    messages: _Messages | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}


class DetokenizeRequest(_Request):
    """``POST /detokenize``."""

    tokens: _Ids


class SessionRequest(BaseModel):
    """``POST /v1/sessions``. ``seed``: of the requests without one of their own."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seed: int | None = None


class RewardRequest(BaseModel):
    """``POST /v1/reward``: a number, null (not scored), or a mapping with ``reward``."""

    model_config = ConfigDict(extra="forbid")
    reward: Any = None


Kind = TypeVar("Kind", bound=BaseModel)


def read_request(kind: type[Kind], body: bytes | bytearray) -> Kind:
    """The request that a body holds; keys that are null count as absent.

    Raises:
        DataError: what is wrong with it, the key first.
    """
    value = parse_json(body)
    if not isinstance(value, dict):
        raise DataError("the body: must be a JSON object")
    given = {}
    for key, content in value.items():
        if content is None or key in _UNREAD:
            continue
        if key in _NEUTRAL and key not in kind.model_fields:
            # True equals 1, but is not the number that the key means.
            if (type(content) is bool, content) not in [
                (type(v) is bool, v) for v in _NEUTRAL[key]
            ]:
                raise DataError(f"{key}: {content!r:.80} is not offered here; leave it out")
            continue
        given[key] = content
    return validated(kind, given)


def chat_messages(given: list[dict[str, Any]]) -> list[Message]:
    """Messages as chat templates have them: contents as text, absent parts left out.

    Raises:
        DataError: a part of a message is no text.
    """
    return [_plain(message, f"messages.{number}") for number, message in enumerate(given)]


def _plain(message: dict[str, Any], place: str) -> Message:
    kept = {key: value for key, value in message.items() if value not in (None, [])}
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") if _is_text(part) else None for part in content]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{place}.content: every part must be of type 'text'; this model reads text"
            )
        content = "".join(map(str, texts))
    # Clients send null for an answer, or for a result, without text.
    answers = message.get("role") in ("assistant", "tool") and not message.get("refusal")
    kept["content"] = "" if content is None and answers and "content" in message else content
    if message.get("role") == "developer":  # OpenAI's newer name
        kept["role"] = "system"
    return kept


def _is_text(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "text"


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
