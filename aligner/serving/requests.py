"""Requests of OpenAI's interface (https://platform.openai.com/docs/api-reference).

The keys ``return_token_ids``, ``top_k``, ``min_tokens`` and ``repetition_penalty`` are vLLM's. An
unsupported key is accepted only if its value does not change the answer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, FailFast, Field

from aligner.config import SamplingOptions
from aligner.data.chat import Message
from aligner.errors import DataError
from aligner.http.messages import parse_json, validated

# Unsupported keys, with the values that change nothing.
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
# Keys without influence on the answer.
_UNREAD = {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
_MAX_CHOICES = 256
_MAX_STOPS, _MAX_STOP_CHARACTERS = 16, 256
_MAX_MESSAGES = 4096

_Ids = Annotated[list[Annotated[int, Field(ge=0)]], FailFast()]
_Messages = Annotated[list[dict[str, Any]], Field(max_length=_MAX_MESSAGES)]
_Positive = Annotated[int, Field(ge=1)]


def _check_temperature(value: float) -> float:
    if value != 0 and not 0.001 <= value <= 100:  # logits divided by less would not be finite
        raise ValueError("must be 0, or between 0.001 and 100")
    return value


def _stops(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        problem = "must be a text or a list of texts"
    elif len(stops) > _MAX_STOPS:
        problem = f"has {len(stops)} texts, but the limit is {_MAX_STOPS}"
    elif not all(stops):
        problem = "has an empty text. Leave it out"
    elif max(map(len, stops), default=0) > _MAX_STOP_CHARACTERS:
        problem = f"has a text of more than {_MAX_STOP_CHARACTERS} characters"
    else:
        return tuple(stops)
    raise ValueError(problem)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


class _Request(_Strict):
    model: str | None = None


class StreamOptions(_Strict):
    """Value of a request's key ``stream_options``."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Sampled(_Request):
    """Keys of requests for chat completions and for text completions."""

    n: Annotated[int, Field(ge=1, le=_MAX_CHOICES)] = 1
    max_tokens: _Positive | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[float, AfterValidator(_check_temperature)] | None = None
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
        """Maximum number of new tokens, or None if the request sets no limit."""
        return self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        """True if log-probs of sampled tokens are requested. ``logprobs=0`` requests them, too."""
        return self.logprobs is not None and self.logprobs is not False

    def sampling_options(self, defaults: SamplingOptions, longest: int) -> SamplingOptions:
        """Return ``defaults`` with the request's values. ``longest``: maximum of new tokens."""
        greedy = None if self.temperature is None else self.temperature == 0
        changes: dict[str, Any] = {
            "use_greedy": greedy,
            "temperature": 1.0 if greedy else self.temperature,
            "top_k": None if self.top_k is None else max(0, self.top_k),
            "top_p": self.top_p,
            "repetition_penalty": self.repetition_penalty,
            "end_strings": self.stop,
        }
        # Unset values keep their defaults.
        changes = {key: value for key, value in changes.items() if value is not None}
        shortest = defaults.length.min_length if self.min_tokens is None else self.min_tokens
        length = {"max_length": longest, "min_length": min(shortest, longest)}
        return SamplingOptions(
            dataclasses.replace(defaults.length, **length),
            dataclasses.replace(defaults.sampling, **changes),
        )


