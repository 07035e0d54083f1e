"""A conversation in tokens: what the policy sampled stays, token by token, over all turns.

Prompt of turn n+1 = prompt of turn n + the tokens that were sampled + the new messages' tokens. The
last are what the chat template puts behind an assistant's message: its closing, the messages, the
opening of the next answer. Earlier turns are never rendered again, so the policy is trained on what
it has read and sampled, and log-probs of the sampler and the trainer are of the same sequences
(verl, SkyRL and TRL join tokens in the same way).

A template that shows earlier turns otherwise (dropped thinking, moved tools) breaks this: what the
policy would read next does not begin with what it has read and sampled. The conversation then
*forks*: it goes on with a new sequence, the whole history as the template shows it, and remains one
trajectory with the rewards of all turns (tinker and prime-rl make several samples of it).
"""

from collections.abc import Sequence
from functools import partial
from itertools import count
from typing import Literal

from aligner.config.fields import SpecialTokensInText
from aligner.data.chat import Message, Tools, check_all_used, render
from aligner.data.special_tokens import treat_special_tokens
from aligner.data.tokenizers.decoding import decode_response
from aligner.data.tokenizers.tokenizer import Tokenizer, encode_fragment
from aligner.environments.calls import form_of, structured
from aligner.environments.protocol import Start, Turn, check_total
from aligner.environments.tools import tools_in_text
from aligner.environments.trajectory import Trajectory, TurnRecord
from aligner.errors import ConfigError, DataError, TokenizerError

RewrittenHistory = Literal["fork", "refuse", "keep"]
_MESSAGE_END = "<|eom_id|>"  # Llama 3's, of messages that call a tool, in place of its template's
_QUESTION: Message = {"role": "user", "content": "a"}
_SHOWN = "⁂An answer⁂"  # looked for in a rendered chat


class RewrittenHistoryError(DataError):
    """A template rewrites earlier turns, and ``environment.rewritten_history`` is ``refuse``."""


