"""One rank of `test_lora_layouts`: actor and critic with adapters in each layout.

    torchrun --nproc-per-node N lora_worker.py MODEL ADAPTERS OUTPUT LAYOUT [LAYOUT ...]

Layouts are those of `layout_worker`, with ``dropout`` before the mode where adapters drop out.
Rank 0 writes what it saw.
"""

import dataclasses
import sys

import torch

torch.set_num_threads(1)

from layout_worker import (
    OPTIM,
    gradient_of,
    handle_of,
    loss_of,
    make_batch,
    model_config,
    reference,
    reported,
    scores,
    weights_of,
)

from aligner.config import LoraConfig, ModelConfig, OptimConfig, PeftConfig
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import shutdown_parallel

LORA = LoraConfig(adapter_dim=4, alpha=6.0)
LEARNING = OptimConfig(lr=1e-3, eps=OPTIM.eps)


def config_of(model: str, adapters: str, layout: str) -> ModelConfig:
    drops = "dropout" in layout
    lora = dataclasses.replace(LORA, adapter_dropout=0.25 if drops else 0.0)
    return dataclasses.replace(
        model_config(model, layout.replace("dropout,", "")),
        peft=PeftConfig("lora", adapters, lora),
        optim=LEARNING,
    )


def adapters_of(handle: Policy | Value) -> dict[str, torch.Tensor]:
    gathered = handle.worker_group.worker.model.adapters.gather()
    return {name: value.clone() for name, value in gathered.items()}


def learn(role: str, config: ModelConfig, layout: str) -> dict[str, object]:
    """Two updates: what was reported, the first gradient, the weights they led to."""
    batch, handle = make_batch(layout), handle_of(role, config, LEARNING)
    loss, before = loss_of(handle), scores(handle, batch)
    handle.prepare_for_training()
    first = handle.train(batch, loss)
    seen = {"first": reported(first), "gradient": gradient_of(handle, adapters_of)}
    seen["second"] = reported(handle.train(batch, loss))
    seen["trained"] = adapters_of(handle)
    seen["merged"] = weights_of(handle)
    handle.prepare_for_inference()
    after = scores(handle, batch)
    return {**seen, "before": before, "after": after, **reference(handle, batch)}


def main() -> None:
    model, adapters, output, *layouts = sys.argv[1:]
    seen = {}
    for layout in layouts:
        config = config_of(model, adapters, layout)
        seen[layout] = {role: learn(role, config, layout) for role in ("actor", "critic")}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
