"""Engines of vLLM, in whose place is one that is scripted or notes its calls.

Outputs have the shape of vLLM's own: ``CompletionOutput.sampling_mask`` is None or a
``SamplingMask`` with a list of ids for each token. Releases differ in when it comes: with the last
output for the whole response, or with every output for its own tokens.
"""

import sys
from dataclasses import dataclass, field, make_dataclass, replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from engine_arguments import engine_arguments
from user_code import configured

from aligner.config import LengthParams, SamplingOptions, SamplingParams
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalFuture
from aligner.errors import ConfigError, WorkerError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.generation.vllm import engine as vllm_engine
from aligner.generation.vllm.generation import VllmGeneration
from aligner.generation.vllm.sampling import add_sets, sampling_arguments
from aligner.generation.vllm.settings import VllmConfig
from aligner.generation.vllm.worker import responses_batch
from aligner.refit.controller import RefitSource
from aligner.refit.ends import RefitEnd

END = 0
# Tokens of two responses, and what each was sampled from.
TOKENS = {0: [5, 7, END], 1: [9, 8]}
KEPT = {0: [[5, 6], [7], [0, 1, 2]], 1: [[9, 3, 4, 1], [2, 8]]}
ON_GPU = VllmConfig().on_device(has_gpu=True, ahead=False)


def output(tokens, sets):
    chosen = [{token: SimpleNamespace(logprob=-float(token))} for token in tokens]
    mask = None if sets is None else SimpleNamespace(token_ids=sets)
    return SimpleNamespace(token_ids=tokens, logprobs=chosen, sampling_mask=mask)


@dataclass
class Core:
    """A ``vllm.LLM``, its engine too, that samples `TOKENS`; ``when``: a mask each time or last."""

    when: str
    kept: dict[int, list[list[int]]] = field(default_factory=lambda: KEPT)
    asked: dict[str, Any] = field(default_factory=dict)
    step_number: int = 0

    @property
    def llm_engine(self):
        return self

    def add_request(self, request_id, prompt, params):
        self.asked[request_id] = params

    def abort_request(self, request_ids):
        pass

    def has_unfinished_requests(self):
        return False

    def step(self):
        outputs = []
        for row in map(int, self.asked):
            tokens, sets = TOKENS[row], self.kept.get(row)
            if self.step_number < len(tokens):
                last = self.step_number == len(tokens) - 1
                here = slice(self.step_number, self.step_number + 1)
                found = {"each": sets and sets[here], "last": sets if last else None}[self.when]
                made = [output(tokens[here], found)]
                outputs.append(SimpleNamespace(request_id=str(row), outputs=made, finished=last))
        self.step_number += 1
        return outputs


@pytest.fixture
def vllm(monkeypatch):
    """Modules of vLLM's names with what the engine takes from them; returns `EngineArgs`'s."""
    names = ("vllm", "vllm.inputs", "vllm.inputs.engine", "vllm.sampling_params", "vllm.engine")
    for name in (*names, "vllm.engine.arg_utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm"].SamplingParams = SimpleNamespace
    sys.modules["vllm"].__version__ = "0.27.1"
    sys.modules["vllm.inputs.engine"].tokens_input = lambda tokens: {"prompt_token_ids": tokens}
    sys.modules["vllm.sampling_params"].RequestOutputKind = SimpleNamespace(DELTA="delta")
    arguments = sys.modules["vllm.engine.arg_utils"]
    arguments.EngineArgs = make_dataclass("EngineArgs", ["model", "return_sampling_mask"])
    return arguments


@pytest.fixture
def started(vllm, monkeypatch):
    """An engine that records at most three kept tokens, and what vLLM was given."""
    monkeypatch.setattr(vllm_engine, "set_environment", lambda settings: None)

    def start(llm=None, record_kept=3, stop=None, settings=ON_GPU):
        given = {}
        monkeypatch.setattr(
            vllm_engine, "_start", lambda shape, ends, arguments: given.update(arguments) or llm
        )
        sampling = SamplingParams(top_k=4, top_p=0.9, temperature=0.7)
        changes = {"length": LengthParams(max_length=3), "sampling": sampling}
        arguments = engine_arguments(settings, record_kept=record_kept, **changes)
        return vllm_engine.VllmEngine(arguments, stop), given

    return start


def sampled(made, **options):
    prompts = [[11, 12], [13]]
    responses = made.sample(prompts, [0, 1], seed=3, **{"greedy": False, **options})
    return responses_batch(prompts, responses, 99, 3)


