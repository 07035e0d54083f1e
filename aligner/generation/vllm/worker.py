"""`VllmWorker`: a process with one vLLM engine, run by the interpreter of an environment with vLLM.

    main thread: calls of the trainer ─► single engine thread: `VllmEngine`

During a rollout the process can answer other calls: `start_generation` returns at once,
`collect_generation` waits for the batch, and `abandon_generation` stops it. `init_collective` and
`receive_weights` wait for the policy's worker for at most ``timeout_s``.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.config import SamplingOptions, SamplingParams
from aligner.data.tokenizers.decoding import StopStrings
from aligner.data.tokenizers.loading import tokenizer_from_files
from aligner.device import accelerator
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.errors import WorkerError, raised_as
from aligner.generation.vllm.engine import EngineArguments, Response, VllmEngine
from aligner.generation.vllm.settings import VllmConfig
from aligner.refit.ends import RefitEnd, check_ends
from aligner.refit.receiver import RefitReceiver

VERSIONS = (
    "install a vLLM in generation.vllm.python that requires the trainer's torch "
    "(requirements-vllm-cuda.txt names such a pair)"
)


class VllmWorker(RefitReceiver):
    """Worker that runs one `VllmEngine` for a `VllmGeneration`."""

    section = "generation.vllm"

    def __init__(
        self,
        arguments: EngineArguments,
        *,
        tokenizer_files: Mapping[str, bytes],
        pad_id: int,
        weights_from: Sequence[RefitEnd],
        meeting_place: tuple[str, int] | None = None,
    ) -> None:
        """Start the engine (see `VllmEngine`). The tokenizer is used for stop strings only.

        ``weights_from``: the policy's workers, in rank order. ``meeting_place``: address of the
        rendezvous of an engine with several processes, whose RANKs are consecutive. Raises
        `ConfigError` if the policy's weights cannot be sent to this process (see `check_ends`).
        """
        settings = arguments.settings
        # Check the refit, and meet the engine's other processes.
        index, rank = divmod(int(os.environ.get("RANK", "0")), settings.tensor_parallel_size)
        check_ends(
            weights_from,
            RefitEnd.of_this_process(f"engine {index}" + (f", device {rank}" if rank else "")),
            separate=settings.refit == "separate",
            section=self.section,
            versions=VERSIONS,
        )
        peers = None
        if meeting_place is not None:
            peers = _meet(meeting_place, index, rank, settings)
        # Start the engine in its thread.
        self._pad_id = pad_id
        self._record_kept = arguments.record_kept
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm")
        self._abandoned = threading.Event()
        self._pending: Future[list[Response] | None] | None = None
        self._prompts: list[list[int]] = []
        self._tokenizer_files = tokenizer_files
        stop = self._stop_strings(arguments.sampling)
        self._engine: VllmEngine = self._thread.submit(VllmEngine, arguments, stop, peers).result()

    # Sampling ---------------------------------------------------------------------------------

    def _stop_strings(self, sampling: SamplingParams) -> StopStrings | None:
        if not sampling.end_strings:
            return None
        return StopStrings(tokenizer_from_files(self._tokenizer_files), sampling.end_strings)

    def start_generation(
        self,
        data: Mapping[str, Any],
        seed: int,
        greedy: bool = False,
        sampling_options: SamplingOptions | None = None,
    ) -> None:
        """Begin to sample a response to each prompt in ``data``, and return at once.

        ``data``: prompts ``input_ids`` [b, P], their ``input_lengths`` [b], and ``sample_ids`` [b],
        all int64. The previous batch must have been collected or abandoned. ``sampling_options``
        replaces the engine's lengths and sampling.
        """
        if self._pending is not None:
            raise WorkerError("a batch is in flight. Collect or abandon it before the next")
        self._prompts = _sequences(data)
        self._abandoned.clear()
        self._pending = self._thread.submit(
            self._engine.sample,
            self._prompts,
            data["sample_ids"].tolist(),
            seed=seed,
            greedy=greedy,
            abandoned=self._abandoned,
            rules=None
            if sampling_options is None
            else (sampling_options, self._stop_strings(sampling_options.sampling)),
        )

    def collect_generation(self) -> BatchedDataDict:
        """Wait for the batch in flight (see `GenerationOutputSpec`)."""
        if self._pending is None:
            raise WorkerError("no batch is in flight. Call start_generation first")
        pending, self._pending = self._pending, None
        responses = pending.result()
        assert responses is not None, "an abandoned batch cannot be collected"
        return responses_batch(self._prompts, responses, self._pad_id, self._record_kept)

    def abandon_generation(self) -> None:
        """Stop the batch in flight, if any, and ignore its result or error."""
        if self._pending is not None:
            pending, self._pending = self._pending, None
            self._abandoned.set()
            pending.exception()

    def get_logprobs(self, data: Mapping[str, Any]) -> BatchedDataDict:
        """Return ``logprobs`` float32 [b, S] of tokens at temperature 1. Padding and t = 0 have 0.

        They should equal those of the policy's ``get_logprobs`` after a refit.
        """
        scores = self._thread.submit(self._engine.score, _sequences(data)).result()
        logprobs = torch.zeros(data["input_ids"].shape)
        for row, score in enumerate(scores):
            logprobs[row, 1 : 1 + len(score)] = torch.tensor(score)
        return BatchedDataDict({"logprobs": logprobs})

    # Weights ----------------------------------------------------------------------------------

    def begin_refit(self) -> None:
        """Prepare for new weights. No batch may be in flight."""
        if self._pending is not None:
            raise WorkerError("a refit began while a batch is in flight. Collect or abandon it")
        self._synchronized(self._engine.begin_refit)

    def load_weights(self, weights: Sequence[tuple[str, Tensor]]) -> None:
        """Load a part of the weights, as pairs of a Hugging Face name and a full tensor [...]."""
        self._synchronized(self._engine.load_weights, weights)

    def finish_refit(self) -> None:
        """Activate the new weights."""
        self._synchronized(self._engine.finish_refit)

    def _synchronized(self, step: Callable[..., None], *arguments: Any) -> None:
        """Run ``step`` in the engine's thread, and synchronise the GPU before and after."""
        # The step sees what other streams wrote, and the policy may free the memory afterwards.
        accelerator.synchronize()
        self._thread.submit(step, *arguments).result()
        accelerator.synchronize()

    # The process ------------------------------------------------------------------------------

    def sleep(self) -> None:
        """Release the device's memory including weights until the next refit."""
        self._synchronized(self._engine.sleep)

    def shutdown(self) -> bool:
        """Shut down the engine and its thread."""
        self.abandon_generation()
        self._thread.submit(self._engine.shutdown).result()
        self._thread.shutdown()
        return True


