"""When engines give their memory back and take it again; vLLM's place has what notes calls."""

import dataclasses
import sys
from types import SimpleNamespace

import pytest
from engine_arguments import engine_arguments
from user_code import configured

from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalFuture
from aligner.errors import ConfigError
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.generation.vllm import engine as vllm_engine
from aligner.generation.vllm.generation import VllmGeneration
from aligner.generation.vllm.settings import VllmConfig
from aligner.refit.controller import RefitSource
from aligner.refit.ends import RefitEnd


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


@pytest.fixture
def engine(monkeypatch):
    monkeypatch.setattr(vllm_engine, "set_environment", lambda settings: None)
    started = {}
    llm = Calls()
    monkeypatch.setattr(
        vllm_engine, "_start", lambda architecture, ends, given: started.update(given) or llm
    )

    def make(settings):
        made = vllm_engine.VllmEngine(engine_arguments(settings))
        return SimpleNamespace(engine=made, calls=llm.calls, given=started)

    return make


def refit(engine):
    engine.begin_refit()
    engine.load_weights([])
    engine.finish_refit()


def test_an_engine_wakes_for_weights_and_then_for_its_cache(engine):
    made = engine(VllmConfig().on_device(has_gpu=True, ahead=False))
    assert made.given["enable_sleep_mode"] is True
    assert made.given["enforce_eager"] is False
    assert made.given["kv_cache_memory_bytes"] is None
    loading = ["begin_refit", "load_refit_weights", "finish_refit"]
    refit(made.engine)  # awake
    assert made.calls == [*loading, "reset_prefix_cache"]
    made.calls.clear()
    made.engine.sleep()
    refit(made.engine)
    refit(made.engine)
    woken = ["sleep 2", "wake weights", *loading, "wake kv_cache", "reset_prefix_cache"]
    assert made.calls == [*woken, *loading, "reset_prefix_cache"]


def test_engines_on_cpu_and_on_several_devices(engine):
    given = engine(VllmConfig().on_device(has_gpu=False, ahead=False)).given
    assert given["enable_sleep_mode"] is False
    assert given["enforce_eager"] is True
    assert given["kv_cache_memory_bytes"] == 1024 * 2**20
    assert given["gpu_memory_utilization"] == 0.5
    assert "tensor_parallel_size" not in given
    settings = VllmConfig(tensor_parallel_size=2)
    given = engine(settings.on_device(has_gpu=True, ahead=False)).given
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
    several = dataclasses.replace(generation._settings, tensor_parallel_size=2)
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
