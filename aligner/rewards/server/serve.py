"""HTTP server of a reward model, which scores samples of several requests in one batch.

request ─► event loop ── Job ──► JobQueue ──► main thread of rank 0 ── batch ──► all ranks
               ▲                                      │                             │
               └───────────── Results ◄───────────────┘ ◄───────── scores ──────────┘
"""

import asyncio
import json
import signal
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Literal

from fastapi import Request, Response
from fastapi.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException

from aligner.checkpoint.model_source import open_model
from aligner.config import ParallelConfig, TrainedModelConfig
from aligner.distributed.workers import LocalCluster
from aligner.http import JSON_TYPE
from aligner.http.application import Bodies, Routes, blame_sender, check_bearer, http_server
from aligner.http.messages import parse_json, validated
from aligner.http.queue import Job, JobQueue, Slot
from aligner.http.results import Results
from aligner.models.gpt.role.reward import rated_attributes
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.reward.reward_model import RewardModel
from aligner.parallel.collectives import from_rank_zero, is_rank_zero, on_rank_zero
from aligner.parallel.groups import ParallelState, initialize_parallel, shutdown_parallel
from aligner.rewards.sequences import SequenceEncoder
from aligner.rewards.server.wire import HEALTH, SCORE, HealthAnswer, ScoreRequest, WireSample

Ids = list[int]


@dataclass
class RewardService:
    """Endpoints of the server. A refused request raises `HTTPException`.

    ``encode``: converts a sample to token ids. If it raises `AlignerError`, the request is refused.
    ``timeout_s``: time limit of a request in seconds. ``token``: bearer token that requests need,
    or None.
    """

    attributes: Sequence[str]
    encode: Callable[[WireSample], Ids]
    queue: JobQueue[Ids]
    timeout_s: float
    token: str | None = None
    _bodies: Bodies = field(default_factory=Bodies)

    async def health(self) -> HealthAnswer:
        """Return the names of the model's attributes. The request needs no token."""
        return HealthAnswer(status="ok", attributes=list(self.attributes))

    async def score(self, request: Request) -> Response:
        """Score the samples in the request's body. The answer is a `wire.ScoreAnswer`."""
        check_bearer(request, self.token)

        def parse(body: bytearray) -> ScoreRequest:
            return validated(ScoreRequest, parse_json(body))

        def encode(samples: Sequence[WireSample]) -> list[Ids]:
            limit = self.queue.max_items
            if len(samples) > limit:
                cause = f"{len(samples)} samples, at most {limit} are scored in one request"
                raise HTTPException(413, cause)
            return [self.encode(sample) for sample in samples]

        async with self._bodies.read(request, parse) as body:
            sequences = await run_in_threadpool(blame_sender, encode, body.samples)
            rewards = await self._rewards(request, sequences) if sequences else []
        plain = [row[0] if len(row) == 1 else row for row in rewards]
        # Not JSONResponse, which refuses NaN. The client reports NaN to its user.
        return Response(json.dumps({"rewards": plain}), media_type=JSON_TYPE)

    def serving(self, host: str, port: int) -> AbstractContextManager[tuple[str, int]]:
        """Answer requests until the ``with`` block ends. Yields host and port (`http_server`)."""
        routes: Routes = {f"GET {HEALTH}": self.health, f"POST {SCORE}": self.score}
        setting = f"--host {host} --port {port}"
        return http_server((host, port), routes, self.queue, setting=setting)

    async def _rewards(self, request: Request, sequences: list[Ids]) -> list[list[float]]:
        results = Results[list[float]]()
        job = Job(sequences, results.put)
        if not self.queue.add(job):
            raise HTTPException(503, "too many samples are waiting, try again later")
        deadline = asyncio.get_running_loop().time() + self.timeout_s
        timeout_message = f"the model did not answer within {self.timeout_s:g} s"
        with results.while_connected(request):
            return [rewards async for rewards in results.of(job, deadline, timeout_message)]


