"""What the configuration of sampling engines refuses, and sampling in vLLM's words."""

import sys

import pytest
from settings import parsed

from aligner.config import LengthParams, RSRunConfig, SamplingParams, SamplingRunConfig
from aligner.device.counter_hash import text_hash
from aligner.errors import ConfigError
from aligner.generation.vllm.sampling import logprobs_mode, sampling_arguments
from aligner.generation.vllm.settings import VllmConfig

RAY = "cluster.engine=ray"
VLLM = f"generation.backend=vllm generation.vllm.python={sys.executable}"
AHEAD = f"{RAY} {VLLM} generation.async_rollouts=true"
CAPPED = "model.ppo.truncated_importance_sampling=2.0"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (f"{RAY} {VLLM}/none", r"generation.vllm.python=.*/none.*vllm-env"),
        (f"{RAY} {VLLM} generation.vllm.python=/", r"vllm.python=/ is not an interpreter"),
        (f"{RAY} {VLLM} generation.vllm.engines=2", r"engines=2 with refit=colocated.*there are 1"),
        (
            f"{RAY} {VLLM} generation.vllm.tensor_parallel_size=4",
            r"generation.vllm.engines=1 of tensor_parallel_size=4 each.*4 engine workers.*are 1",
        ),
        (
            f"{RAY} {VLLM} generation.vllm.kwargs.tensor_parallel_size=2",
            r"generation.vllm.kwargs.tensor_parallel_size=2.*Set generation.vllm.tensor_parallel",
        ),
        (f"{RAY} {VLLM} generation.vllm.refit=disk", r"refit: must be one of colocated, separate"),
        ("generation.backend=vlm", r"generation.backend: must be one of megatron, vllm"),
        (AHEAD, r"async_rollouts=true.*truncated_importance_sampling=null"),
        (f"{AHEAD} {CAPPED} generation.vllm.sleep=true", r"vllm.sleep=true.*async_rollouts=true"),
        (
            f"{AHEAD} {CAPPED} trainer.ppo.dynamic_sampling.enabled=true",
            r"async_rollouts=true.*dynamic_sampling.enabled=true",
        ),
    ],
)
def test_refusals(settings, message):
    with pytest.raises(ConfigError, match=message):
        parsed(settings)


def test_sampling_in_vllms_words():
    length = LengthParams(max_length=20, min_length=3)
    sampling = SamplingParams(temperature=0.7, top_k=5, top_p=0.9, repetition_penalty=1.2)
    arguments = sampling_arguments(length, sampling, eos_ids=(2, 7), seed=11, greedy=False)
    assert arguments == {
        **{"temperature": 0.7, "top_k": 5, "top_p": 0.9, "repetition_penalty": 1.2, "seed": 11},
        # vLLM counts the least length without the end that is being drawn.
        **{"min_tokens": 2, "max_tokens": 20, "stop_token_ids": [2, 7], "ignore_eos": True},
        **{"logprobs": 0, "detokenize": False},
    }
    greedy = sampling_arguments(LengthParams(), sampling, eos_ids=(2,), seed=11, greedy=True)
    assert (greedy["temperature"], greedy["seed"], greedy["min_tokens"]) == (0.0, None, 0)


def test_logprobs_are_of_the_distribution_drawn_from():
    assert logprobs_mode(SamplingParams()) == "raw_logprobs"
    for change in ("temperature", 0.9), ("top_k", 4), ("top_p", 0.5), ("repetition_penalty", 1.1):
        assert logprobs_mode(SamplingParams(**dict([change]))) == "processed_logprobs"


def test_seeds_are_of_run_and_sample_alone():
    seeds = {text_hash(seed, sample) for seed in range(20) for sample in range(200)}
    assert len(seeds) == 4000
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert text_hash(3, 4) == 2331190576437422291  # the same in every version and process


def test_defaults_go_by_the_device():
    on_cpu = VllmConfig().on_device(has_gpu=False, ahead=False)
    assert (on_cpu.kv_cache_mb, on_cpu.enforce_eager, on_cpu.sleep) == (1024, True, False)
    assert on_cpu.gpu_memory_utilization == 0.5
    on_gpu = VllmConfig().on_device(has_gpu=True, ahead=False)
    assert (on_gpu.kv_cache_mb, on_gpu.enforce_eager, on_gpu.sleep) == (None, False, True)
    assert "50% of it after the weights, compiled graphs" in on_gpu.in_words()
    assert on_gpu.in_words().endswith("memory between rollouts released")
    ahead = VllmConfig().on_device(has_gpu=True, ahead=True)  # it draws while the policy trains
    assert not ahead.sleep
    apart = VllmConfig(refit="separate").on_device(has_gpu=True, ahead=False)
    assert (apart.gpu_memory_utilization, apart.sleep) == (0.9, False)
    given = VllmConfig(kv_cache_mb=64, enforce_eager=True, sleep=False, gpu_memory_utilization=0.3)
    for has_gpu in (False, True):
        assert given.on_device(has_gpu=has_gpu, ahead=False) == given
    several = VllmConfig(engines=2, tensor_parallel_size=2)
    assert several.on_device(has_gpu=True, ahead=False).workers == 4
    with pytest.raises(ConfigError, match=r"vllm.engines=2 of tensor_parallel_size=2 each.*to 1"):
        several.on_device(has_gpu=False, ahead=False)
    with pytest.raises(ConfigError, match=r"generation.vllm.sleep=true: on CPU"):
        VllmConfig(sleep=True).on_device(has_gpu=False, ahead=False)


def test_engines_have_workers_of_their_own_in_every_run_that_samples():
    """Rejection sampling, too: with refit=separate its engines were put beside the policy."""
    assert parsed(f"{RAY} {VLLM}").generation_world_size == 0  # beside the policy
    separate = "generation.vllm.refit=separate generation.vllm.engines=3"
    config = parsed(f"{RAY} {VLLM} {separate} generation.vllm.tensor_parallel_size=2")
    assert config.generation_world_size == 6
    assert type(config).generation_world_size is SamplingRunConfig.generation_world_size
    assert RSRunConfig.generation_world_size is SamplingRunConfig.generation_world_size
