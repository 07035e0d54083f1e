"""`VllmEngine`: samples with one ``vllm.LLM`` in this process. Prompts and responses are token ids.

This module runs in the Python environment with vLLM, which may differ from the policy's. vLLM's
engine core runs in this process, so that it ends even if this process is killed.
"""

import contextlib
import itertools
import json
import os
import tempfile
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from aligner.architecture import GPTArchitecture, TransformersArchitecture
from aligner.checkpoint.hf.families import config_to_hf
from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.data.tokenizers.decoding import StopStrings
from aligner.device import accelerator
from aligner.device.counter_hash import text_hash
from aligner.errors import ConfigError, raised_as
from aligner.generation.vllm.sampling import (
    add_sets,
    check_sets,
    engine_arguments,
    logprobs_mode,
    sampling_arguments,
)
from aligner.generation.vllm.settings import VllmConfig

_ABANDON_INTERVAL = 8  # an engine's processes agree every 8 steps on whether to abandon the batch
# Lengths and sampling parameters of responses, and the matcher of their stop strings, if any.
Rules = tuple[SamplingOptions, StopStrings | None]


@dataclass
class Response:
    """Response to one prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    kept_ids: list[Sequence[int]] = field(default_factory=list)  # per token, if recorded
    is_end: bool = False  # ended by an end token or stop string


@dataclass(frozen=True, kw_only=True)
class EngineArguments:
    """Arguments of a `VllmEngine`."""

    architecture: GPTArchitecture  # supported by Hugging Face and vLLM
    precision: str  # of weights and activations, 32 or bf16
    eos_ids: Sequence[int]  # ids that end a response
    length: LengthParams
    sampling: SamplingParams
    max_batch_size: int  # maximum number of sequences in flight
    max_sequence_length: int  # maximum number of tokens of prompt and response together
    settings: VllmConfig  # the result of `VllmConfig.on_device`
    record_kept: int = 0  # maximum number of kept tokens to record per sampled token


class VllmEngine:
    """Engine that samples responses with the weights that a policy sends.

    The initial weights are random: call `begin_refit`, `load_weights` and `finish_refit` before the
    first `sample`. All calls must come from the thread that constructed the engine.
    """

    def __init__(
        self,
        arguments: EngineArguments,
        stop: StopStrings | None = None,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        """Start vLLM.

        ``stop``: matcher of stop strings. ``peers``: group of the processes of an engine with
        several devices. Each of them constructs this engine and makes the same calls.
        """
        settings = arguments.settings
        self._peers = peers
        self._sleeps = False
        self._rules: Rules = (SamplingOptions(arguments.length, arguments.sampling), stop)
        self._eos_ids = tuple(arguments.eos_ids)
        self._record_kept = arguments.record_kept
        set_environment(settings)
        # Arguments of the user come last and override ours.
        vllm_arguments = {
            "dtype": "float32" if arguments.precision == "32" else "bfloat16",
            "skip_tokenizer_init": True,
            "load_format": "dummy",
            "enforce_eager": settings.enforce_eager,
            "max_num_seqs": arguments.max_batch_size,
            "max_model_len": arguments.max_sequence_length,
            "kv_cache_memory_bytes": settings.kv_cache_mb and settings.kv_cache_mb * 2**20,
            "gpu_memory_utilization": settings.gpu_memory_utilization,
            "logprobs_mode": logprobs_mode(arguments.sampling),
            "enable_sleep_mode": bool(settings.sleep),
            **engine_arguments(arguments.record_kept),
            "disable_log_stats": True,
            "worker_extension_cls": "aligner.generation.vllm.extension.RefitExtension",
            **settings.kwargs,
        }
        # Each device has a process, and all processes make the same calls.
        if settings.tensor_parallel_size > 1:
            vllm_arguments = {
                "tensor_parallel_size": settings.tensor_parallel_size,
                "distributed_executor_backend": "external_launcher",
                # It would open the other devices, but a worker on Ray sees only its own.
                "disable_custom_all_reduce": True,
                **vllm_arguments,
            }
        # Start vLLM with random weights. The first refit replaces them.
        self._llm = _start(arguments.architecture, self._eos_ids, vllm_arguments)
        if peers is not None:
            dist.barrier(peers)  # every process has opened the shared segments
            _unlink_shared_memory()

    def sample(
        self,
        prompts: Sequence[Sequence[int]],
        sample_ids: Sequence[int],
        *,
        seed: int,
        greedy: bool,
        abandoned: threading.Event | None = None,
        rules: Rules | None = None,
    ) -> list[Response] | None:
        """Return a response to each prompt, or None if ``abandoned`` was set before all had ended.

        ``rules`` replaces the engine's lengths, sampling and stop strings. A response depends only
        on its prompt, ``seed`` and its sample id, provided that vLLM's kernels return the same bits
        in every batch. If the call raises, its requests are aborted.
        """
        from vllm.inputs.engine import tokens_input

        rules = rules or self._rules
        sampling_options, _ = rules
        greedy = greedy or sampling_options.sampling.use_greedy
        core = self._llm.llm_engine
        responses = [Response() for _ in prompts]
        try:
            # Submit one request per prompt.
            for row, (prompt, sample_id) in enumerate(zip(prompts, sample_ids, strict=True)):
                params = self._params(sampling_options, text_hash(seed, sample_id), greedy)
                core.add_request(str(row), tokens_input(list(prompt)), params)
            # Step until every response has ended.
            running = set(range(len(prompts)))
            for step in itertools.count():
                if not running:
                    break
                if abandoned is not None and self._is_abandoned(abandoned, step):
                    self._abort(running)
                    return None
                for output in core.step():
                    row = int(output.request_id)
                    if row not in running:
                        continue  # sampled before the abort at a stop string arrived
                    response = responses[row]
                    ended = self._take(rules, prompts[row], response, output.outputs[0])
                    if ended and not output.finished:
                        core.abort_request([output.request_id])
                    if ended or output.finished:
                        running.discard(row)
                        if self._record_kept and not greedy:
                            check_sets(response.kept_ids, response.tokens)
            # No request may be left for the next call.
            self._drain()
            return responses
        except Exception:
            with contextlib.suppress(Exception):  # the engine may have died
                self._abort(range(len(prompts)))
            raise

    def _params(self, options: SamplingOptions, seed: int, greedy: bool) -> Any:
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.sampling_params import RequestOutputKind

        arguments = sampling_arguments(
            options.length,
            options.sampling,
            eos_ids=self._eos_ids,
            seed=seed,
            greedy=greedy,
            by_top_k=self._record_kept > 0,
        )
        # DELTA returns only the new tokens of a step.
        return VllmSamplingParams(**arguments, output_kind=RequestOutputKind.DELTA)

    def score(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return each sequence's log-probs at temperature 1, of all tokens after the first."""
        from vllm import SamplingParams as VllmSamplingParams
        from vllm.inputs.engine import tokens_input

        top_k = 1 if self._record_kept else 0  # for the one sampled token, which is ignored
        # One token is sampled, because vLLM cannot score without sampling.
        params = VllmSamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False, top_k=top_k)
        prompts = [tokens_input(list(sequence)) for sequence in sequences]
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        return [
            [
                chosen[token].logprob
                for token, chosen in zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            ]
            for sequence, output in zip(sequences, outputs, strict=True)
        ]

    # Weights ----------------------------------------------------------------------------------

    def begin_refit(self) -> None:
        """Prepare for new weights, also after `sleep`."""
        if self._sleeps:
            self._llm.llm_engine.wake_up(["weights"])
        self._llm.collective_rpc("begin_refit")

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load a part of the weights, as pairs of a Hugging Face name and a complete float tensor.

        A matrix is [out, in]. The tensors' memory must stay valid until `finish_refit`.
        """
        self._llm.collective_rpc("load_refit_weights", args=(weights,))

    def finish_refit(self) -> None:
        """Activate the new weights and drop cached results of the old weights."""
        self._llm.collective_rpc("finish_refit")
        if self._sleeps:
            self._llm.llm_engine.wake_up(["kv_cache"])
            self._sleeps = False
        self._llm.reset_prefix_cache()

    def sleep(self) -> None:
        """Release the device's memory. Weights are lost until the next refit."""
        self._llm.llm_engine.sleep(level=2)
        self._sleeps = True

    def shutdown(self) -> None:
        """Release memory and threads."""
        self._llm.llm_engine.engine_core.shutdown()

    # Ends of responses ------------------------------------------------------------------------

    def _take(self, rules: Rules, prompt: Sequence[int], response: Response, new: Any) -> bool:
        """Add the tokens of one step to the response. Return whether the response has ended."""
        if self._record_kept:
            add_sets(response.kept_ids, new, len(response.tokens) + len(new.token_ids))
        for token, chosen in zip(new.token_ids, new.logprobs, strict=True):
            response.tokens.append(token)
            response.logprobs.append(chosen[token].logprob)
            if self._ends(rules, prompt, response.tokens):
                response.is_end = True
                return True
        return False

    def _ends(self, rules: Rules, prompt: Sequence[int], response: Sequence[int]) -> bool:
        """Return whether the response has ended, as in `aligner.models.gpt.decode.scheduler`."""
        if response[-1] in self._eos_ids:
            return True  # EOS is banned before min_length
        sampling_options, stop = rules
        if stop is None or len(response) < sampling_options.length.min_length:
            return False
        return stop.completed(prompt, response)

    def _is_abandoned(self, abandoned: threading.Event, step: int) -> bool:
        """Return whether to abandon the batch before this step. All processes get the same."""
        if self._peers is None:
            return abandoned.is_set()
        if step % _ABANDON_INTERVAL:
            return False
        is_set = torch.tensor(int(abandoned.is_set()))
        dist.all_reduce(is_set, dist.ReduceOp.MAX, group=self._peers)
        return bool(is_set)

    def _abort(self, running: Iterable[int]) -> None:
        self._llm.llm_engine.abort_request([str(row) for row in running])
        self._drain()

    def _drain(self) -> None:
        while self._llm.llm_engine.has_unfinished_requests():
            self._llm.llm_engine.step()