class ChatRenderer:
    """Text and tokens of messages, by the chat template of a tokenizer.

    A tokenizer without one renders a message as its content and a newline.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        add_bos: bool = False,
        rewritten_history: RewrittenHistory = "fork",
        special_tokens_in_text: SpecialTokensInText = "keep",
    ) -> None:
        """Set up.

        ``add_bos``: begin with BOS unless the text does. ``rewritten_history``: where the template
        shows earlier turns otherwise than they were sampled, fork, refuse, or keep the tokens.
        ``special_tokens_in_text``: treatment of those that the environment's messages spell.
        """
        self.treated = partial(treat_special_tokens, tokenizer, policy=special_tokens_in_text)
        self.tokenizer, self._add_bos = tokenizer, add_bos
        self._rewritten_history = rewritten_history
        self._has_template = _has_template(tokenizer)
        self._form = form_of(tokenizer)
        if self._has_template:
            _check_answers(tokenizer)
        closing = self._behind([_QUESTION], [], None) if self._has_template else "\n"
        self._closing = closing
        self._closing_has_end = tokenizer.turn_end_id in tokenizer.encode(closing)
        other = tokenizer.encode(_MESSAGE_END)
        self._ends = [tokenizer.turn_end_id, *(other if len(other) == 1 else [])]

    def opening(self, messages: Sequence[Message], tools: Tools | None) -> tuple[str, list[int]]:
        """Text and tokens of the first messages, up to where the policy's begins.

        Raises:
            DataError: the template refuses the messages, or ignores a part of them.
        """
        if self._has_template:
            check_all_used(self.tokenizer, messages, tools)
            text = render(self.tokenizer, messages, tools)
        else:
            text = "".join(f"{message['content']}\n" for message in messages)
        ids = self._from_beginning(text)
        if not ids:
            raise DataError("the environment's first messages are empty: they have no token")
        return text, ids

    def shows_tools(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return whether the chat template shows tools."""
        if not self._has_template:
            return False
        return render(self.tokenizer, messages, tools) != render(self.tokenizer, messages)

    def following(
        self,
        history: Sequence[Message],
        answer: str,
        new: Sequence[Message],
        tools: Tools | None,
        *,
        ended: int | None,
    ) -> tuple[str, list[int]]:
        """Text and tokens between an answer and the next one.

        Args:
            history: the messages before the answer.
            answer: its text, without the token that ended it.
            new: the messages after it.
            tools: those of the start.
            ended: the token that was sampled and ended it, None: it was cut. One that ends a
                message stands for the template's own; behind others (of texts) that follows.
        """
        if self._has_template:
            check_all_used(self.tokenizer, [_QUESTION, _answer("b"), *new])
            behind = self._behind(history, new, tools)
        else:
            behind = self._closing + "".join(f"{message['content']}\n" for message in new)
        if ended is None and answer.endswith(self._closing):  # a stop string that is the closing
            behind = behind[len(self._closing) :]
        ids = encode_fragment(self.tokenizer, behind)
        if ended in self._ends and self._closing_has_end:
            ids = ids[ids.index(self.tokenizer.turn_end_id) + 1 :]
        return behind, ids

    def rewritten(
        self, before: Sequence[Message], now: Sequence[Message], tools: Tools | None, text: str
    ) -> tuple[str, list[int]] | None:
        """Text and tokens of the sequence with which a conversation goes on; None: the same one.

        Args:
            before: the messages that the last answer was sampled behind.
            now: these, the answer and what was said to it.
            tools: those of the start.
            text: of the sequence so far. White space does not count: templates trim messages.

        Raises:
            RewrittenHistoryError: it is another one, and ``rewritten_history`` is ``refuse``.
        """
        if not self._has_template or self._rewritten_history == "keep":
            return None
        whole, apart = self._whole(now, tools)
        shown, there = _squeezed(whole), _squeezed(text)
        if apart:  # calls are shown in the template's own words: compare what it showed before
            there = _squeezed(render(self.tokenizer, structured(before, self._form), tools))
            if shown.startswith(there):
                return None
        elif shown == there:
            return None
        if self._rewritten_history == "fork":
            return whole, self._from_beginning(whole)
        at = next(
            (n for n, (a, b) in enumerate(zip(shown, there, strict=False)) if a != b),
            min(len(shown), len(there)),
        )
        raise RewrittenHistoryError(
            "the tokenizer's chat template rewrites earlier turns (as one that drops thinking "
            f"does): it shows {shown[at : at + 40]!r} where {there[at : at + 40]!r} was read or "
            "sampled. environment.rewritten_history=fork goes on with a sequence as the template "
            "shows it, keep with the tokens as they were; what serves the model later must do the "
            "same"
        )

    def _from_beginning(self, text: str) -> list[int]:
        ids, bos = self.tokenizer.encode(text), self.tokenizer.bos_id
        if self._add_bos and bos is not None and ids[:1] != [bos]:
            ids = [bos, *ids]
        return ids

    def _whole(self, chat: Sequence[Message], tools: Tools | None) -> tuple[str, bool]:
        """The template's text; whether it wants calls apart from the text of their messages."""
        try:
            return render(self.tokenizer, chat, tools), False
        except DataError:
            return render(self.tokenizer, structured(chat, self._form), tools), True

    def _behind(
        self, history: Sequence[Message], new: Sequence[Message], tools: Tools | None
    ) -> str:
        """Text of the template behind an answer; without ``new``: the closing alone."""
        known = str([*history, *new])
        mark = next(text for n in count() if (text := f"⁂answer {n}⁂") not in known)
        behind_it = [_answer(mark), *new]  # the mark stands for the answer
        try:
            text = render(self.tokenizer, [*history, *behind_it], tools, open_answer=bool(new))
        except DataError:  # it may want earlier calls apart from the text of their messages
            apart = [*structured(history, self._form), *behind_it]
            text = render(self.tokenizer, apart, tools, open_answer=bool(new))
        _, found, behind = text.rpartition(mark)
        if not found:
            raise DataError("the tokenizer's chat template does not show an assistant's message")
        return behind


