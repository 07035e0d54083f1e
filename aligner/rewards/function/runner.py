"""Rewards from a function, which runs in child processes with a time limit.

batch ─► parts ─► a process for each part ─► scores, or a timeout ─► halves of the part, again
"""

import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor

from aligner.child_process import ProcessPool, Program
from aligner.config import RewardConfig
from aligner.data.tokenizers.decoding import response_texts
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import RewardError, RewardTimeoutError
from aligner.parallel.collectives import on_rank_zero
from aligner.rewards.function.execution import Scored
from aligner.rewards.protocol import Samples, Signature, parse_scores

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ScoredResponses:
    """Texts and scores of ``B`` responses."""

    responses: list[str]  # without the end-of-sequence token
    rewards: Tensor  # float32 [B], finite
    parts: dict[str, list[float]]  # additional metrics of the function, B finite values each
    timeouts: int = 0  # number of responses without a result within the time limit
    metrics: dict[str, float] = field(default_factory=dict)  # of the whole rollout


class RewardFunction(ProcessPool):
    """Calls a reward function in child processes, one for each part of a batch.

    After a timeout, the process and its children are killed, even if C code hangs.
    """

    def __init__(
        self,
        name: str,
        *,
        kwargs: Mapping[str, Any] | None = None,
        time_limit_s: float = 60.0,
        max_concurrency: int = 1,
        timeout_reward: float | None = None,
    ) -> None:
        """Start the first process, which imports the function.

        Args:
            name: path of the function (`aligner.importing.load_function`), which may be async.
            kwargs: keyword arguments of every call.
            time_limit_s: time limit of a batch in seconds.
            max_concurrency: number of processes, among which a batch is divided.
            timeout_reward: reward of a sample that is not scored in time. Its metrics are 0. If
                None, a timeout raises `RewardTimeoutError`.

        Raises `ConfigError` if the function cannot be imported, or its signature does not fit.
        """
        super().__init__(
            Program(
                "aligner.rewards.function.execution",
                (name, dict(kwargs or {})),
                f"reward function {name!r}",
                "raise reward.time_limit_s or make it faster",
                RewardError,
                RewardTimeoutError,
            )
        )
        parse = TypeAdapter(Signature).validate_python
        self.signature = self._processes[0].parse(parse, self.loaded)
        self._kwargs = frozenset(kwargs or {})
        self._time_limit_s, self._max_concurrency = time_limit_s, max_concurrency
        self._timeout_reward = timeout_reward

    @classmethod
    def load(cls, name: str, **options: Any) -> "RewardFunction":
        """Return ``RewardFunction(name, **options)``, the name of the constructor in 0.2.0."""
        return cls(name, **options)

    def __call__(
        self,
        prompts: Sequence[str],
        responses: Sequence[str],
        ground_truths: Sequence[Any],
        columns: Mapping[str, Sequence[Any]] | None = None,
    ) -> ScoredResponses:
        """Score ``B`` samples, which the arguments describe as in `aligner.rewards.protocol`.

        Raises:
            RewardError: the function raised an exception, returned a wrong number of values, or
                returned a value that is not a finite number.
            RewardTimeoutError: the function exceeded the time limit, and ``timeout_reward`` is
                None.
            DataError: the function requires a column that is missing.
        """
        lists = {name: list(values) for name, values in (columns or {}).items()}
        samples = Samples(list(prompts), list(responses), list(ground_truths), lists)
        self.signature.check_columns(samples.columns)
        if not len(samples):
            return ScoredResponses([], torch.zeros(0), {})
        # Score the batch, and report timeouts.
        answers = self._answers(samples)
        missing = [part for part, scored in answers if scored is None]
        if missing:
            log.warning(
                "reward function %r did not answer in time for %d of %d samples, the first %s. "
                "Their reward is reward.timeout_reward=%g",
                self.signature.name,
                sum(map(len, missing)),
                len(samples),
                missing[0].describe(0),
                self._timeout_reward,
            )
        return self._join(answers)

    def _join(self, answers: list[tuple[Samples, Scored | None]]) -> ScoredResponses:
        keys: Iterable[str] = next((scored[1] for _, scored in answers if scored is not None), {})
        # All parts must have the same metrics. A part that timed out gets zeros.
        responses, rewards, late = list[str](), list[float](), self._timeout_reward or 0.0
        metrics: dict[str, list[float]] = {key: [] for key in keys}
        for part, scored in answers:
            missing = [late] * len(part), {key: [0.0] * len(part) for key in metrics}
            part_rewards, part_metrics = scored or missing
            if part_metrics.keys() != metrics.keys():
                raise RewardError(
                    f"reward function {self.signature.name!r} returned the keys "
                    f"{sorted(part_metrics)} for some samples and {sorted(metrics)} for others. "
                    "Return the same keys for all samples"
                )
            responses += part.responses
            rewards += part_rewards
            for key, values in part_metrics.items():
                metrics[key] += values
        timeouts = sum(len(part) for part, scored in answers if scored is None)
        return ScoredResponses(
            responses, torch.tensor(rewards, dtype=torch.float32), metrics, timeouts
        )

    def _answers(self, samples: Samples) -> list[tuple[Samples, Scored | None]]:
        """Return the parts of a batch in order, each with its scores, or None after a timeout.

        A part that timed out is halved, down to single samples, and its halves are scored one after
        the other. All halves together have twice the time limit. The time limit of a half is four
        times the duration of the last half that succeeded, but at least one second.
        """
        answers: list[tuple[Samples, Scored | None]] = []
        pending_parts = _split(samples, self._max_concurrency)
        concurrency, part_limit_s, end = self._max_concurrency, self._time_limit_s, math.inf
        while pending_parts:
            # Score the next parts, or give up at the end of the time.
            start = time.monotonic()
            if start >= end:
                answers += [(part, None) for part in pending_parts]
                break
            parts, pending_parts = pending_parts[:concurrency], pending_parts[concurrency:]
            results = self._score(parts, min(part_limit_s, end - start))
            now = time.monotonic()
            # Store the scores, and halve the parts that timed out.
            for part, result in zip(parts, results, strict=True):
                if not isinstance(result, RewardTimeoutError):
                    answers.append((part, result))
                    if concurrency == 1:
                        part_limit_s = min(self._time_limit_s, max(1.0, 4 * (now - start)))
                elif self._timeout_reward is None:
                    raise result
                elif len(part) == 1:
                    answers.append((part, None))
                else:
                    pending_parts += _split(part, 2)
            if pending_parts:  # halves
                concurrency = 1
                end = min(end, now + 2 * self._time_limit_s)
        return sorted(answers, key=lambda answer: answer[0].offset)

    def _score(
        self, parts: list[Samples], time_limit_s: float
    ) -> list[Scored | RewardTimeoutError]:
        """Score the parts at the same time. The result for a part that times out is the error."""
        answers: list[Scored | RewardTimeoutError] = []
        try:
            # Send each part to a separate process. They have a common deadline.
            for error in self.start(range(len(parts))).values():
                raise error
            deadline = time.monotonic() + time_limit_s
            for slot, part in enumerate(parts):
                columns = self.signature.select(part.columns, self._kwargs)
                message = replace(part, columns=columns)
                self._processes[slot].ask(message, time_limit_s=time_limit_s)
            for slot, part in enumerate(parts):
                try:
                    answers.append(self._receive(slot, part, deadline, time_limit_s))
                except RewardTimeoutError as error:
                    answers.append(error)
        except BaseException:  # also an interrupt: the next batch must not read these answers
            self.close()
            raise
        return answers

    def _receive(self, slot: int, samples: Samples, deadline: float, time_limit_s: float) -> Scored:
        # The child checks the scores, too, but its messages are not trusted.
        process, name = self._processes[slot], self.signature.name
        kind, payload = process.receive(deadline, time_limit_s)
        if kind == "scores":
            return process.parse(partial(parse_scores, samples=samples, name=name), payload)
        culprit = None  # in the child's second message, unless the search takes too long
        with suppress(RewardError):
            culprit = process.receive(deadline, 0.0)[1]
        subject = "the batch as a whole, and no single sample was found to cause it"
        if culprit is not None and culprit in range(len(samples)):
            subject = samples.describe(culprit)
        raise RewardError(f"reward function {name!r} raised {payload} on {subject}")