def _sequences(data: Mapping[str, Any]) -> list[list[int]]:
    rows = zip(data["input_ids"].tolist(), data["input_lengths"].tolist(), strict=True)
    return [row[:length] for row, length in rows]


def _meet(
    address: tuple[str, int], index: int, rank: int, settings: VllmConfig
) -> dist.ProcessGroup:
    """Set up torch.distributed for engine ``index``. Return a gloo group of its processes."""
    limit = timedelta(seconds=settings.timeout_s)
    size = settings.tensor_parallel_size
    text = (
        f"the {size} processes of engine {index} did not meet at {address[0]}:{address[1]} within "
        f"{settings.timeout_s:g} s"
    )
    with raised_as(WorkerError, text, RuntimeError):
        store = dist.TCPStore(*address, is_master=False, timeout=limit)
        accelerator.activate()
        dist.init_process_group(
            accelerator.backend(),
            store=dist.PrefixStore(f"engine {index}", store),
            rank=rank,
            world_size=size,
            timeout=limit,
        )
    # vLLM reads its world from the environment.
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": address[0],
        "MASTER_PORT": str(address[1]),
    }
    return dist.new_group(backend="gloo", timeout=limit)


def responses_batch(
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Response],
    pad_id: int,
    record_kept: int = 0,
) -> BatchedDataDict:
    """Return prompts and responses as a `GenerationOutputSpec`, right-padded to the longest.

    ``record_kept``: number K of columns in ``kept_ids``, int32 [B, S, K]: the ids that top-k and
    top-p kept for each sampled token, padded with -1. If a token has more than K ids, all K are -1.
    With K = 0, ``kept_ids`` is omitted.
    """
    starts = [len(prompt) for prompt in prompts]
    lengths = [len(response.tokens) for response in responses]
    ends = [start + count for start, count in zip(starts, lengths, strict=True)]
    # Prompts have log-prob 0.
    ids = torch.full((len(prompts), max(ends, default=0)), pad_id, dtype=torch.int64)
    logprobs = torch.zeros(ids.shape)
    kept_ids = torch.full((*ids.shape, record_kept), -1, dtype=torch.int32)
    for row, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        ids[row, : ends[row]] = torch.tensor([*prompt, *response.tokens])
        logprobs[row, starts[row] : ends[row]] = torch.tensor(response.logprobs)
        # Padding follows the response, and a greedy response has no sets.
        for token_ids, kept in zip(kept_ids[row, starts[row] :], response.kept_ids, strict=False):
            if len(kept) <= record_kept:
                token_ids[: len(kept)] = torch.tensor(kept, dtype=torch.int32)
    return BatchedDataDict(
        {
            "output_ids": ids,
            "generation_lengths": torch.tensor(lengths, dtype=torch.int64),
            "unpadded_sequence_lengths": torch.tensor(ends, dtype=torch.int64),
            "logprobs": logprobs,
            "is_end": torch.tensor([response.is_end for response in responses], dtype=torch.bool),
            **({"kept_ids": kept_ids} if record_kept else {}),
        }
    )
