"""A conversation as tokens: sampled tokens are kept unchanged over all turns.

A turn's prompt consists of the previous turn's prompt and sampled tokens, and of the tokens of the
new messages. Earlier turns are never rendered again, so sampler and trainer compute log-probs of
the same sequences (verl, SkyRL and TRL join tokens in the same way). Some chat templates render
earlier turns differently once new messages follow, for example without thinking. Then the
conversation *forks*: it continues in a new sequence, the whole history as the template now renders
it. A forked conversation is one trajectory with the rewards of all turns.
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Literal

from aligner.config.fields import SpecialTokensInText
from aligner.data.chat import Message, Tools, check_all_used, render
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.decoding import common_prefix, decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer, encode_fragment, with_bos
from aligner.environments.calls import form_of, structured
from aligner.environments.protocol import Start, Turn, check_total
from aligner.environments.tools import tools_in_text
from aligner.environments.trajectory import Trajectory, TurnRecord
from aligner.errors import ConfigError, DataError, TokenizerError

RewrittenHistory = Literal["fork", "refuse", "keep"]
_MESSAGE_END = "<|eom_id|>"  # Llama 3 ends messages with tool calls so, instead of <|eot_id|>
_QUESTION: Message = {"role": "user", "content": "a"}
_ANSWER = "⁂An answer⁂"  # searched for in a rendered chat


class RewrittenHistoryError(DataError):
    """The template rewrites earlier turns and ``environment.rewritten_history`` is ``refuse``."""


class ChatRenderer:
    """Renders messages as text and tokens with the chat template of a tokenizer.

    Without a template, a message is rendered as its content and a newline.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_bos: bool = False,
        rewritten_history: RewrittenHistory = "fork",
        special_tokens_in_text: SpecialTokensInText = "keep",
    ) -> None:
        """Inspect the template. The options are those of `EnvironmentConfig` and `DataConfig`."""
        self.treated = partial(treat_special_tokens, tokenizer, policy=special_tokens_in_text)
        self.tokenizer, self._add_bos = tokenizer, add_bos
        self._rewritten_history = rewritten_history
        self._has_template = _has_template(tokenizer)
        self._form = form_of(tokenizer)
        # The end of an assistant message: its text, and the tokens that end it.
        self._message_end = (
            self._text_after_answer([_QUESTION], [], None) if self._has_template else "\n"
        )
        message_end_ids = tokenizer.encode(self._message_end)
        self._end_is_token = tokenizer.turn_end_id in message_end_ids
        call_end_ids = tokenizer.encode(_MESSAGE_END)
        self._end_ids = [tokenizer.turn_end_id, *(call_end_ids if len(call_end_ids) == 1 else [])]

    def opening(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[int]]:
        """Return the text and the tokens of the first messages with the generation prompt.

        Raises `DataError` if the template refuses the messages or ignores a part of them.
        """
        if self._has_template:
            check_all_used(self.tokenizer, messages, tools)
            text = render(self.tokenizer, messages, tools)
        else:
            text = "".join(f"{message['content']}\n" for message in messages)
        ids = self._encode(text)
        if not ids:
            raise DataError("the environment's first messages have no token. Return text in init")
        return text, ids

    def shows_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether the chat template renders ``tools``."""
        if not self._has_template:
            return False
        return render(self.tokenizer, messages, tools) != render(self.tokenizer, messages)

    def continuation(
        self,
        history: Sequence[Message],
        answer: str,
        new: Sequence[Message],
        tools: Tools | None,
        *,
        end_id: int | None,
    ) -> tuple[str, list[int]]:
        """Return the text and the tokens between an answer and the next answer.

        ``history`` and ``new``: the messages before and after the answer. ``answer``: its text
        without the end token. ``end_id``: the sampled end token, None if the answer was cut. The
        result begins after the template's end token if ``end_id`` is this token. Otherwise the
        result contains the template's end token.
        """
        if self._has_template:
            check_all_used(self.tokenizer, [_QUESTION, _answer("b"), *new])
            text = self._text_after_answer(history, new, tools)
        else:
            text = self._message_end + "".join(f"{message['content']}\n" for message in new)
        if end_id is None and answer.endswith(self._message_end):  # as a stop string
            text = text[len(self._message_end) :]
        ids = encode_fragment(self.tokenizer, text)
        if end_id in self._end_ids and self._end_is_token:
            ids = ids[ids.index(self.tokenizer.turn_end_id) + 1 :]
        return text, ids

    def rewritten(
        self, history: Sequence[Message], chat: Sequence[Message], tools: Tools | None, text: str
    ) -> tuple[str, list[int]] | None:
        """Return the text and the tokens of a new sequence if the conversation forks, else None.

        ``history``: the messages before the last answer. ``chat``: all messages. ``text``: text of
        the current sequence. White space is not compared, because templates trim messages. Raises
        `RewrittenHistoryError` instead of a fork if ``rewritten_history`` is ``refuse``.
        """
        if not self._has_template or self._rewritten_history == "keep":
            return None
        # Some templates accept calls only as `tool_calls` and render them in their own format.
        # Only the messages before the answer can then be compared.
        has_structured_calls = False
        try:
            chat_text = render(self.tokenizer, chat, tools)
        except DataError:
            has_structured_calls = True
            chat_text = render(self.tokenizer, structured(chat, self._form), tools)
            text = render(self.tokenizer, structured(history, self._form), tools)
        shown, expected = ("".join(string.split()) for string in (chat_text, text))
        if shown == expected or (has_structured_calls and shown.startswith(expected)):
            return None
        if self._rewritten_history == "fork":
            return chat_text, self._encode(chat_text)
        start = common_prefix(shown, expected)
        raise RewrittenHistoryError(
            "the tokenizer's chat template rewrites earlier turns (for instance, it drops "
            f"thinking): it now renders {shown[start : start + 40]!r} in place of "
            f"{expected[start : start + 40]!r}. Set environment.rewritten_history=fork to start a "
            "new sequence with the rewritten history, or rewritten_history=keep to append to the "
            "old tokens. With keep, the inference server of the trained model must also append "
            "tokens instead of applying the template again"
        )

    def _encode(self, text: str) -> list[int]:
        ids = self.tokenizer.encode(text)
        return with_bos(self.tokenizer, ids) if self._add_bos else ids

    def _text_after_answer(
        self, history: Sequence[Message], new: Sequence[Message], tools: Tools | None
    ) -> str:
        """Return the text after an answer: its message's end, ``new``, and a generation prompt."""
        # Render a chat with a unique text as the answer, and cut after that text.
        texts = str([*history, *new])
        mark = next(text for n in count() if (text := f"⁂answer {n}⁂") not in texts)
        chat_end = [_answer(mark), *new]
        try:
            text = render(self.tokenizer, [*history, *chat_end], tools, open_answer=bool(new))
        except DataError:  # the template may accept earlier calls only as `tool_calls`
            chat = [*structured(history, self._form), *chat_end]
            text = render(self.tokenizer, chat, tools, open_answer=bool(new))
        _, separator, text_after = text.rpartition(mark)
        if not separator:
            raise DataError(
                "the tokenizer's chat template leaves out an assistant message. Set "
                "environment.chat_template=FILE.jinja to a template that shows it"
            )
        return text_after


