"""aligner's side of `ppo_step` and `grpo_step`: `PPOTrainer` as a run builds it.

A random `.nemo` and a word tokenizer are written to a temporary directory and the roles are loaded
from there. Not measured: start-up, validation, and what the run loop writes.
"""

import json
import statistics
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from aligner.algorithms.ppo.build import make_policy_loss, start_roles
from aligner.algorithms.ppo.trainer import PPOTrainer
from aligner.algorithms.rollout.inputs import Prompts
from aligner.algorithms.run.engine import Clusters, Workers
from aligner.algorithms.run.startup import describe_model
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.nemo.model_file import save_nemo
from aligner.config import RunConfig
from aligner.config.load import parse_config
from aligner.data.batches import PromptSampler
from aligner.data.prompts import PromptDataset
from aligner.data.tokenizers.hf import HuggingFaceTokenizer
from aligner.distributed.workers import LocalCluster
from aligner.examples.tasks.tiny_model import random_weights
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.groups import initialize_parallel
from aligner.rewards.function.runner import Reward
from benchmarks.common import stdout_reserved
from benchmarks.ppo_shape import (
    GAMMA,
    INIT_STD,
    KL_COEFFICIENT,
    LAM,
    LEARNING_RATE,
    RATIO_CLIP,
    SEED,
    VALUE_CLIP,
    Shape,
    StepClock,
    shape_of,
)
from benchmarks.words import END, text_of, word_backend


def measure(shape: Shape) -> dict[str, Any]:
    """Run one step to warm up, then ``shape.steps`` steps."""
    torch.set_num_threads(shape.threads)
    clock, timers = StepClock(), PhaseTimers()
    phases: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(shape, Path(folder))
        clock.tick()
        for step in range(1, shape.steps + 2):
            outcome = trainer.step(step, timers)
            clock.tick()
            phases.append(timers.flush())
            length = outcome.metrics["train_rollouts/generation_length"]
            assert length == shape.response, f"responses of {length} tokens"
    medians = {
        name.removeprefix("timers/"): round(statistics.median(row[name] for row in phases[1:]), 4)
        for name in phases[0]
    }
    return {**clock.report("aligner", shape), "phases_s": medians}


def make_trainer(shape: Shape, folder: Path) -> PPOTrainer:
    """Build everything that a run builds before its first step, with the same functions."""
    config = configuration(shape, folder)
    write_model(shape, Path(config.model.restore_from_path))
    parallel = initialize_parallel(config.model.parallel, seed=config.seed)
    tokenizer, architecture = describe_model(config.model)
    prompts = PromptDataset.load(config.data.train, tokenizer, config.data)
    assert prompts.max_length == shape.prompt
    clusters = Clusters.shared(LocalCluster(parallel))
    workers = Workers(config, tokenizer, architecture, clusters, ExitStack())
    policy, value = start_roles(config, workers, shape.steps + 1)
    return PPOTrainer(
        config=config,
        policy=policy,
        value=value,
        reward=Reward.load(config.reward, tokenizer),
        prompts=Prompts(prompts),
        sampler=PromptSampler(len(prompts), shape.batch // shape.group, seed=config.seed),
        generation=policy,
        pad_id=tokenizer.pad_id,
        policy_loss=make_policy_loss(config),
        estimator=None,
    )


def configuration(shape: Shape, folder: Path) -> RunConfig:
    """Return the defaults with the settings of both sides."""
    of_groups = shape.group > 1
    reward = "noise" if of_groups else "constant_reward"
    batches: dict[str, Any] = {
        "micro_batch_size": shape.micro_batch,
        "global_batch_size": shape.batch,
        "optim": {"lr": LEARNING_RATE, "betas": [0.9, 0.999]},
    }
    return parse_config(
        {
            "seed": SEED,
            "model": {
                "restore_from_path": str(folder / "model.nemo"),
                **batches,
                "ppo": {
                    "num_rollout_samples": shape.batch,
                    "num_rollouts_per_prompt": shape.group,
                    "rollout_micro_batch_size": shape.batch,
                    "forward_micro_batch_size": shape.micro_batch,
                    "ppo_epochs": 1,
                    "ratio_eps": RATIO_CLIP,
                    "length_params": {"max_length": shape.response, "min_length": shape.response},
                },
            },
            "critic": None
            if of_groups
            else {
                **batches,
                "forward_micro_batch_size": shape.micro_batch,
                "value_clip": VALUE_CLIP,
            },
            "trainer": {
                "ppo": {
                    "initial_policy_kl_penalty": 0.0 if of_groups else KL_COEFFICIENT,
                    "discount_factor": GAMMA,
                    "gae_lambda": LAM,
                    "normalize_advantages": not of_groups,
                    "advantage": {"estimator": "grpo" if of_groups else "gae"},
                }
            },
            "reward": {"function": f"benchmarks.ppo_aligner:{reward}"},
            "data": {
                "train": {
                    "source": "benchmarks.ppo_aligner:prompt_rows",
                    "arguments": {
                        "count": shape.batch // shape.group * (shape.steps + 1),
                        "length": shape.prompt,
                        "vocab": shape.vocab,
                    },
                },
                "ground_truth_column": None,
            },
            "exp_manager": {"explicit_log_dir": str(folder / "run")},
        }
    )


def write_model(shape: Shape, path: Path) -> None:
    """Write a random Llama and its tokenizer as a `.nemo`."""
    architecture = GPTArchitecture(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        ffn_hidden_size=shape.mlp_width,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.hidden // shape.heads,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.prompt + shape.response,
        init_std=INIT_STD,
        tie_embeddings=bool(shape.tied),
        family="llama",
    )
    backend = word_backend(shape.vocab)
    tokenizer = HuggingFaceTokenizer(backend, {"eos_token": END}, origin="the word tokenizer")
    save_nemo(path, random_weights(architecture), architecture, tokenizer.files())


def prompt_rows(count: int, length: int, vocab: int) -> Iterator[dict[str, str]]:
    """Return random prompts of ``length`` words."""
    generator = torch.Generator().manual_seed(SEED)
    for ids in torch.randint(0, vocab - 1, (count, length), generator=generator).tolist():
        yield {"prompt": text_of(ids)}


def constant_reward(prompts: list[str], responses: list[str], ground_truths: list) -> list[float]:
    """Return a constant reward."""
    del prompts, ground_truths
    return [1.0] * len(responses)


def noise(prompts: list[str], responses: list[str], ground_truths: list) -> list[float]:
    """Return rewards that differ between the responses to a prompt."""
    del prompts, ground_truths
    return [float(len(response) % 7) for response in responses]


if __name__ == "__main__":
    with stdout_reserved():
        result = measure(shape_of())
    print(json.dumps(result))
