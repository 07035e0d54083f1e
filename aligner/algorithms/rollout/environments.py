"""Rollouts of many turns: conversations of the policy with environments.

Every round, the engine continues all conversations under way, and their environments answer. The
tokens of a conversation depend on the run's seed, its sample id and what its environment says only:
not on which others are under way, on ranks or on layouts. Nothing is under way between steps, so a
run that is resumed begins a step's conversations again, from their seeds.
"""

import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, TypeVar

import torch

from aligner.algorithms.rollout.ahead import ConversationsAhead
from aligner.algorithms.rollout.rollout import RolloutSource
from aligner.algorithms.rollout.trajectories import (
    END_REASONS,
    EndReason,
    Failures,
    KeptTokens,
    Trajectory,
    attempt,
    check_scored,
    engine_survives,
    environment_seed,
    rollout_batch,
    total_parts,
    transcript,
)
from aligner.config import EnvironmentConfig, SamplingOptions
from aligner.config.fields import SpecialTokensInText
from aligner.data.prompts import pad_right
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.conversation import ChatRenderer, Conversation, RewrittenHistoryError
from aligner.environments.pool import Answer, Call, EnvironmentPool, Failure, engine_failure
from aligner.environments.protocol import Turn
from aligner.errors import DataError
from aligner.importing import describe_exception
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.parallel.collectives import is_rank_zero, on_rank_zero
from aligner.rewards.interface import ScoredResponses

log = logging.getLogger(__name__)

T = TypeVar("T")
FAILURE_REASONS = ("env_timeout", "env_error", "engine_error")

# Engines make random numbers of seed and sample id: turns and attempts have ids of their own.
_TURN, _ATTEMPT = 1 << 40, 1 << 51


class EnvironmentRollouts(RolloutSource):
    """Conversations in place of single responses.

    Args:
        config: ``environment`` of the run.
        pool: the environments' processes; needed on rank 0 only.
        tokenizer: the policy's.
        response_length: most tokens of one message of the policy.
        add_bos: begin with BOS unless the text does.
        special_tokens_in_text: treatment of those that the environments' messages spell.
    """

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool | None,
        tokenizer: Tokenizer,
        *,
        response_length: int,
        add_bos: bool = False,
        special_tokens_in_text: SpecialTokensInText = "keep",
    ) -> None:
        self._config, self._pool, self._tokenizer = config, pool, tokenizer
        self._response_length = response_length
        self._renderer = ChatRenderer(
            tokenizer,
            add_bos=add_bos,
            rewritten_history=config.rewritten_history,
            special_tokens_in_text=special_tokens_in_text,
        )

    def collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        *,
        seed: int,
        per_prompt: int = 1,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """A rollout batch (`aligner.types`) of conversations, up to ``generation_logprobs``.

        ``data``: of `aligner.algorithms.rollout.rollout.prompts_batch`, whose sample ids and
        columns are used; ``per_prompt`` adjacent rows have environments with one seed. Besides the
        columns of a single-turn rollout it has ``turn_ids`` int64 [B, S], ``turn_rewards`` float32
        [B, S] and ``is_scored`` float32 [B], where conversations may fork ``position_ids`` int64
        [B, S], where the engine records them ``kept_ids`` int32 [B, S, K], and the lists
        ``responses``, ``turns``, ``reward_parts``, ``end_reasons``, ``forks`` and ``failures``.

        Raises:
            EnvironmentCallError: more conversations, or calls of the engine, failed than
                ``environment.retries``, or none was scored. Messages that cannot be rendered, or
                leave no room for an answer, are failures.
            Exception: what the engine raised, where `engine_survives` says no.
            RewrittenHistoryError: a template rewrites what was said, which is to be refused.
        """
        options: dict[str, Any] = {}
        length = self._response_length
        if sampling_options is not None:
            options["sampling_options"] = sampling_options
            length = sampling_options.length.max_length
        here = None
        if is_rank_zero():
            assert self._pool is not None, "rank 0 must hold the environments"
            here = _Conversations(self._config, self._pool, self._renderer, length)
            here.add(data, seed, per_prompt)
        generation.prepare_for_generation()
        while (asked := _of(here, _Conversations.prompts)) is not None:
            rows, sample_ids = asked
            if not rows:  # all that began have failed
                continue
            ids, lengths = pad_right(rows, self._tokenizer.pad_id)
            columns = {"input_ids": ids, "input_lengths": lengths}
            columns["sample_ids"] = torch.tensor(sample_ids)
            heard: Callable[[_Conversations], None]
            try:
                output = generation.generate(BatchedDataDict(columns), seed=seed, **options)
                heard = partial(_Conversations.answered, output=output.to("cpu"))
            except Exception as error:
                if not engine_survives(generation, error):
                    raise
                heard = partial(_Conversations.unanswered, failure=engine_failure(error))
            _of(here, heard)
        generation.finish_generation()
        return rollout_batch(
            data,
            _of(here, _Conversations.rows),
            self._tokenizer.pad_id,
            with_positions=self._config.rewritten_history == "fork",
            unscored=self._config.unscored,
        )

    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """See `RolloutSource.begin`."""
        return ConversationsAhead(
            partial(self.collect, data=data, seed=seed, per_prompt=per_prompt), generation
        )