class Reward:
    """Scores the responses of a rollout with a `RewardFunction`.

    Only rank 0 calls the function. The other ranks receive the result, so that side effects happen
    once and random results are equal.
    """

    def __init__(self, function: RewardFunction | None, tokenizer: Tokenizer) -> None:
        self._function = function
        self.tokenizer = tokenizer

    @classmethod
    def load(cls, config: RewardConfig, tokenizer: Tokenizer) -> "Reward":
        """Start the function on rank 0. An invalid function raises `ConfigError` on every rank."""
        reward = cls(None, tokenizer)

        def load() -> None:
            assert config.function is not None, "checked with the configuration"
            names = ("kwargs", "time_limit_s", "max_concurrency", "timeout_reward")
            options = {name: getattr(config, name) for name in names}
            reward._function = RewardFunction(config.function, **options)

        on_rank_zero(load)
        return reward

    def check_columns(self, available: frozenset[str]) -> None:
        """Raise `DataError` if the ``available`` columns of the data lack one that is needed."""
        columns = available | {"is_end", "response_lengths"}
        on_rank_zero(lambda: self._rank_zero_function().signature.check_columns(columns))

    def notes(self) -> list[str]:
        """Return a note for the start-up report if the function has another library's form."""

        def note() -> list[str]:
            function = self._rank_zero_function()
            name, form = function.signature.name, function.signature.form
            return (
                [f"reward.function={name} is called with the arguments of {form}"] if form else []
            )

        return on_rank_zero(note)

    def get_rewards(self, data: BatchedDataDict) -> ScoredResponses:
        """Decode and score every response of a rollout batch.

        Reads ``input_ids`` int64 [B, S], ``prompt_lengths`` and ``input_lengths`` int64 [B],
        ``is_end`` bool [B], and the lists ``prompts``, ``ground_truths`` and ``columns``. An entry
        of ``columns`` is a dict with the other columns of the row in the data.
        """

        def score() -> ScoredResponses:
            responses, rows = response_texts(self.tokenizer, data), data["columns"]
            names = dict.fromkeys(name for row in rows for name in row)
            columns = {name: [row.get(name) for row in rows] for name in names}
            lengths = data["input_lengths"] - data["prompt_lengths"]
            columns |= {"is_end": data["is_end"].tolist(), "response_lengths": lengths.tolist()}
            function, truths = self._rank_zero_function(), data["ground_truths"]
            return function(data["prompts"], responses, truths, columns)

        return on_rank_zero(score)

    def shutdown(self) -> bool:
        """End the function's processes. Returns True."""
        if self._function is not None:
            self._function.close()
        return True

    def _rank_zero_function(self) -> RewardFunction:
        assert self._function is not None, "rank 0 must hold the reward function"
        return self._function


def _split(samples: Samples, count: int) -> list[Samples]:
    count = min(count, len(samples))
    bounds = [len(samples) * part // count for part in range(count + 1)]
    return [samples.slice(*pair) for pair in pairwise(bounds)]
