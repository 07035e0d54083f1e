"""Rollouts of agents: programs that ask the policy over HTTP, and say what that was worth.

rank 0, threads:   agents' processes ─► HTTP server ─► requests that wait
all ranks:         sessions, then rows ◄─ batches of the engine ◄─┘

The tokens of a trajectory depend on the run's seed, its sample id and what its agent asks only.
"""

import dataclasses
import logging
from collections.abc import Collection
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

from aligner.algorithms.rollout.agents import Agents
from aligner.algorithms.rollout.rollout import RolloutSource
from aligner.algorithms.rollout.trajectories import engine_survives, rollout_batch
from aligner.architecture import GPTArchitecture
from aligner.config import SamplingOptions, SamplingRunConfig
from aligner.config.fields import MOST_SECONDS
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.environments.pool import EnvironmentPool
from aligner.errors import ConfigError
from aligner.http.queue import JobQueue
from aligner.http.tokens import new_token
from aligner.models.interfaces import BackgroundGeneration, GenerationInterface, PendingGeneration
from aligner.parallel.collectives import is_rank_zero, on_rank_zero
from aligner.serving.app import Service, policy_server
from aligner.serving.engine import EngineSettings, ServingEngine
from aligner.serving.queue import Row
from aligner.serving.served import Request, Served

log = logging.getLogger(__name__)

_NAME = "policy"  # of the model
_HOST = "127.0.0.1"
_GATHER_S = 0.02  # agents whose answers came together ask again at about the same time
_MOST_WAITING = 4096  # answers, and as many connections; 4 for each agent where these are more
# What a request may say of sampling; the run has said it.
_OF_THE_RUN = ("temperature", "top_p", "top_k", "repetition_penalty", "min_tokens", "seed")


@dataclass(frozen=True)
class PolicyServed(Served):
    """The policy of a run: it is sampled as the run says, whatever a request wants.

    ``max_tokens``, up to the run's length of a response, and ``stop`` are the request's.
    """

    _said: set[str] = field(default_factory=set)

    def is_called(self, name: str) -> bool:
        """Any name will do: agents have their own for the model."""
        del name
        return True

    def taken(self, request: Request) -> Request:
        """The request without what the run says; what is left out is logged once."""
        own = {name for name in _OF_THE_RUN if getattr(request, name) is not None}
        if own - self._said:
            log.warning(
                "an agent's requests have %s; the run's own sampling is used",
                ", ".join(sorted(own)),
            )
            self._said.update(own)
        most = self.defaults.length.max_length
        changes: dict[str, Any] = dict.fromkeys(_OF_THE_RUN)
        changes["max_tokens"] = min(request.longest or most, most)
        if hasattr(request, "max_completion_tokens"):
            changes["max_completion_tokens"] = None
        return cast(Request, request.model_copy(update=changes))


class EndpointRollouts(RolloutSource):
    """Agents' trajectories in place of single responses.

    Made on all ranks. Rank 0 has the agents' processes and the server, on loopback with keys that
    are the agents' own, until ``closing`` closes.
    """

    def __init__(
        self,
        config: SamplingRunConfig,
        tokenizer: Tokenizer,
        architecture: GPTArchitecture,
        columns: Collection[str],
        closing: ExitStack,
    ) -> None:
        """Start the server and the first agent's process.

        Raises:
            ConfigError: there is no such function or program, or it cannot be called with the
                data's ``columns``.
        """
        self._config, self._tokenizer = config.environment, tokenizer
        rollout = config.model.rollout
        self._options = SamplingOptions(rollout.length_params, rollout.sampling_params)
        most = max(_MOST_WAITING, 4 * self._config.concurrency)
        self._waiting = JobQueue[Row](most, _GATHER_S)
        served = PolicyServed(
            _NAME,
            tokenizer,
            self._config.max_tokens,
            architecture.vocab_size,
            self._options,
            add_bos=config.data.add_bos,
            special_tokens_in_text=config.data.special_tokens_in_text,
        )
        self._service = Service(served, self._waiting, MOST_SECONDS, new_token(None))
        self._pool: EnvironmentPool | None = None
        self._base_url = ""

        def start() -> None:
            self._pool = self._started(columns)
            closing.callback(self._pool.close)
            try:
                place = closing.enter_context(policy_server((_HOST, 0), self._service))
            except OSError as error:
                raise ConfigError(
                    f"environment.kind=endpoint: cannot listen on {_HOST}: {error}"
                ) from error
            self._base_url = f"http://{place[0]}:{place[1]}/v1"

        on_rank_zero(start)

    def collect(
        self,
        generation: GenerationInterface,
        data: BatchedDataDict,
        *,
        seed: int,
        per_prompt: int = 1,
        sampling_options: SamplingOptions | None = None,
    ) -> BatchedDataDict:
        """A rollout batch of trajectories; see `EnvironmentRollouts.collect`.

        Raises:
            EnvironmentCallError: more agents, or calls of the engine, failed than
                ``environment.retries``, or none was scored.
            Exception: what the engine raised, where `engine_survives` says no.
        """
        defaults = sampling_options or self._options
        self._service.served = dataclasses.replace(self._service.served, defaults=defaults)
        survives = partial(engine_survives, generation)
        engine = ServingEngine(generation, self._waiting, self._settings(seed), survives)
        here = None
        if is_rank_zero():
            assert self._pool is not None, "rank 0 must hold the agents"
            sessions, config = self._service.sessions, self._config
            wake, url = self._waiting.wake, self._base_url
            here = Agents(config, self._pool, sessions, url, self._tokenizer, wake)
        generation.prepare_for_generation()
        if here is not None:
            here.start(data, seed, per_prompt)
        try:
            engine.serve(lambda: here is not None and here.are_over)
        finally:
            if here is not None:
                here.stop()
            self._waiting.fail_all(ConnectionAbortedError("the rollout is over"))
        generation.finish_generation()

        def rows() -> Any:
            assert here is not None
            return here.rows()

        found = on_rank_zero(rows)
        pad_id, unscored = self._tokenizer.pad_id, self._config.unscored
        return rollout_batch(data, found, pad_id, with_positions=True, unscored=unscored)

    def begin(
        self, generation: BackgroundGeneration, data: BatchedDataDict, *, seed: int, per_prompt: int
    ) -> PendingGeneration:
        """Nothing: the configuration refuses it."""
        raise NotImplementedError

    def _started(self, columns: Collection[str]) -> EnvironmentPool:
        config = self._config
        source = config.words or config.factory
        assert source is not None, "checked with the configuration"
        return EnvironmentPool(
            source, config.kwargs, columns, memory_mb=config.memory_mb, runs_agents=True
        )

    def _settings(self, seed: int) -> EngineSettings:
        return EngineSettings(
            rows=self._config.concurrency,
            positions=self._config.max_tokens,
            pad_id=self._tokenizer.pad_id,
            end_ids=frozenset(self._tokenizer.end_ids),
            seed=seed,
            listens=False,
            has_peers=True,
        )
