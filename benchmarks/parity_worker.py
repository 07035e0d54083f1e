"""One process of `parity`: every row of the matrix in each layout. Rank 0 writes what it saw.

    torchrun --nproc-per-node N -m benchmarks.parity_worker MODEL OUTPUT LAYOUT [LAYOUT ...]

Scores, training and layouts are those of the distributed tests (`layout_worker`). Generation and
the whole PPO step are here. A row is a tensor, a number, a dict of them, or the sentence with which
the layout refuses it.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from aligner.algorithms.ppo.build import make_policy_loss, start_roles
from aligner.algorithms.ppo.trainer import PPOTrainer
from aligner.algorithms.rollout.inputs import Prompts
from aligner.algorithms.run.engine import Clusters, Workers
from aligner.algorithms.run.startup import describe_model
from aligner.config import (
    CriticConfig,
    DataConfig,
    LengthParams,
    PolicyPPOConfig,
    PromptSourceConfig,
    RewardConfig,
    RunConfig,
    TrainerConfig,
    TrainerPPOConfig,
)
from aligner.data.batches import PromptSampler, collate_prompts
from aligner.data.prompts import PromptDataset
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.errors import LayoutError
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.groups import initialize_parallel, shutdown_parallel
from aligner.rewards.function.runner import Reward
from tests.distributed.layout_worker import OPTIM, ROWS, fill_head, learn, model_config

Row = Any  # tensor, float, dict of either, or a sentence
PROMPTS, SEED = 16, 7


def rows_of(model: str, layout: str) -> dict[str, Row]:
    """Return every row of one column."""
    policy, value = (learn(role, model, layout) for role in ("actor", "critic"))
    return {
        "log-probs": policy["before"],
        "reference log-probs": policy["reference"],
        "values": value["before"],
        **_training("actor", policy),
        **_training("critic", value),
        **rollout_rows(model, layout),
    }


def _training(role: str, outputs: dict[str, Any]) -> dict[str, Row]:
    first = outputs["first"]
    return {
        f"{role} loss": first["loss"],
        f"{role} gradient norm": first["grad_norm"],
        f"{role} per-parameter gradients": outputs["gradient"],
        f"{role} parameters after 2 steps": outputs["weights"],
    }


def rollout_rows(model: str, layout: str) -> dict[str, Row]:
    """Return responses, greedy and sampled, and the metrics of one whole PPO step."""
    trainer = make_trainer(model, layout)
    return {
        "greedy generation": unless_refused(lambda: responses(trainer, greedy=True)),
        "sampled generation": unless_refused(lambda: responses(trainer, greedy=False)),
        "one PPO step's metrics": unless_refused(lambda: trainer.step(1, PhaseTimers()).metrics),
    }


def unless_refused(make: Any) -> Row:
    """Return the result of ``make``, or the message that refuses the layout."""
    try:
        return make()
    except LayoutError as error:
        return str(error)


def responses(trainer: PPOTrainer, *, greedy: bool) -> dict[str, torch.Tensor]:
    """Return tokens and lengths of the responses to the first prompts."""
    prompts = collate_prompts([trainer.prompts.train[row] for row in range(ROWS)], trainer.pad_id)
    data: BatchedDataDict = BatchedDataDict(
        {
            "input_ids": prompts.input_ids,
            "input_lengths": prompts.input_lengths,
            "sample_ids": torch.arange(ROWS),
        }
    )
    trainer.policy.prepare_for_generation()
    output = trainer.policy.generate(data, greedy=greedy, seed=SEED)
    trainer.policy.finish_generation()
    return {"tokens": output["output_ids"], "lengths": output["unpadded_sequence_lengths"]}


def make_trainer(model: str, layout: str) -> PPOTrainer:
    """Build a run's trainer with the functions of a run."""
    config = configuration(model, layout)
    parallel = initialize_parallel(config.model.parallel, seed=config.seed)
    tokenizer, architecture = describe_model(config.model)
    prompts = PromptDataset.load(config.data.train, tokenizer, config.data)
    clusters = Clusters.shared(LocalCluster(parallel))
    workers = Workers(config, tokenizer, architecture, clusters, ExitStack())
    policy, value = start_roles(config, workers, steps=1)
    assert value is not None
    fill_head(value)
    return PPOTrainer(
        config=config,
        policy=policy,
        value=value,
        reward=Reward.load(config.reward, tokenizer),
        prompts=Prompts(prompts),
        sampler=PromptSampler(len(prompts), PROMPTS, seed=config.seed),
        generation=policy,
        pad_id=tokenizer.pad_id,
        policy_loss=make_policy_loss(config),
        estimator=None,
    )


def configuration(model: str, layout: str) -> RunConfig:
    """Return a step of two updates of policy and critic, with every term of the losses."""
    ppo = PolicyPPOConfig(
        num_rollout_samples=PROMPTS,
        rollout_micro_batch_size=3,  # fewer than a rank's share: sequences take freed slots
        forward_micro_batch_size=4,
        entropy_bonus=0.01,
        length_params=LengthParams(max_length=12),
    )
    return RunConfig(
        model=replace(model_config(model, layout), ppo=ppo),
        critic=CriticConfig(
            micro_batch_size=2, global_batch_size=ROWS, forward_micro_batch_size=4, optim=OPTIM
        ),
        reward=RewardConfig(function="benchmarks.parity_worker:letters"),
        data=DataConfig(
            PromptSourceConfig("benchmarks.parity_worker:prompt_rows"), ground_truth_column=None
        ),
        seed=SEED,
        trainer=TrainerConfig(
            devices=torch.distributed.get_world_size(),
            ppo=TrainerPPOConfig(initial_policy_kl_penalty=0.05),
        ),
    )


def prompt_rows() -> Iterator[dict[str, str]]:
    """Return prompts of 3 to 18 bytes."""
    for number in range(PROMPTS):
        yield {"prompt": "say it again, please"[number % 3 :][: 3 + number]}


def letters(prompts: list[str], responses: list[str], ground_truths: list) -> list[float]:
    """Return rewards that differ between responses."""
    del prompts, ground_truths
    return [sum(ord(letter) % 7 for letter in text) / 20 for text in responses]


def main() -> None:
    """Run every layout, then write the file."""
    model, output, *layouts = sys.argv[1:]
    outputs = {layout: rows_of(model, layout) for layout in layouts}
    if torch.distributed.get_rank() == 0:
        torch.save(outputs, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