class Conversation(Trajectory):
    """A conversation in messages: what was said becomes the tokens that the policy reads next."""

    def __init__(self, renderer: ChatRenderer, start: Start) -> None:
        """Begin with the environment's first messages."""
        self._renderer = renderer
        messages = [dict(message) for message in start.messages]
        tools = None if start.tools is None else [dict(tool) for tool in start.tools]
        self.first: list[Message] = renderer.treated(messages, location="messages")
        self._tools: Tools | None = renderer.treated(tools, location="tools")
        if self._tools is not None and not renderer.shows_tools(self.first, self._tools):
            self.first, self._tools = tools_in_text(self.first, self._tools), None
        prompt, ids = renderer.opening(self.first, self._tools)
        super().__init__(renderer.tokenizer, prompt)
        self._messages, self._text = list(self.first), prompt
        self.starts.append(0)
        self.read(ids)

    @property
    def sequence(self) -> list[int]:
        """Tokens of the sequence that the policy continues."""
        return self.ids[self.starts[-1] :]

    def answered(self, ids: Sequence[int], logprobs: Sequence[float], is_end: bool) -> Message:
        """Add the tokens that the policy sampled; return its message.

        ``is_end``: the response ended by itself.
        """
        ended = is_end and ids[-1] in self._renderer.tokenizer.end_ids
        content = decode_response(self._renderer.tokenizer, self.sequence, ids)
        self.turns.append(TurnRecord(content, len(ids), ended))
        self.sampled(ids, logprobs, len(self.turns))
        return _answer(content)

    def follow(self, turn: Turn, *, goes_on: bool) -> None:
        """Take the environment's answer; where it ``goes_on``, its messages become tokens.

        Raises:
            DataError: the rewards add up beyond float32, or the template refuses the messages.
        """
        record = self.turns[-1]
        record.reward, record.parts = turn.score, turn.parts
        record.answer = [dict(message) for message in turn.messages]
        record.info, record.steps = dict(turn.info), list(turn.steps)
        steps = (reward for each in self.turns for _, reward in each.steps)
        check_total([*(each.reward for each in self.turns), *steps])
        if not goes_on:
            return
        before = self._messages
        record.answer = self._renderer.treated(record.answer, location="messages")
        self._messages = [*before, _answer(record.content), *record.answer]
        ended = self.ids[-1] if record.ended else None
        text, ids = self._renderer.following(
            before, record.content, record.answer, self._tools, ended=ended
        )
        joined = self._text + record.content + text
        other = self._renderer.rewritten(before, self._messages, self._tools, joined)
        if other is not None:
            self.starts.append(len(self.ids))
            joined, ids = other
        self._text = joined
        self.read(ids)


def _has_template(tokenizer: Tokenizer) -> bool:
    try:
        tokenizer.apply_chat_template([_QUESTION])
    except TokenizerError:
        return False
    except DataError:  # a template for other chats
        return True
    return True


def _check_answers(tokenizer: Tokenizer) -> None:
    """Refuse a template that changes the assistant's messages, last or before a question."""
    for chat in ([_QUESTION, _answer(_SHOWN)], [_QUESTION, _answer(_SHOWN), _QUESTION]):
        try:
            shown = render(tokenizer, chat, open_answer=False)
        except DataError:  # a template for other chats
            continue
        if _SHOWN not in shown:
            raise ConfigError(
                f"the model's chat template shows {shown!r:.200}, where the assistant said "
                f"{_SHOWN!r}: what the policy samples has no place in it; set "
                "environment.chat_template=FILE.jinja to a template that keeps it"
            )


def _answer(content: str) -> Message:
    return {"role": "assistant", "content": content}


def _squeezed(text: str) -> str:
    return "".join(text.split())
