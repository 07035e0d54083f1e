"""Rollouts of many turns: conversations of the policy with environments.

The random numbers of a conversation depend only on the run's seed and the sample id, not on ranks
or layouts. Concurrent conversations only affect the rounding of logits. No conversation runs
between steps, so a resumed run starts the conversations of its step from the beginning.
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
# Errors that the request or the code causes, not the engine: the next call would fail again.
_CALLER_ERRORS = (
    *(AttributeError, LookupError, NameError, TypeError, ValueError),
    *(AssertionError, NotImplementedError, AlignerError),
)
FAILURE_REASONS = ("env_timeout", "env_error", "engine_error")

# Increments of the sample id for each turn and attempt. Engines derive random numbers from the id.
_TURN, _ATTEMPT = 1 << 40, 1 << 51
_QUEUE_ROWS = 4096  # at least 4 rows per conversation


class ConversationRollouts(RolloutSource):
    """Base class of rollout sources that produce conversations."""

    gather_s: ClassVar[float]  # maximum seconds that a batch waits for slow conversations
    runs_agents: ClassVar[bool] = False

    def __init__(
        self,
        config: SamplingRunConfig,
        tokenizer: Tokenizer,
        architecture: GPTArchitecture,
        columns: Mapping[str, str | None],
        closing: ExitStack,
    ) -> None:
        """Start one environment process on rank 0. Arguments: see `EnvironmentKind.open`."""
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
        """Initialize a subclass, on all ranks, after the environment process has started."""

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

        ``options``: sampling settings, or None for the settings of training.
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
        """Run conversations for the rows of ``data``, and return them as a rollout batch.

        The batch contains the columns of `aligner.types` except rewards and values. It also
        contains ``turn_ids`` int64 [B, S], ``turn_rewards`` float32 [B, S], ``is_scored`` float32
        [B], the lists ``responses``, ``turns``, ``reward_parts``, ``end_reasons``, ``forks`` and
        ``failures``, and optionally ``position_ids`` int64 [B, S] and ``kept_ids`` int32 [B, S, K].
        The environments of ``per_prompt`` adjacent rows have the same seed.

        Raises:
            EnvironmentCallError: more than ``environment.retries`` conversations or engine calls
                failed, or no conversation was scored.
            Exception: the engine's exception, if the engine cannot continue.
            RewrittenHistoryError: the chat template changed earlier messages, and
                ``environment.rewritten_history`` does not allow it.
        """
        generation.prepare_for_generation()
        collect = partial(self._collect, generation, data, seed=seed, per_prompt=per_prompt)
        batch = collect(options=sampling_options)
        generation.finish_generation()
        return batch

    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """Start `collect` in a thread. The engine must already have the weights to sample with."""
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
        """Run conversations as `collect` does. ``is_abandoned``: whether to end them early."""
        # The driver conducts the conversations on rank 0. The engine samples on all ranks.
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
        # Sample queued rows until all conversations have ended.
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
    """Conversations in which the policy's messages and an environment's messages alternate."""

    gather_s = 0.5

    def _prepare(self, architecture: GPTArchitecture, closing: ExitStack) -> None:
        self._renderer = ChatRenderer(
            self._tokenizer,
            add_bos=self._run_config.data.add_bos,
            rewritten_history=self._config.rewritten_history,
            special_tokens_in_text=self._run_config.data.special_tokens_in_text,
        )

    def conduct(self, episode: Episode, seed: int, options: SamplingOptions | None) -> Steps:
        """Begin the environment, then alternate messages of the policy and environment steps."""
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
        """Run the turns of a conversation until the environment or a limit ends it."""
        config, length = self._config, (options or self._options).length.max_length
        limits = Limits(config.max_turns, config.max_tokens)
        if limits.exceeded(1, len(conversation.ids) + length):
            raise DataError(
                f"environment.max_tokens={config.max_tokens} is too small: the first messages of a "
                f"conversation ({conversation.prompt[:60]!r} …) contain {len(conversation.ids)} "
                f"tokens, and a response may add {length}. Raise environment.max_tokens, or lower "
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
            # Append the environment's messages only if another turn may follow.
            turns = len(conversation.turns) + 1
            end_reason = "done" if turn.done else limits.exceeded(turns, 0)
            conversation.follow(turn, goes_on=end_reason is None)
            end_reason = end_reason or limits.exceeded(turns, len(conversation.ids) + length)
        conversation.end_reason = end_reason

    def _call(self, episode: Episode, name: CallName, argument: Any = None) -> Call:
        return Call(episode.slot, name, argument, self._config.timeout_s)


class EnvironmentReward:
    """Reward (`RewardInterface`) that the environments returned during the rollout."""

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Return the sum of each conversation's turn rewards, and the sum of each reward part.

        Reads ``turn_rewards`` float32 [B, S], ``turn_ids`` int64 [B, S] and the lists of
        `ConversationRollouts.collect`. Missing rewards and parts count as 0.
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
    """Return whether conversations may be repeated after ``generate`` raised ``error``.

    All ranks must call this function and get the same result: False if the request or the code
    caused the error, or if the engine cannot generate again. Otherwise memory of the failed call,
    such as a KV cache, is released.
    """
    is_engine_error = isinstance(error, WorkerError) or not isinstance(error, _CALLER_ERRORS)
    if not (generation.recover() and all(gather_objects(is_engine_error))):
        return False
    # Tracebacks keep the tensors of the failed call in memory.
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
    """Convert trajectories to a rollout batch, see `ConversationRollouts.collect`.

    ``data``: the `prompts_batch` from which ``rows`` were sampled. ``with_positions``: whether a
    row may contain several sequences. The batch then contains ``position_ids``, int64 [B, S], which
    restart at each sequence. ``unscored``: whether conversations that reached a limit without a
    reward get reward 0 (``zero``) or are excluded from training (``mask``). Conversations that the
    environment ended without a reward are always excluded.
    """
    # End reasons with which a conversation without a reward is trained on, with reward 0.
    earning_zero = {"failed"} if unscored == "mask" else {"failed", "max_turns", "max_tokens"}
    sample_mask = [float(row.is_scored or row.end_reason in earning_zero) for row in rows]
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
            "sample_mask": torch.tensor(sample_mask),
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
    """Return the ids that top-k and top-p kept: int32 [B, width, K], -1 if none are recorded."""
    size = next(kept.ids.shape[1] for row in rows for kept in row)
    result = torch.full((len(rows), width, size), PAD_VALUES["kept_ids"], dtype=torch.int32)
    for index, row in enumerate(rows):
        for start, ids in row:
            result[index, start : start + len(ids)] = ids
    return result


def _padded(rows: Sequence[Sequence[float]], dtype: torch.dtype) -> Tensor:
    """Return ``rows`` as a tensor [B, S] of ``dtype``, padded with 0 on the right."""
    return pad_sequence([torch.tensor(row, dtype=dtype) for row in rows], batch_first=True)