class ChatRequest(_Sampled):
    """Body of ``POST /v1/chat/completions``."""

    messages: _Messages
    tools: list[dict[str, Any]] = []
    tool_choice: Literal["none", "auto"] = "auto"
    chat_template_kwargs: dict[str, Any] = {}
    max_completion_tokens: _Positive | None = None
    logprobs: bool = False

    @property
    def longest(self) -> int | None:
        """Maximum number of new tokens: ``max_completion_tokens``, or the older ``max_tokens``."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def offered_tools(self) -> list[dict[str, Any]]:
        """Functions that the model may call. Raises `DataError` if a tool is not a function."""
        for index, tool in enumerate(self.tools):
            function = tool.get("function")
            function = function if isinstance(function, Mapping) else {}
            has_name = isinstance(function.get("name"), str)
            if not (has_name and isinstance(function.get("parameters") or {}, Mapping)):
                raise DataError(
                    f"tools.{index}: must be of the form "
                    '{"type": "function", "function": {"name": ..., "parameters": {...}}}'
                )
        return [] if self.tool_choice == "none" else self.tools


class CompletionRequest(_Sampled):
    """Body of ``POST /v1/completions``."""

    prompt: str | list[Any]
    logprobs: Annotated[int, Field(ge=0, le=0)] | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """The prompts, as text or token ids. Raises `DataError` for an empty or invalid list."""
        if isinstance(self.prompt, str) or (self.prompt and _is_ids(self.prompt)):
            return [self.prompt]
        if not self.prompt:
            raise DataError("prompt: an empty list. Set at least one prompt")
        if not all(isinstance(prompt, str) or _is_ids(prompt) for prompt in self.prompt):
            raise DataError("prompt: must be a text, a list of token ids, or a list of these")
        return self.prompt


class TokenizeRequest(_Request):
    """Body of ``POST /tokenize``: a text, or a chat to which the generation prompt is added."""

    prompt: str | None = None
    messages: _Messages | None = None
    tools: list[dict[str, Any]] = []
    chat_template_kwargs: dict[str, Any] = {}

    @property
    def text_prompt(self) -> str | None:
        """The prompt, or None for a chat. Raises `DataError` unless exactly one of them is set."""
        if (self.prompt is None) == (self.messages is None):
            state = "neither it nor" if self.prompt is None else "both it and"
            raise DataError(f"prompt: {state} messages are set. Set one of the two")
        for key in ("tools", "chat_template_kwargs"):
            if self.prompt is not None and getattr(self, key):
                raise DataError(f"{key}: only used with messages, but prompt is set. Leave it out")
        return self.prompt


class DetokenizeRequest(_Request):
    """Body of ``POST /detokenize``."""

    tokens: _Ids


class SessionRequest(_Strict):
    """Body of ``POST /v1/sessions``."""

    seed: int | None = None  # of requests that do not set one


class RewardRequest(_Strict):
    """Body of ``POST /v1/reward``: a number, null (no score), or an object with key ``reward``."""

    reward: Any = None


Kind = TypeVar("Kind", bound=BaseModel)


def read_request(kind: type[Kind], body: bytes | bytearray) -> Kind:
    """Parse a JSON body as ``kind``. Null keys count as absent. Raises `DataError` naming a key."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise DataError("the body: must be a JSON object")
    fields = {}
    for key, content in value.items():
        if content is None or key in _UNREAD:
            continue
        if key in _NEUTRAL and key not in kind.model_fields:
            # True equals 1, but not as a value of a number's key.
            neutral = [(type(value) is bool, value) for value in _NEUTRAL[key]]
            if (type(content) is bool, content) not in neutral:
                raise DataError(f"{key}: {content!r:.80} is not supported. Leave it out")
            continue
        fields[key] = content
    return validated(kind, fields)


def chat_messages(messages: list[dict[str, Any]]) -> list[Message]:
    """Convert messages for chat templates. Raises `DataError` for content that is not text."""
    return [_plain(message, f"messages.{index}") for index, message in enumerate(messages)]


def _plain(message: dict[str, Any], key: str) -> Message:
    plain = {key: value for key, value in message.items() if value not in (None, [])}
    content = message.get("content")
    if isinstance(content, list):
        parts = [part if isinstance(part, Mapping) else {} for part in content]
        texts = [part.get("text") if part.get("type") == "text" else None for part in parts]
        if not all(isinstance(text, str) for text in texts):
            raise DataError(
                f"{key}.content: every part must have the type 'text': the model only reads text"
            )
        content = "".join(map(str, texts))
    # Clients send null for an answer, or for a result, without text.
    is_reply = message.get("role") in ("assistant", "tool") and not message.get("refusal")
    plain["content"] = "" if content is None and is_reply and "content" in message else content
    if message.get("role") == "developer":  # OpenAI's newer name
        plain["role"] = "system"
    return plain


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
