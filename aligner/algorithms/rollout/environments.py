"""Rollouts of many turns: conversations of the policy with environments.

The tokens of a conversation depend only on the run's seed, its sample id and the environment's
messages, not on ranks or layouts. Concurrent conversations only affect the rounding of logits. No
conversation runs between steps, so a resumed run starts the conversations of its step anew.
"""

import logging
import traceback
from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import chain
from typing import Any, ClassVar, Literal, get_args

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from aligner.algorithms.rollout.driver import ConversationFailedError, Driver, Episode, Steps
from aligner.algorithms.rollout.rollout import ConversationsAhead, RolloutSource
from aligner.architecture import GPTArchitecture
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.data.batches import pad_right
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.calls import form_of
from aligner.environments.conversation import ChatRenderer, Conversation, RewrittenHistoryError
from aligner.environments.pool import Call, CallName, EnvironmentPool, Failure
from aligner.environments.trajectory import EndReason, KeptTokens, Limits, Trajectory
from aligner.errors import AlignerError, DataError, WorkerError
from aligner.generation.batching import ServingEngine
from aligner.generation.rows import Row
from aligner.http.queue import JobQueue
from aligner.importing import describe_exception
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.parallel.collectives import gather_objects, is_rank_zero, on_rank_zero
from aligner.rewards.function.runner import ScoredResponses
from aligner.types import PAD_VALUES

log = logging.getLogger(__name__)

END_REASONS: tuple[EndReason, ...] = get_args(EndReason)
# Errors of the request or the code, not of the engine: the next call would fail again.
_CALLER_ERRORS = (
    *(AttributeError, LookupError, NameError, TypeError, ValueError),
    *(AssertionError, NotImplementedError, AlignerError),
)
FAILURE_REASONS = ("env_timeout", "env_error", "engine_error")

# Engines derive random numbers from seed and sample id: each turn and attempt gets a separate id.
_TURN, _ATTEMPT = 1 << 40, 1 << 51
_QUEUE_ROWS = 4096  # at least 4 rows per conversation


class ConversationRollouts(RolloutSource):
    """Base of the kinds of environments: conversations in place of single responses."""

    gather_s: ClassVar[float]  # a batch waits at most this long for conversations without a row
    runs_agents: ClassVar[bool] = False

    def __init__(
        self,
        config: SamplingRunConfig,
        tokenizer: Tokenizer,
        architecture: GPTArchitecture,
        columns: Mapping[str, str | None],
        closing: ExitStack,
    ) -> None:
        """Start the first process of the environments on rank 0 (see `EnvironmentKind.open`)."""
        rollout = config.model.rollout
        self._run_config, self._config, self._tokenizer = config, config.environment, tokenizer
        self._options = SamplingOptions(rollout.length_params, rollout.sampling_params)
        queue_rows = max(_QUEUE_ROWS, 4 * self._config.concurrency)
        self._queue = JobQueue[Row](queue_rows, self.gather_s)
        self._pool: EnvironmentPool | None = None

        def start() -> None:
            self._pool = self._started_pool(columns)
            closing.callback(self._pool.close)

        on_rank_zero(start)
        self._prepare(architecture, closing)

    def _prepare(self, architecture: GPTArchitecture, closing: ExitStack) -> None:
        """Prepare state of a subclass, once on all ranks after the process has started."""

    def _started_pool(self, columns: Mapping[str, str | None]) -> EnvironmentPool:
        config = self._config
        factory = config.words or config.environment_class
        assert factory is not None, "checked with the configuration"
        return EnvironmentPool(
            factory,
            config.arguments,
            columns,
            form=form_of(self._tokenizer),
            memory_mb=config.memory_mb,
            runs_agents=self.runs_agents,
        )

    @abstractmethod
    def conduct(self, episode: Episode, seed: int, options: SamplingOptions | None) -> Steps:
        """Run one attempt of a conversation, as the generator `Steps`.

        ``options``: the ``sampling_options`` of `collect`.
        """

    def collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        *,
        seed: int,
        per_prompt: int = 1,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """Return a rollout batch (`aligner.types`) of conversations up to ``generation_logprobs``.

        The environments of ``per_prompt`` adjacent rows share a seed. The batch also contains
        ``turn_ids`` int64 [B, S], ``turn_rewards`` float32 [B, S], ``is_scored`` float32 [B], the
        lists ``responses``, ``turns``, ``reward_parts``, ``end_reasons``, ``forks`` and
        ``failures``, and if needed ``position_ids`` int64 [B, S] and ``kept_ids`` int32 [B, S, K].

        Raises:
            EnvironmentCallError: more conversations or engine calls failed than
                ``environment.retries``, or no conversation was scored.
            Exception: the engine's exception, if `engine_survives` returns False.
            RewrittenHistoryError: a template rewrites earlier messages, which the run forbids.
        """
        generation.prepare_for_generation()
        collect = partial(self._collect, generation, data, seed=seed, per_prompt=per_prompt)
        batch = collect(options=sampling_options)
        generation.finish_generation()
        return batch

    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """See `RolloutSource.begin`. The engine already contains the weights to sample with."""
        collect = partial(self._collect, generation, data, seed=seed, per_prompt=per_prompt)
        return ConversationsAhead(collect)

    def _collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        is_abandoned: Callable[[], bool] = lambda: False,
        *,
        seed: int,
        per_prompt: int,
        options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        # Rank 0: start the thread of conversations. All ranks: sample the rows that wait.
        config, pad_id = self._config, self._tokenizer.pad_id
        conduct = partial(self.conduct, seed=seed, options=options)
        driver = Driver(config, self._pool, self._queue, conduct)
        engine = ServingEngine(
            generation,
            self._queue,
            rows=config.concurrency,
            positions=config.max_tokens,
            pad_id=pad_id,
            end_ids=frozenset(self._tokenizer.end_ids),
            seed=seed,
            listens=False,
            has_peers=True,
            survives=partial(engine_survives, generation),
            is_complete=driver.is_complete,
        )
        # Serve requests until all conversations have ended.
        try:
            if is_rank_zero():
                driver.start(data, seed, per_prompt)
            engine.serve(lambda: is_abandoned() or driver.is_over)
        finally:
            driver.stop()
            self._queue.fail_all(ConnectionAbortedError("the rollout is over"))
        if is_abandoned():
            return data
        # Build the batch on rank 0 and send it to all ranks.
        forks, unscored = config.rewritten_history == "fork", config.unscored
        batch = partial(rollout_batch, pad_id=pad_id, with_positions=forks, unscored=unscored)
        return on_rank_zero(lambda: batch(data, driver.trajectories()))


