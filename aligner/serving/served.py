"""The model of a server: renders and encodes prompts, and checks sampling options."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from aligner.config import SamplingOptions
from aligner.config.fields import SpecialTokensInText
from aligner.data.chat import check_all_used, parse_messages, render, with_system
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.tokenizer import Tokenizer, with_bos
from aligner.environments.calls import Form, form_of
from aligner.errors import DataError, TokenizerError
from aligner.serving.requests import ChatRequest, CompletionRequest, chat_messages
from aligner.serving.tools import in_text

Request = TypeVar("Request", bound=ChatRequest | CompletionRequest)


@dataclass(frozen=True)
class Served:
    """The model of a server: its tokenizer, limits and defaults."""

    name: str
    tokenizer: Tokenizer
    positions: int  # maximum number of tokens of prompt and answer together
    vocab_size: int
    defaults: SamplingOptions  # used where a request sets no value
    system_prompt: str | None = None
    add_bos: bool = False
    special_tokens_in_text: SpecialTokensInText = "keep"  # for special tokens in requests' texts

    @cached_property
    def form(self) -> Form:
        """Format in which the model's chat template writes tool calls."""
        return form_of(self.tokenizer)

    def accepts_name(self, name: str) -> bool:
        """Return whether ``name`` is valid as the key ``model`` of a request."""
        return name == self.name

    def adapted(self, request: Request) -> Request:
        """Return the request with values that the server replaces. Here it is unchanged."""
        return request

    def encoded(self, text: str) -> list[int]:
        """Return the token ids of a text."""
        ids = self.tokenizer.encode(text)
        return with_bos(self.tokenizer, ids) if self.add_bos else ids

    def shortened(self, text: str) -> str:
        """Shorten a very long text, to save time. What remains is still refused as too long."""
        length = 2 * self.positions
        while length < len(text):
            if len(self.tokenizer.encode(text[:length])) > self.positions + self.positions // 4:
                return text[:length]
            length *= 2
        return text

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise `DataError` if a token id is outside the vocabulary."""
        if max(ids, default=0) >= self.vocab_size:
            raise DataError(f"token id {max(ids)} is outside the vocabulary of {self.vocab_size}")

    def prompt(self, text: str) -> str:
        """Apply ``special_tokens_in_text`` to a prompt. Raises `DataError` for a refused token."""
        return text if self._keeps(text) else self._treated(text, "prompt")

    def chat(
        self,
        chat: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        keeps_answers: bool = False,
    ) -> str:
        """Return a chat as text, with the generation prompt.

        ``template_kwargs``: variables of the chat template. ``keeps_answers``: keep special tokens
        in assistant messages, because the model wrote them. Raises `DataError` if a part is invalid
        or not used by the template, and `TokenizerError` if there is no template.
        """
        messages = parse_messages(chat_messages(chat))
        # Refuse or escape special tokens, except in a chat that will be refused as too long.
        if self.special_tokens_in_text != "keep":
            text = replace(self, special_tokens_in_text="keep").chat(chat, tools, template_kwargs)
            if self._keeps(text):
                return text
            for index, message in enumerate(messages):
                if not (keeps_answers and message["role"] == "assistant"):
                    messages[index] = self._treated(message, f"messages.{index}")
            tools = self._treated(tools, "tools")
            template_kwargs = self._treated(template_kwargs, "chat_template_kwargs")
        # If the template does not support tools (form `plain`), write tools and calls as text.
        messages = with_system(messages, self.system_prompt)
        template_tools = tools or None
        has_calls = any(chat["role"] == "tool" or "tool_calls" in chat for chat in messages)
        try:
            if (tools or has_calls) and self.form == "plain":
                messages, template_tools = in_text(messages, tools), None
            tokenizer = self.tokenizer.with_template_kwargs(template_kwargs or {})
            check_all_used(tokenizer, messages, template_tools)
            return render(tokenizer, messages, template_tools)
        except TokenizerError as error:
            raise TokenizerError(
                f"{error}. Without a chat template, send text to /v1/completions"
            ) from error

    def _keeps(self, text: str) -> bool:
        """Return whether special tokens in ``text`` stay. Too long texts are refused later."""
        return self.special_tokens_in_text == "keep" or self.shortened(text) != text

    def _treated(self, value: Any, key: str) -> Any:
        return treat_special_tokens(self.tokenizer, value, self.special_tokens_in_text, key)

    def options(
        self, request: ChatRequest | CompletionRequest, prompt: Sequence[int]
    ) -> SamplingOptions:
        """Return the sampling options for the answer to a prompt, given as token ids.

        Raises `DataError` if the prompt is empty, too long, or has ids outside the vocabulary.
        """
        if not prompt:
            raise DataError("the prompt has no token. Send some text")
        self.check_ids(prompt)
        room = self.positions - len(prompt)
        longest = request.longest or min(room, self.defaults.length.max_length)
        if room < 1 or longest > room:
            answer = f"{request.longest} new tokens" if request.longest else "an answer"
            raise DataError(
                f"the prompt's {len(prompt)} tokens and {answer} do not fit the model's "
                f"{self.positions} positions. Shorten the prompt or reduce max_tokens"
            )
        return request.sampling_options(self.defaults, longest)
