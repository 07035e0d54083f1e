"""One rank of `test_preference_layouts`: two updates in each layout, rank 0 writes what it saw.

    torchrun --nproc-per-node N preference_worker.py MODEL OUTPUT LAYOUT [LAYOUT ...]

A layout is ``loss,tensor,mode``; what is left of the world is data parallel and the mode says how
micro-batches are formed.
"""

import sys
from pathlib import Path

import torch

torch.set_num_threads(1)

from rich.console import Console

from aligner.algorithms.preference.build import ReferenceLogprobs, preference_task
from aligner.algorithms.supervised.trainer import SupervisedTrainer
from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import DPORunConfig, parse_config
from aligner.data.batches import PromptSampler
from aligner.data.dataset import Split
from aligner.data.preferences import LabelledDataset, PairDataset
from aligner.distributed.workers import LocalCluster
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

ROWS = 12


def configuration(model: str, layout: str) -> DPORunConfig:
    loss, tensor, mode = layout.split(",")
    source = "arithmetic_labels" if loss == "kto" else "arithmetic_pairs"

    def problems(split: str, size: int) -> dict[str, object]:
        arguments = {"split": split, "size": size, "shots": 1, "wrong_by": [1, 2000]}
        return {"source": f"aligner.examples.tasks.arithmetic:{source}", "arguments": arguments}

    return parse_config(
        {
            "model": {
                "restore_from_path": model,
                "micro_batch_size": 2,
                "global_batch_size": ROWS,
                "tensor_model_parallel_size": int(tensor),
                "sequence_packing": {"enabled": mode == "packed", "train_mb_tokens": 54},
                "dynamic_batching": {
                    "enabled": mode == "dynamic",
                    "train_mb_tokens": 72,
                    "sequence_length_round": 4,
                },
                "optim": {"lr": 1e-4, "eps": 1e-3},
            },
            "data": {"train": problems("train", 24), "validation": problems("validation", 5)},
            "trainer": {"dpo": {"loss": loss}, "devices": int(tensor)},
        },
        DPORunConfig,
    )


def learn(model: str, layout: str, folder: Path) -> dict[str, object]:
    """What is reported of two updates and a validation, and the weights after them."""
    config = configuration(model, layout)
    with open_nemo(model) as checkpoint:
        tokenizer = checkpoint.tokenizer
    cluster = LocalCluster(initialize_parallel(config.model.parallel))
    run = RunSettings(gradient_clip_val=0.0)
    policy = Policy(cluster, config.model, tokenizer, run=run, init_reference_model=False)
    kind = LabelledDataset if config.trainer.dpo.loss == "kto" else PairDataset
    sets = Split.load(kind, config.data, tokenizer).named
    path = folder / f"{torch.distributed.get_world_size()},{layout}.pt"
    asking = ReferenceLogprobs(policy, path, tokenizer.pad_id, Console(quiet=True))
    task = preference_task(config, asking.of(sets, config), tokenizer.pad_id)
    sampler = PromptSampler(len(task.train), ROWS // config.rows_per_example, seed=3)
    trainer, timers = SupervisedTrainer(policy, task, sampler), PhaseTimers()
    steps = [trainer.step(step, timers).metrics for step in (1, 2)]
    weights = policy.worker_group.worker.model.whole_weights()
    return {
        "steps": [*steps, trainer.validate(2, timers).metrics],
        "weights": {name: value.clone() for name, value in weights.items()},
    }


def main() -> None:
    model, output, *layouts = sys.argv[1:]
    folder = Path(output).parent
    seen = {layout: learn(model, layout, folder) for layout in layouts}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