# Rank 0 broadcasts at least this often, as the other ranks wait in a collective.
_HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class ServeOptions:
    """Options of `serve_reward_model`."""

    model: str  # a .nemo file or a Hugging Face directory
    host: str = "127.0.0.1"
    port: int = 5555  # 0: any free port
    token: str | None = None  # bearer token that requests need. None: they need no token
    batch_size: int = 64  # sequences that are scored together
    micro_batch_size: int = 16  # sequences per forward pass
    max_waiting: int = 4096  # waiting sequences. More are refused, with status 503 or 413
    timeout_s: float = 120.0  # time limit of a request in seconds
    add_bos: bool | None = None  # whether sequences begin with BOS. None: as in the model's file
    precision: Literal["32", "bf16"] = "32"
    tensor_model_parallel_size: int = 1


def serve_reward_model(options: ServeOptions, ready: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or SIGINT. ``ready`` is called with a message when the server listens.

    Under a launcher such as torchrun, every process calls this function. Rank 0 listens.
    """
    # The model on all ranks.
    parallel_config = ParallelConfig(tensor=options.tensor_model_parallel_size)
    parallel = initialize_parallel(parallel_config)
    model, encoder = _load(options, parallel)
    model.prepare_for_inference()
    stopping = threading.Event()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(signal_number, lambda number, frame: stopping.set())

    def score(sequences: list[Ids]) -> list[list[float]]:
        scores = model.get_rewards(encoder.collate(sequences), options.micro_batch_size)
        return scores["rewards"].float().reshape(len(sequences), -1).tolist()

    # The HTTP server on rank 0.
    queue = JobQueue[Ids](options.max_waiting, turn=options.batch_size)
    closing = ExitStack()

    def listen() -> str:
        def encode(sample: WireSample) -> Ids:
            return encoder.ids(sample.prompt, sample.response)

        service = RewardService(model.attributes, encode, queue, options.timeout_s, options.token)
        host, port = closing.enter_context(service.serving(options.host, options.port))
        return f"http://{host}:{port}"

    with closing:
        closing.callback(shutdown_parallel)
        address = on_rank_zero(listen)  # an error is raised on every rank
        if is_rank_zero():
            scores = ", ".join(model.attributes) or "one reward, from comparisons"
            ready(f"reward server ready at {address} ({options.model}: {scores})")
        has_peers = parallel.world_size > 1
        score_until(stopping, queue, score, options.batch_size, has_peers=has_peers)


def _load(options: ServeOptions, parallel: ParallelState) -> tuple[RewardModel, SequenceEncoder]:
    with open_model(options.model) as checkpoint:
        rated_attributes(checkpoint, options.model)  # a language model is refused
        encoder = SequenceEncoder.of_checkpoint(checkpoint, options.add_bos)
    size, run = options.tensor_model_parallel_size, RunSettings(precision=options.precision)
    config = TrainedModelConfig(options.model, tensor_model_parallel_size=size)
    cluster, tokenizer = LocalCluster(parallel), encoder.tokenizer
    return RewardModel(cluster, config, tokenizer, run, init_optimizer=False), encoder


def score_until(
    stopping: threading.Event,
    queue: JobQueue[Ids],
    score: Callable[[list[Ids]], list[list[float]]],
    batch_size: int,
    *,
    has_peers: bool = False,
) -> None:
    """Score the requests that wait on rank 0 with all ranks, until rank 0 sets ``stopping``.

    A batch has at most ``batch_size`` sequences. If ``score`` raises, the batch's clients get the
    error. With ``has_peers`` (other ranks exist) the error also ends the server, as the state of
    the other ranks is unknown.
    """
    while True:
        # Rank 0 broadcasts the batch, which is None at the end and empty after an idle wait.
        slots: list[Slot[Ids]] = []
        if is_rank_zero() and not stopping.is_set():
            slots = queue.take(batch_size, _HEARTBEAT_S)
        batch = from_rank_zero(None if stopping.is_set() else [slot.item for slot in slots])
        if batch is None:
            return
        if not batch:
            continue
        try:
            rewards = score(batch)
        except Exception as error:
            for slot in slots:
                slot.fail(error)
            if has_peers:
                raise
        else:
            for slot, numbers in zip(slots, rewards, strict=False):
                slot.report(numbers)