class EnvironmentRollouts(ConversationRollouts):
    """Conversations with environments that are called after each message of the policy."""

    gather_s = 0.5

    def _prepare(self, architecture: GPTArchitecture, closing: ExitStack) -> None:
        self._renderer = ChatRenderer(
            self._tokenizer,
            add_bos=self._run_config.data.add_bos,
            rewritten_history=self._config.rewritten_history,
            special_tokens_in_text=self._run_config.data.special_tokens_in_text,
        )

    def conduct(self, episode: Episode, seed: int, options: SamplingOptions | None) -> Steps:
        """Alternate messages of the policy and environment calls."""
        del seed
        conversation, failure, is_alive = None, None, True
        try:
            start = yield self._call(episode, "begin", (episode.seed, episode.columns))
            conversation = Conversation(self._renderer, start)
            yield from self._turns(episode, conversation, options)
        except RewrittenHistoryError:
            raise
        except ConversationFailedError as error:
            failure = error.failure
            is_alive = failure.reason == "engine_error"
        except Exception as error:  # any exception of a tokenizer or a template
            assert self._pool is not None
            text = f"{self._pool.name}: {describe_exception(error)}"
            is_begun = conversation is not None and conversation.turns
            failure = Failure("env_error", text, error, "fault" if is_begun else "final")
        if is_alive:
            try:
                yield self._call(episode, "close")
            except ConversationFailedError as error:
                log.warning("after a conversation: %s", error.failure.text)
        return conversation, failure

    def _turns(
        self, episode: Episode, conversation: Conversation, options: SamplingOptions | None
    ) -> Generator[Call | Row, Any, None]:
        config, length = self._config, (options or self._options).length.max_length
        limits = Limits(config.max_turns, config.max_tokens)
        if limits.exceeded(1, len(conversation.ids) + length):
            raise DataError(
                f"environment.max_tokens={config.max_tokens}: the first messages of a conversation "
                f"({conversation.prompt[:60]!r} …) contain {len(conversation.ids)} tokens, and a "
                f"response may add {length}. Raise max_tokens, or lower "
                "length_params.max_length"
            )
        # Each message of the policy is a sample with a separate id.
        first_id = episode.sample_id + episode.attempt * _ATTEMPT
        end_reason: EndReason | None = None
        while end_reason is None:
            sample_id = first_id + len(conversation.turns) * _TURN
            response = yield Row(conversation.sequence, sample_id, options)
            if response.kept_ids is not None:
                kept_tokens = KeptTokens(len(conversation.ids), response.kept_ids)
                conversation.kept_tokens.append(kept_tokens)
            is_end = response.end == "stop"
            message = conversation.answered(response.ids, response.logprobs, is_end)
            turn = yield self._call(episode, "step", message)
            # The messages are appended, and count as tokens, only if another turn may follow.
            turns = len(conversation.turns) + 1
            end_reason = "done" if turn.done else limits.exceeded(turns, 0)
            conversation.follow(turn, goes_on=end_reason is None)
            end_reason = end_reason or limits.exceeded(turns, len(conversation.ids) + length)
        conversation.end_reason = end_reason

    def _call(self, episode: Episode, name: CallName, argument: Any = None) -> Call:
        return Call(episode.slot, name, argument, self._config.timeout_s)