class EnvironmentReward:
    """Rewards that environments gave while a rollout was sampled (`RewardInterface`)."""

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Sum of each conversation's rewards, and its further numbers (`total_parts`).

        Reads ``turn_rewards`` float32 [B, S], ``turn_ids`` int64 [B, S] and the lists of
        `EnvironmentRollouts.collect`. A conversation that lacks a number that others have counts 0
        for it; the reward of one without any is 0.
        """
        parts = data["reward_parts"]
        names = dict.fromkeys(name for row in parts for name in row)
        ends, failed = Counter(data["end_reasons"]), Counter(chain(*data["failures"]))
        rows = max(1, data.size)
        return ScoredResponses(
            data["responses"],
            data["turn_rewards"].double().sum(1).float(),
            {name: [row.get(name, 0.0) for row in parts] for name in names},
            metrics={
                "turns": data["turn_ids"].amax(1).float().mean().item(),
                **{f"ended_{reason}": ends[reason] / rows for reason in END_REASONS},
                **{f"failed_{reason}": failed[reason] for reason in FAILURE_REASONS},
                "forks": sum(data["forks"]),
                "unscored_samples": int((data["is_scored"] == 0).sum()),
            },
        )


@dataclass
class _Waiting:
    """A row of the rollout, until its conversation has ended."""

    row: int
    sample_id: int
    environment_seed: int
    columns: dict[str, Any]
    failures: list[str] = field(default_factory=list)
    slot: int = -1
    seconds: float = 0.0  # of the environment's calls
    conversation: Conversation | None = None
    kept: list[KeptTokens] = field(default_factory=list)

    @property
    def talk(self) -> Conversation:
        """The conversation, which must be under way."""
        assert self.conversation is not None
        return self.conversation

    @property
    def engine_id(self) -> int:
        """Sample id by which the engine makes random numbers for the next turn."""
        return self.sample_id + len(self.talk.turns) * _TURN + attempt(self.failures) * _ATTEMPT


class _Conversations:
    """Rank 0's half of a rollout: who is under way, and what was said."""

    def __init__(
        self,
        config: EnvironmentConfig,
        pool: EnvironmentPool,
        renderer: ChatRenderer,
        response_length: int,
    ) -> None:
        self._config, self._pool, self._renderer = config, pool, renderer
        self._response_length = response_length
        self._waiting: deque[_Waiting] = deque()
        self._active: list[_Waiting] = []
        self._free = list(range(config.concurrency))
        self._ended: dict[int, Trajectory] = {}
        self._failures = Failures(config)

    def add(self, data: BatchedDataDict, seed: int, per_prompt: int) -> None:
        """Have a conversation for every row of ``data``."""
        for row, sample_id in enumerate(data["sample_ids"].tolist()):
            seeded = environment_seed(seed, sample_id, per_prompt)
            self._waiting.append(_Waiting(row, sample_id, seeded, data["columns"][row]))

    def prompts(self) -> tuple[list[list[int]], list[int]] | None:
        """Tokens and sample ids of what the engine is to continue; None: all have ended.

        Others wait for rank 0 meanwhile: those that failed to begin are left to the next call.
        """
        if not (self._waiting or self._active):
            return None
        self._begin()
        return [one.talk.sequence for one in self._active], [one.engine_id for one in self._active]

    def answered(self, output: BatchedDataDict) -> None:
        """Take the responses to `prompts`, in the same order, and ask the environments."""
        calls = []
        for index, one in enumerate(self._active):
            begin = len(one.talk.sequence)
            end = int(output["unpadded_sequence_lengths"][index])
            if "kept_ids" in output:  # a copy: a view is sent with all that it is a part of
                kept = output["kept_ids"][index, begin:end].clone()
                one.kept.append(KeptTokens(len(one.talk.ids), kept))
            message = one.talk.answered(
                output["output_ids"][index, begin:end].tolist(),
                output["logprobs"][index, begin:end].tolist(),
                bool(output["is_end"][index]),
            )
            calls.append(Call(one.slot, "step", message, self._limit(one)))
        under_way, self._active, closing = self._active, [], []
        for one, answer in zip(under_way, self._pool.call(calls), strict=True):
            turn = self._value_of(one, answer)
            if turn is None:
                continue
            reason = self._end_reason(one, turn)
            if reason is None:
                self._active.append(one)
                continue
            closing.append(one)
            if isinstance(reason, Failure):
                self._fail(one, reason)
            else:
                self._ended[one.row] = _trajectory(one, reason)
        self._close(closing)

    def unanswered(self, failure: Failure) -> None:
        """Take the engine's failure in place of responses: none of `prompts` becomes a sample."""
        under_way, self._active = self._active, []
        self._close(under_way)
        for one in under_way:
            self._fail(one, failure)

    def rows(self) -> list[Trajectory]:
        """The conversations in the order of their rows.

        Raises:
            EnvironmentCallError: none was scored.
        """
        found = [self._ended[row] for row in sorted(self._ended)]
        check_scored(found, self._pool.factory)
        return found

    def _begin(self) -> None:
        """Begin as many as there are free slots."""
        starting = []
        while self._waiting and self._free:
            one = self._waiting.popleft()
            one.slot, one.seconds = self._free.pop(0), 0.0
            starting.append(one)
        calls = [
            Call(one.slot, "begin", (one.environment_seed, one.columns), self._limit(one))
            for one in starting
        ]
        for one, answer in zip(starting, self._pool.call(calls), strict=True):
            start = self._value_of(one, answer)
            if start is None:
                continue
            try:
                one.conversation, one.kept = Conversation(self._renderer, start), []
                self._check_room(one.talk)
                self._active.append(one)
            except Exception as error:  # whatever a tokenizer or a template raises
                self._close([one])
                self._fail(one, self._unusable(error))

    def _value_of(self, one: _Waiting, answer: Answer | Failure) -> Any:
        """Return value of a call; None: it failed."""
        if isinstance(answer, Answer):
            one.seconds += answer.seconds
            return answer.value
        self._free.append(one.slot)
        self._fail(one, answer)
        return None

    def _unusable(self, error: Exception) -> Failure:
        """Failure of an environment whose messages or rewards cannot be used."""
        text = f"environment {self._pool.factory!r}: {describe_exception(error)}"
        return Failure("env_error", text, error)

    def _fail(self, one: _Waiting, failure: Failure) -> None:
        """Take the end of a conversation as a sample of reward 0, or begin it again."""
        turns = [] if one.conversation is None else one.talk.turns
        one.failures.append(failure.reason)
        if not self._failures.add(failure, len(turns)):
            one.conversation = None
            self._waiting.append(one)
            return
        for turn in turns:
            turn.reward, turn.parts, turn.steps = None, {}, []
        turns[-1].info = {"failure": failure.text}
        self._ended[one.row] = _trajectory(one, "failed")

    def _end_reason(self, one: _Waiting, turn: Turn) -> EndReason | Failure | None:
        """Take the environment's answer; why the conversation ends, None: it goes on."""
        last = len(one.talk.turns) >= self._config.max_turns
        try:
            one.talk.follow(turn, goes_on=not (turn.done or last))
        except RewrittenHistoryError:
            raise
        except Exception as error:  # whatever a tokenizer or a template raises
            return self._unusable(error)
        if turn.done:
            return "done"
        if last:
            return "max_turns"
        return None if self._has_room(one.talk) else "max_tokens"

    def _close(self, ended: Sequence[_Waiting]) -> None:
        calls = [Call(one.slot, "close", None, self._config.timeout_s) for one in ended]
        for one, answer in zip(ended, self._pool.call(calls), strict=True):
            if isinstance(answer, Failure):
                log.warning("after a conversation: %s", answer.text)
            self._free.append(one.slot)

    def _limit(self, one: _Waiting) -> float:
        left = self._config.total_timeout_s - one.seconds
        return min(self._config.timeout_s, max(0.0, left))

    def _has_room(self, talk: Conversation) -> bool:
        return len(talk.ids) + self._response_length <= self._config.max_tokens

    def _check_room(self, talk: Conversation) -> None:
        if not self._has_room(talk):
            raise DataError(
                f"environment.max_tokens={self._config.max_tokens}: the first messages of a "
                f"conversation have {len(talk.ids)} tokens, and a response may have "
                f"{self._response_length} more; raise it, or lower length_params.max_length (the "
                f"messages begin {talk.prompt[:60]!r})"
            )


def _of(here: _Conversations | None, action: Callable[[_Conversations], T]) -> T:
    """Result of ``action`` on rank 0's conversations, on every rank."""

    def act() -> T:
        assert here is not None
        return action(here)

    return on_rank_zero(act)


def _trajectory(one: _Waiting, reason: EndReason) -> Trajectory:
    talk = one.talk
    length = talk.length
    return Trajectory(
        prompt=talk.prompt,
        prompt_length=talk.prompt_length,
        ids=talk.ids[:length],
        turn_ids=talk.turn_ids[:length],
        positions=talk.positions,
        logprobs=talk.logprobs[:length],
        rewards=talk.rewards,
        is_scored=any(turn.reward is not None or turn.steps for turn in talk.turns),
        parts=total_parts(talk.turns),
        end_reason=reason,
        forks=talk.forks,
        text=transcript(talk.turns),
        turns=[vars(turn).copy() for turn in talk.turns],
        failures=one.failures,
        kept=one.kept,
    )