@pytest.mark.parametrize("when", ["each", "last"])
def test_sets_are_a_rollouts_column(started, when):
    core = Core(when)
    batch = sampled(started(core)[0])
    assert batch["output_ids"].tolist() == [[11, 12, 5, 7, END], [13, 9, 8, 99, 99]]
    nothing = [-1, -1, -1]
    assert batch["kept_ids"].dtype == torch.int32
    assert batch["kept_ids"].tolist() == [
        [nothing, nothing, [5, 6, -1], [7, -1, -1], [0, 1, 2]],
        [nothing, nothing, [2, 8, -1], nothing, nothing],  # four were kept for the first token
    ]
    asked = core.asked["0"]
    assert (asked.temperature, asked.top_k, asked.top_p) == (0.7, 4, 0.9)
    assert asked.output_kind == "delta"


def test_a_response_that_a_stop_string_ends(started):
    """vLLM 0.32 has returned its sets by then, older releases have not."""
    stop = SimpleNamespace(completed=lambda prompt, response: list(response) == [5, 7])
    made, core = started(Core("each"), stop=stop)[0], Core("last")
    batch = sampled(made)
    assert batch["generation_lengths"].tolist() == [2, 2]
    assert batch["kept_ids"][0].tolist() == [[-1] * 3, [-1] * 3, [5, 6, -1], [7, -1, -1]]
    with pytest.raises(WorkerError, match=r"tokens of 0 of a response's 2 tokens. .*stop string"):
        sampled(started(core, stop=stop)[0])


def test_nothing_is_left_of_a_batch_that_failed(started):
    class Fails(Core):
        aborted: Any = None

        def step(self):
            if self.step_number == 1:
                raise RuntimeError("of the engine")
            return super().step()

        def abort_request(self, request_ids):
            self.aborted = request_ids

    core = Fails("each")
    with pytest.raises(RuntimeError, match="of the engine"):
        sampled(started(core)[0])
    assert core.aborted == ["0", "1"]


def test_an_engine_records_only_if_asked(started):
    made, given = started(Core("each"), record_kept=0)
    responses = made.sample([[1], [2]], [0, 1], seed=3, greedy=False)
    assert [response.kept_ids for response in responses] == [[], []]
    assert "kept_ids" not in responses_batch([[1], [2]], responses, 99)
    assert "return_sampling_mask" not in given
    _, given = started()
    assert given["return_sampling_mask"] is True
    assert given["logprobs_mode"] == "processed_logprobs"


def test_greedy_responses_have_none(started):
    """vLLM refuses a temperature of 0 there."""
    core = Core("each", kept={})
    batch = sampled(started(core)[0], greedy=True)
    assert (batch["kept_ids"] == -1).all()
    assert (core.asked["0"].temperature, core.asked["0"].top_k) == (1.0, 1)
    core = Core("each", kept={})
    options = SamplingOptions(LengthParams(max_length=3), SamplingParams(use_greedy=True))
    sampled(started(core)[0], rules=(options, None))
    assert (core.asked["0"].temperature, core.asked["0"].top_k) == (1.0, 1)
    sampling = SamplingParams(top_k=4)
    plain = sampling_arguments(LengthParams(), sampling, eos_ids=[END], seed=0, greedy=True)
    assert (plain["temperature"], plain["top_k"]) == (0.0, 4)


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({0: None, 1: None}, r"kept tokens of 0 of a response's \d tokens. .*use vLLM 0.32"),
        ({**KEPT, 0: [[5, 6], [8], [0]]}, r"token 7 at index 1 .* not among the 1 tokens"),
    ],
)
@pytest.mark.parametrize("when", ["each", "last"])
def test_sets_that_are_missing_or_of_other_tokens(started, when, kept, message):
    with pytest.raises(WorkerError, match=message):
        sampled(started(Core(when, kept))[0])


def test_sets_that_fit_nothing():
    sets, said = [[5]], "returned 2 sets of kept tokens with 1 of a response's 3"
    with pytest.raises(WorkerError, match=said):
        add_sets(sets, output([7], [[7], [8]]), 3)
    assert sets == [[5]]


def test_a_vllm_without_them_is_refused(started, vllm):
    vllm.EngineArgs = make_dataclass("EngineArgs", ["model"])
    started(record_kept=0)
    with pytest.raises(ConfigError, match=r"record_kept_tokens=3: vLLM 0.27.1 .*0.28 or newer"):
        started()


# Memory and weights ------------------------------------------------------------------------------