def _unlink_shared_memory() -> None:
    """Unlink the engine's shared memory, so that it is freed when the processes end."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])  # "... (deleted)" if already unlinked
        if path.parent == Path("/dev/shm") and ("psm_" in path.name or "cpushm" in path.name):
            path.unlink(missing_ok=True)


def set_environment(settings: VllmConfig) -> None:
    """Set environment variables that vLLM reads at import, unless the user has set them."""
    # An engine core in a separate process could outlive this process.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    defaults = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if not accelerator.has_gpu():
        threads = settings.threads or torch.get_num_threads()
        torch.set_num_threads(threads)
        os.environ["OMP_NUM_THREADS"] = str(threads)  # vLLM's number of threads
        if settings.enforce_eager:
            defaults["TORCH_COMPILE_DISABLE"] = "1"  # also for small functions of the sampler
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _start(architecture: GPTArchitecture, eos_ids: Sequence[int], arguments: dict[str, Any]) -> Any:
    """Start a ``vllm.LLM`` from a generated ``config.json``."""
    if isinstance(architecture, TransformersArchitecture):
        config = json.loads(architecture.settings)
    else:
        _, config = config_to_hf(architecture)
    # Otherwise vLLM also ends responses at the family's default, and bans it before min_tokens.
    config["eos_token_id"] = list(eos_ids)
    remedy = "use an environment with vLLM, such as the one that `make vllm-env` creates"
    text = "generation.vllm.python: vLLM cannot be imported"
    with raised_as(ConfigError, text, ImportError, remedy=remedy):
        from vllm import LLM
    text = "generation.backend=vllm: vLLM does not run this model or these settings"
    with tempfile.TemporaryDirectory(prefix="aligner-vllm-") as folder, _temporary_files(folder):
        (Path(folder) / "config.json").write_text(json.dumps(config))
        with raised_as(ConfigError, text, ValueError, NotImplementedError):
            return LLM(model=folder, **arguments)


@contextlib.contextmanager
def _temporary_files(folder: str) -> Iterator[None]:
    """Create temporary files in ``folder``: vLLM does not delete the file of its rendezvous."""
    previous = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = previous
