"""Serving of a reward model: its processes, and the loop that scores requests.

rank 0, HTTP thread: requests ─► JobQueue ─► main thread: batches ─► all ranks: scores
"""

import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Literal

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import ParallelConfig, TrainedModelConfig
from aligner.distributed.workers import LocalCluster
from aligner.http.queue import JobQueue, Slot
from aligner.models.gpt.role.reward import rated_attributes
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.reward.reward_model import RewardModel
from aligner.parallel.collectives import from_rank_zero, is_rank_zero, on_rank_zero
from aligner.parallel.groups import ParallelState, initialize_parallel, shutdown_parallel
from aligner.rewards.sequences import SequenceEncoder
from aligner.rewards.server.http import Ids, RewardService
from aligner.rewards.server.wire import WireSample

# The other ranks wait for rank 0 in a collective, and rank 0 ends idle waits after this time.
_HEARTBEAT_S = 1.0


@dataclass(frozen=True)
class ServeOptions:
    """Options of a server."""

    model: str  # a .nemo file
    host: str = "127.0.0.1"
    port: int = 5555  # 0: any that is free
    token: str | None = None  # that requests need, None for no token
    batch_size: int = 64  # sequences that are scored together
    micro_batch_size: int = 16  # sequences per forward pass
    # Maximum number of waiting sequences. More requests are refused with status 503, and a request
    # with more sequences with status 413.
    max_waiting: int = 4096
    timeout_s: float = 120.0  # time limit of a request
    add_bos: bool | None = None  # None: as in the model's file
    precision: Literal["32", "bf16"] = "32"
    tensor_model_parallel_size: int = 1


def serve_reward_model(options: ServeOptions, ready: Callable[[str], None] = print) -> None:
    """Serve until SIGTERM or SIGINT. ``ready`` is called with the address when the server listens.

    Under a launcher such as torchrun, every process runs this function and rank 0 answers.
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
            rates = ", ".join(model.attributes) or "one reward, from comparisons"
            ready(f"reward server ready at {address} ({options.model}: {rates})")
        has_peers = parallel.world_size > 1
        score_until(stopping, queue, score, options.batch_size, has_peers=has_peers)


def _load(options: ServeOptions, parallel: ParallelState) -> tuple[RewardModel, SequenceEncoder]:
    """Load the model and the encoder of its sequences."""
    with open_nemo(options.model) as checkpoint:
        rated_attributes(checkpoint, options.model)  # a language model is refused
        encoder = SequenceEncoder.of_checkpoint(checkpoint, options.add_bos)
    model = RewardModel(
        LocalCluster(parallel),
        TrainedModelConfig(
            restore_from_path=options.model,
            tensor_model_parallel_size=options.tensor_model_parallel_size,
        ),
        encoder.tokenizer,
        RunSettings(precision=options.precision),
        init_optimizer=False,
    )
    return model, encoder


def score_until(
    stopping: threading.Event,
    queue: JobQueue[Ids],
    score: Callable[[list[Ids]], list[list[float]]],
    batch_size: int,
    *,
    has_peers: bool = False,
) -> None:
    """Score the waiting requests of rank 0 on all ranks, until ``stopping`` is set on rank 0.

    ``stopping`` is checked between batches of ``batch_size`` sequences. An error of a batch is
    reported to its clients. If there are other ranks, the error also ends the server, as their
    state is then unknown.
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
