"""The model behind a server: prompts in its tokens, and the sampling of its answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeVar

from aligner.config import SamplingOptions
from aligner.config.fields import SpecialTokensInText
from aligner.data.chat import check_all_used, parse_messages, render, with_system
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.environments.calls import Form, form_of
from aligner.errors import DataError, TokenizerError
from aligner.serving.requests import ChatRequest, CompletionRequest, chat_messages
from aligner.serving.tools import in_text

Request = TypeVar("Request", bound=ChatRequest | CompletionRequest)


@dataclass(frozen=True)
class Served:
    """The model behind a server.

    ``positions``: prompt and answer together. ``vocab_size``: of the model. ``defaults``: of what a
    request does not say; its length is shortened where the prompt leaves less room.
    ``special_tokens_in_text``: treatment of those that requests spell.
    """

    name: str
    tokenizer: Tokenizer
    positions: int
    vocab_size: int
    defaults: SamplingOptions
    system_prompt: str | None = None
    add_bos: bool = False
    special_tokens_in_text: SpecialTokensInText = "keep"

    @cached_property
    def form(self) -> Form:
        """Form of calls, by the chat template."""
        return form_of(self.tokenizer)

    def is_called(self, name: str) -> bool:
        """Return whether requests may name the model so."""
        return name == self.name

    def taken(self, request: Request) -> Request:
        """The request as it is answered."""
        return request

    def encoded(self, text: str) -> list[int]:
        """Tokens of a prompt."""
        ids, bos = self.tokenizer.encode(text), self.tokenizer.bos_id
        return [bos, *ids] if self.add_bos and bos is not None and ids[:1] != [bos] else ids

    def shortened(self, text: str) -> str:
        """The text, or a beginning of it that has more tokens than the model has positions."""
        length = 2 * self.positions
        while length < len(text):
            if len(self.tokenizer.encode(text[:length])) > self.positions + self.positions // 4:
                return text[:length]
            length *= 2
        return text

    def check_ids(self, ids: Sequence[int]) -> None:
        """Refuse ids outside the vocabulary; `DataError`."""
        size = self.vocab_size
        if any(token >= size for token in ids):
            raise DataError(f"a token of {max(ids)} is outside the vocabulary of {size}")

    def prompt(self, text: str) -> str:
        """Text of a prompt, its special tokens treated; `DataError`: one is refused."""
        return text if self._keeps(text) else self._treated(text, "prompt")

    def chat(
        self,
        given: list[dict[str, Any]],
        tools: list[dict[str, Any]],
        template_kwargs: Mapping[str, Any] | None = None,
        keeps_answers: bool = False,
    ) -> str:
        """Text of a chat and of its answer's opening; ``template_kwargs``: for the template.

        ``keeps_answers``: special tokens in the assistant's messages, the model's own, are kept.

        Raises:
            DataError: the messages are none, the template ignores a part of them, or a special
                token is refused.
            TokenizerError: there is no chat template.
        """
        messages = parse_messages(chat_messages(given))
        if self.special_tokens_in_text != "keep":
            text = replace(self, special_tokens_in_text="keep").chat(given, tools, template_kwargs)
            if self._keeps(text):
                return text
            for number, message in enumerate(messages):
                if not (keeps_answers and message["role"] == "assistant"):
                    messages[number] = self._treated(message, f"messages.{number}")
            tools = self._treated(tools, "tools")
            template_kwargs = self._treated(template_kwargs, "chat_template_kwargs")
        messages = with_system(messages, self.system_prompt)
        speaks_of_tools = tools or any(
            message["role"] == "tool" or "tool_calls" in message for message in messages
        )
        shown = tools or None
        try:
            if speaks_of_tools and self.form == "plain":
                messages, shown = in_text(messages, tools), None
            tokenizer = self.tokenizer.with_template_kwargs(template_kwargs or {})
            check_all_used(tokenizer, messages, shown)
            return render(tokenizer, messages, shown)
        except TokenizerError as error:
            advice = "a model without a chat template completes text: ask /v1/completions"
            raise TokenizerError(f"{error}; {advice}") from error

    def _keeps(self, text: str) -> bool:
        """Return whether the text remains as it is; one that is too long is refused later."""
        return self.special_tokens_in_text == "keep" or self.shortened(text) != text

    def _treated(self, value: Any, place: str) -> Any:
        return treat_special_tokens(self.tokenizer, value, self.special_tokens_in_text, place)

    def options(
        self, request: ChatRequest | CompletionRequest, prompt: Sequence[int]
    ) -> SamplingOptions:
        """Sampling of an answer to a prompt in tokens.

        Raises:
            DataError: it does not fit the model, in length or in ids.
        """
        if not prompt:
            raise DataError("the prompt is empty: it has no token")
        self.check_ids(prompt)
        room = self.positions - len(prompt)
        longest = request.longest or min(room, self.defaults.length.max_length)
        if room < 1 or longest > room:
            more = f"and {request.longest}" if request.longest else "and an answer's"
            raise DataError(
                f"the prompt's {len(prompt)} tokens {more} do not fit the model's {self.positions} "
                "positions; shorten the prompt, or ask for fewer with max_tokens"
            )
        return request.sampling_options(self.defaults, longest)
