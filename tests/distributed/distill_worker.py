"""One rank of `test_distill_layouts`: two updates in each layout, rank 0 writes what it saw.

    MODEL TEACHER OUTPUT LAYOUT [LAYOUT ...]

A layout is ``data,tensor,context,pipeline,mode``: ``data`` is offline or on_policy, what is left of
the world is data parallel and the mode says how micro-batches are formed.
"""

import sys

import torch

torch.set_num_threads(1)

from aligner.algorithms.distill.build import TeacherTargets, distill_task, teacher_config
from aligner.algorithms.supervised.trainer import SupervisedTrainer
from aligner.config import DistillRunConfig, parse_config
from aligner.data.batches import PromptSampler
from aligner.data.dataset import Split
from aligner.data.prompts import PromptDataset
from aligner.data.supervised import ExampleDataset
from aligner.data.tokenizers.byte_tokenizer import byte_level_tokenizer
from aligner.distributed.workers import LocalCluster
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy
from aligner.observe.metrics import PhaseTimers
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

ROWS, TOP_K = 8, 12


def configuration(model: str, teacher: str, layout: str) -> DistillRunConfig:
    data, tensor, context, pipeline, mode = layout.split(",")

    def problems(split: str, size: int) -> dict[str, object]:
        arguments = {"split": split, "size": size, "shots": 1}
        return {
            "source": "aligner.examples.tasks.arithmetic:arithmetic_examples",
            "arguments": arguments,
        }

    return parse_config(
        {
            "model": {
                "restore_from_path": model,
                "micro_batch_size": 2,
                "global_batch_size": ROWS,
                "tensor_model_parallel_size": int(tensor),
                "context_parallel_size": int(context),
                "pipeline_model_parallel_size": int(pipeline),
                "sequence_packing": {"enabled": mode == "packed", "train_mb_tokens": 48},
                "dynamic_batching": {"enabled": mode == "dynamic", "train_mb_tokens": 64},
                "optim": {"lr": 1e-4, "eps": 1e-3},
                "distill": {
                    "length_params": {"max_length": 5},
                    "sampling_params": {"temperature": 0.8},
                },
            },
            "teacher": {"restore_from_path": teacher, "micro_batch_size": 4},
            "data": {"train": problems("train", 16), "validation": problems("validation", 5)},
            "trainer": {
                "distill": {
                    "kl": "mixed",
                    "mixed_weight": 0.4,
                    "top_k": TOP_K,
                    "on_policy": data == "on_policy",
                },
                "devices": 2,
            },
        },
        DistillRunConfig,
    )


def learn(model: str, teacher: str, layout: str) -> dict[str, object]:
    """What is reported of two updates and a validation, and the weights after them."""
    config = configuration(model, teacher, layout)
    tokenizer = byte_level_tokenizer()
    cluster = LocalCluster(initialize_parallel(config.model.parallel))
    run = RunSettings(gradient_clip_val=0.0)
    student, handle = (
        Policy(cluster, role, tokenizer, run=run, init_optimizer=learns, init_reference_model=False)
        for role, learns in ((config.model, True), (teacher_config(config), False))
    )
    kind = PromptDataset if config.trainer.distill.on_policy else ExampleDataset
    examples = Split.load(kind, config.data, tokenizer)
    seed = config.seed if config.trainer.distill.on_policy else None
    targets = TeacherTargets(handle, TOP_K, vocab_size=259, seed=seed)
    task = distill_task(config, examples, tokenizer.pad_id, targets)
    sampler = PromptSampler(len(task.train), ROWS, seed=3)
    trainer, timers = SupervisedTrainer(student, task, sampler), PhaseTimers()
    steps = [trainer.step(step, timers).metrics for step in (1, 2)]
    weights = student.worker_group.worker.model.whole_weights()
    return {
        "steps": [*steps, trainer.validate(2, timers).metrics],
        "weights": {name: value.clone() for name, value in weights.items()},
    }


def main() -> None:
    model, teacher, output, *layouts = sys.argv[1:]
    seen = {layout: learn(model, teacher, layout) for layout in layouts}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