class Calls:
    """A ``vllm.LLM``, its engine, a group of workers or the cluster they start on."""

    def __init__(self, use_gpus=True):
        self.calls, self.use_gpus, self.answers = [], use_gpus, True
        self.llm_engine = self

    def start_workers(self, worker_class, name_prefix, **kwargs):
        self.started = kwargs
        return self

    def run_all_workers_single_data(self, method_name, **kwargs):
        self.calls.append(method_name)
        answers = {"prepare_weights_for_ipc": ([("a", 8)], 8), "get_weights_ipc_handles": {}}
        answers["refit_end"] = RefitEnd("policy rank 0", "GPU 0", True, "2.13.0", None)
        return LocalFuture([answers.get(method_name)])

    def recover(self):
        return self.answers

    def get_all_worker_results(self, future):
        return future.get_results()

    def collective_rpc(self, method, args=()):
        self.calls.append(method)

    def sleep(self, level):
        self.calls.append(f"sleep {level}")

    def wake_up(self, tags):
        self.calls.append(f"wake {','.join(tags)}")

    def reset_prefix_cache(self):
        self.calls.append("reset_prefix_cache")


def refit(engine):
    engine.begin_refit()
    engine.load_weights([])
    engine.finish_refit()


def test_an_engine_wakes_for_weights_and_then_for_its_cache(started):
    llm = Calls()
    engine, given = started(llm)
    assert given["enable_sleep_mode"] is True
    assert given["enforce_eager"] is False
    assert given["kv_cache_memory_bytes"] is None
    loading = ["begin_refit", "load_refit_weights", "finish_refit"]
    refit(engine)  # awake
    assert llm.calls == [*loading, "reset_prefix_cache"]
    llm.calls.clear()
    engine.sleep()
    refit(engine)
    refit(engine)
    woken = ["sleep 2", "wake weights", *loading, "wake kv_cache", "reset_prefix_cache"]
    assert llm.calls == [*woken, *loading, "reset_prefix_cache"]


def test_engines_on_cpu_and_on_several_devices(started):
    _, given = started(settings=VllmConfig().on_device(has_gpu=False, ahead=False))
    assert given["enable_sleep_mode"] is False
    assert given["enforce_eager"] is True
    assert given["kv_cache_memory_bytes"] == 1024 * 2**20
    assert given["gpu_memory_utilization"] == 0.5
    assert "tensor_parallel_size" not in given
    settings = VllmConfig(tensor_parallel_size=2)
    _, given = started(settings=settings.on_device(has_gpu=True, ahead=False))
    assert given["tensor_parallel_size"] == 2
    assert given["distributed_executor_backend"] == "external_launcher"


def generation_on(cluster, **vllm):
    settings = {"backend": "vllm", "vllm": {"python": sys.executable, **vllm}}
    config = configured(critic=True, cluster__engine="ray", generation=settings)
    policy = RefitSource()
    policy.worker_group = Calls()
    tokenizer = byte_level_tokenizer()
    return VllmGeneration(cluster, config, tokenizer, TINY_ARCHITECTURE, policy, 64)


def test_after_a_failure_engines_forget_what_they_sample():
    cluster = Calls()
    generation = generation_on(cluster)
    assert generation.recover()
    assert cluster.calls == ["abandon_generation"]
    cluster.answers = False
    assert not generation.recover()
    cluster.answers = True
    several = replace(generation._settings, tensor_parallel_size=2)
    generation._settings = several
    assert not generation.recover()  # its other processes wait for the one that failed
    assert len(cluster.calls) == 1


def test_weights_are_brought_again_after_sleep_alone():
    cluster = Calls(use_gpus=False)
    generation = generation_on(cluster)
    generation.prepare_for_generation()
    cluster.calls.clear()
    generation.finish_generation()
    generation.prepare_for_generation()
    assert cluster.calls == []
    assert cluster.started["arguments"].settings.kv_cache_mb == 1024
    cluster = Calls()
    generation = generation_on(cluster)
    for _ in range(2):  # no update between: a validation, say
        cluster.calls.clear()
        generation.prepare_for_generation()
        generation.prepare_for_generation()
        generation.finish_generation()
        refit = ["begin_refit", "load_weights_from_ipc", "finish_refit", "sleep"]
        assert [call for call in cluster.calls if call != "sharing_key"] == refit
    assert generation.in_words().endswith("released")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_refused_where_memory_is_shared(name, monkeypatch):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    with pytest.raises(ConfigError, match=rf"{name}=max_split.*refit=separate"):
        generation_on(Calls())
    generation_on(Calls(), refit="separate")
    generation_on(Calls(use_gpus=False))
    monkeypatch.setenv(name, "expandable_segments:False")
    generation_on(Calls())