class EnvironmentReward:
    """Rewards that environments returned during the rollout (`RewardInterface`)."""

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Return the sum of each conversation's rewards, and the sums of its parts (`total_parts`).

        Reads ``turn_rewards`` float32 [B, S], ``turn_ids`` int64 [B, S] and the lists of
        `ConversationRollouts.collect`. A missing part or reward counts as 0.
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


def engine_survives(generation: GenerationInterface, error: Exception) -> bool:
    """Return on all ranks whether conversations may restart after ``generate`` raised ``error``.

    False if the error on any rank comes from the request instead of the engine, or if the engine
    cannot generate again. Otherwise memory of the failed call, such as a cache, is released.
    """
    of_engine = isinstance(error, WorkerError) or not isinstance(error, _CALLER_ERRORS)
    if not (generation.recover() and all(gather_objects(of_engine))):
        return False
    cause: BaseException | None = error
    while cause is not None:
        traceback.clear_frames(cause.__traceback__)
        cause = cause.__cause__ or cause.__context__
    return True


def rollout_batch(
    data: BatchedDataDict,
    rows: Sequence[Trajectory],
    pad_id: int,
    *,
    with_positions: bool,
    unscored: Literal["zero", "mask"] = "zero",
) -> BatchedDataDict:
    """Return a rollout batch (`aligner.types`) of conversations, up to ``generation_logprobs``.

    ``data``: a `prompts_batch` with the rows of ``rows``. ``with_positions``: whether rows may
    contain several sequences, and the batch ``position_ids`` int64 [B, S], which restart at each
    sequence. ``unscored``: see `EnvironmentConfig`. A conversation that its environment ended
    without a reward does not count in any case.
    """
    # Unscored conversations that ended for these reasons count with reward 0.
    counted = {"failed"} if unscored == "mask" else {"failed", "max_turns", "max_tokens"}
    counts = [float(row.is_scored or row.end_reason in counted) for row in rows]
    # Columns per token, padded to the longest row.
    ids, lengths = pad_right([row.ids[: row.length] for row in rows], pad_id)
    turn_ids = _padded([row.turn_ids[: row.length] for row in rows], torch.int64)
    logprobs = _padded([row.logprobs[: row.length] for row in rows], torch.float32)
    optional: dict[str, Tensor] = {}
    if with_positions:
        optional["position_ids"] = _padded([row.positions for row in rows], torch.int64)
    if any(row.kept_tokens for row in rows):
        optional["kept_ids"] = _kept_ids([row.kept_tokens for row in rows], ids.shape[1])
    return BatchedDataDict(
        {
            "input_ids": ids,
            "input_lengths": lengths,
            **optional,
            "prompt_lengths": torch.tensor([row.prompt_length for row in rows]),
            "sample_ids": data["sample_ids"],
            "is_end": torch.tensor([row.end_reason == "done" for row in rows]),
            "token_mask": (turn_ids > 0).float(),
            "sample_mask": torch.tensor(counts),
            "generation_logprobs": logprobs,
            "turn_ids": turn_ids,
            "turn_rewards": _padded([row.rewards for row in rows], torch.float32),
            "is_scored": torch.tensor([float(row.is_scored) for row in rows]),
            "prompts": [row.prompt for row in rows],
            "responses": [row.text for row in rows],
            "turns": [[vars(turn).copy() for turn in row.turns] for row in rows],
            "reward_parts": [row.parts for row in rows],
            "end_reasons": [row.end_reason for row in rows],
            "forks": [row.forks for row in rows],
            "failures": [row.failures for row in rows],
            "ground_truths": data["ground_truths"],
            "columns": data["columns"],
        }
    )


def _kept_ids(rows: Sequence[Sequence[KeptTokens]], width: int) -> Tensor:
    """Return int32 [B, width, K], -1 except at sampled tokens."""
    size = next(kept.ids.shape[1] for row in rows for kept in row)
    result = torch.full((len(rows), width, size), PAD_VALUES["kept_ids"], dtype=torch.int32)
    for index, row in enumerate(rows):
        for start, ids in row:
            result[index, start : start + len(ids)] = ids
    return result


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return the rows as [B, S] of ``dtype``, right-padded with 0."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
