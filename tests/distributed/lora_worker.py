"""One rank of `test_lora_layouts`: actor and critic with adapters in each layout.

    torchrun --nproc-per-node N lora_worker.py MODEL ADAPTERS OUTPUT LAYOUT [LAYOUT ...]

Layouts are those of `layout_worker`, with ``dropout`` before the mode where adapters drop out.
Rank 0 writes what it saw.
"""

import dataclasses
import sys

import torch

torch.set_num_threads(1)

from layout_worker import OPTIM, ROWS, RUN, fill_head, make_batch, model_config, reported

from aligner.checkpoint.nemo.model_file import open_nemo
from aligner.config import CriticConfig, LoraConfig, ModelConfig, OptimConfig, PeftConfig
from aligner.distributed.workers import LocalCluster
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import initialize_parallel, shutdown_parallel

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


def gradient_of(handle: Policy | Value) -> dict[str, torch.Tensor]:
    """The last update's gradient of what is trained, whole."""
    role = handle.worker_group.worker.model
    if role.model.ddp_config.use_distributed_optimizer:
        for buffer in role.model.buffers:
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)
    trained = [parameter for parameter in role.gpt.parameters() if parameter.requires_grad]
    values = [parameter.data.clone() for parameter in trained]
    for parameter in trained:
        parameter.data.copy_(parameter.main_grad)
    gradient = {name: value.clone() for name, value in role.adapters.gather().items()}
    for parameter, value in zip(trained, values, strict=True):
        parameter.data.copy_(value)
    return gradient


def learn(handle: Policy | Value, batch: object, loss: object) -> dict[str, object]:
    """Two updates: what was reported, the first gradient, the weights they led to."""
    role = handle.worker_group.worker.model
    handle.prepare_for_training()
    first = handle.train(batch, loss)
    seen = {"first": reported(first), "gradient": gradient_of(handle)}
    seen["second"] = reported(handle.train(batch, loss))
    seen["trained"] = {name: value.clone() for name, value in role.adapters.gather().items()}
    seen["merged"] = {name: value.clone() for name, value in role.whole_weights().items()}
    handle.prepare_for_inference()
    return seen


def actor(config: ModelConfig, layout: str) -> dict[str, object]:
    batch = make_batch(layout)
    with open_nemo(config.restore_from_path) as checkpoint:
        cluster = LocalCluster(initialize_parallel(config.parallel))
        policy = Policy(cluster, config, checkpoint.tokenizer, run=RUN)
    before = policy.get_logprobs(batch)["logprobs"]
    seen = learn(policy, batch, PPOPolicyLoss(entropy_bonus=0.01))
    return {
        **seen,
        "before": before,
        "after": policy.get_logprobs(batch)["logprobs"],
        "reference": policy.get_reference_policy_logprobs(batch)["reference_logprobs"],
    }


def critic(config: ModelConfig, layout: str) -> dict[str, object]:
    batch = make_batch(layout)
    section = CriticConfig(micro_batch_size=2, global_batch_size=ROWS, optim=LEARNING)
    with open_nemo(config.restore_from_path) as checkpoint:
        cluster = LocalCluster(initialize_parallel(config.parallel))
        value = Value(cluster, section, checkpoint.tokenizer, model=config, run=RUN)
    fill_head(value)
    before = value.get_values(batch)["values"]
    seen = learn(value, batch, PPOValueLoss(value_clip=0.2))
    return {**seen, "before": before, "after": value.get_values(batch)["values"]}


def main() -> None:
    model, adapters, output, *layouts = sys.argv[1:]
    seen = {}
    for layout in layouts:
        config = config_of(model, adapters, layout)
        seen[layout] = {"actor": actor(config, layout), "critic": critic(config, layout)}
    if torch.distributed.get_rank() == 0:
        torch.save(seen, output)
    shutdown_parallel()


if __name__ == "__main__":
    main()
