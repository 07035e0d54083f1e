"""Answers of OpenAI's interface as pydantic models, with token ids where vLLM has them."""

from typing import Any, Literal

from pydantic import BaseModel


class ModelInfo(BaseModel):
    """``GET /v1/models/NAME``."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "aligner"
    max_model_len: int


class ModelList(BaseModel):
    """``GET /v1/models``."""

    object: Literal["list"] = "list"
    data: list[ModelInfo]


class Tokens(BaseModel):
    """``POST /tokenize``: tokens of a text or a chat."""

    tokens: list[int]
    count: int
    max_model_len: int


class SessionKey(BaseModel):
    """``POST /v1/sessions``: id of a session, and the key whose answers it records."""

    id: str
    api_key: str


class FunctionCall(BaseModel):
    """Name of a function, and its arguments as JSON."""

    name: str
    arguments: str


class MessageToolCall(BaseModel):
    """Call of a function. ``index``: index of the call in a streamed message."""

    index: int | None = None
    id: str
    type: str
    function: FunctionCall


class ChatMessage(BaseModel):
    """Message of the assistant, or a part of it."""

    role: str | None = None
    content: str | None = None
    refusal: None = None
    tool_calls: list[MessageToolCall] | None = None


class TokenLogprob(BaseModel):
    """Log-prob of one token, its text and the bytes of the text that it completes."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Any]


class ChatLogprobs(BaseModel):
    """Log-probs of a message's tokens."""

    content: list[TokenLogprob]
    refusal: None


class TextLogprobs(BaseModel):
    """Log-probs of a text's tokens, the text of each token, and the characters before it."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class CompletionChoice(BaseModel):
    """An answer or a piece of it: ``message``, ``delta`` (a piece of a message) or ``text``."""

    index: int
    message: ChatMessage | None = None
    delta: ChatMessage | None = None
    text: str | None = None
    finish_reason: str | None
    logprobs: ChatLogprobs | TextLogprobs | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Completion(BaseModel):
    """The answers to a request, or a piece of an answer."""

    id: str
    created: int
    object: str
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None
    obfuscation: str | None = None

    def to_json(self) -> str:
        """Return JSON without the fields that were not set."""
        return self.model_dump_json(exclude_unset=True)