class Conversation(Trajectory):
    """A conversation between policy and environment, as messages and as tokens."""

    def __init__(self, renderer: ChatRenderer, start: Start) -> None:
        self._renderer = renderer
        messages = [dict(message) for message in start.messages]
        # Tools that the template does not show are described in the first message.
        tools = None if start.tools is None else [dict(tool) for tool in start.tools]
        self.first: list[Message] = renderer.treated(messages, location="messages")
        self._tools: Tools | None = renderer.treated(tools, location="tools")
        if self._tools is not None and not renderer.shows_tools(self.first, self._tools):
            self.first, self._tools = tools_in_text(self.first, self._tools), None
        prompt, ids = renderer.opening(self.first, self._tools)
        super().__init__(renderer.tokenizer, prompt)
        self._messages, self._text = list(self.first), prompt
        self.starts.append(0)
        self.append_context(ids)

    @property
    def sequence(self) -> list[int]:
        """Tokens of the sequence that the policy continues."""
        return self.ids[self.starts[-1] :]

    def answered(self, ids: Sequence[int], logprobs: Sequence[float], is_end: bool) -> Message:
        """Append the tokens ``ids`` that the policy sampled, and return them as a message.

        ``is_end``: False if a length limit ended the answer.
        """
        ended = is_end and ids[-1] in self._renderer.tokenizer.end_ids
        content = decode_response(self._renderer.tokenizer, self.sequence, ids)
        self.turns.append(TurnRecord(content, len(ids), ended))
        self.append(ids, logprobs, len(self.turns))
        return _answer(content)

    def follow(self, turn: Turn, *, goes_on: bool) -> None:
        """Record ``turn``. If the conversation ``goes_on``, append the turn's messages as tokens.

        Raises `DataError` if the template refuses the messages, or the rewards' sum is infinite.
        """
        record = self.turns[-1]
        record.reward, record.parts = turn.score, turn.parts
        record.answer = [dict(message) for message in turn.messages]
        record.info, record.steps = dict(turn.info), list(turn.steps)
        step_rewards = (reward for turn in self.turns for _, reward in turn.steps)
        check_total([*(turn.reward for turn in self.turns), *step_rewards])
        if not goes_on:
            return
        # The text and the tokens that follow the answer.
        history = self._messages
        record.answer = self._renderer.treated(record.answer, location="messages")
        self._messages = [*history, _answer(record.content), *record.answer]
        end_id = self.ids[-1] if record.ended else None
        text, ids = self._renderer.continuation(
            history, record.content, record.answer, self._tools, end_id=end_id
        )
        self._text += record.content + text
        # A new sequence instead, if the template now renders earlier turns differently.
        fork = self._renderer.rewritten(history, self._messages, self._tools, self._text)
        if fork is not None:
            self.starts.append(len(self.ids))
            self._text, ids = fork
        self.append_context(ids)


def _has_template(tokenizer: Tokenizer) -> bool:
    """Return whether there is a template. Raises `ConfigError` if it drops assistants' text."""
    question, answer = _QUESTION, _answer(_ANSWER)
    for chat in ([question], [question, answer], [question, answer, question]):
        try:
            shown = render(tokenizer, chat, open_answer=False)
        except TokenizerError:
            return False
        except DataError:  # a template for other chats
            continue
        if answer in chat and _ANSWER not in shown:
            raise ConfigError(
                "the model's chat template drops text of assistant messages: it renders a test "
                f"message {_ANSWER!r} as {shown!r:.200}. Set environment.chat_template=FILE.jinja "
                "to a template that keeps the text"
            )
    return True


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}
