"""Actor and critic that score and train in each layout, as one rank of tests of layouts.

A layout is ``tensor,pipeline,context,sequence_parallel,mode``, with ``expert`` before the mode
where experts are shared out; what is left of the world is data parallel and the mode says how
micro-batches are formed. Mode ``masked`` is padded, and no sample of the batch's second half
counts. Modes ``shared`` and ``separate`` are padded and have a batch whose sequences begin alike,
which goes through the model once, or once a row. In ``recorded`` and ``recorded separate`` they are
conversations, too, and of the actor alone, with recorded sets of the tokens that top-p kept. In
``forked`` and ``forked separate`` rows hold several sequences, which begin alike, too. With
``lora`` or ``lora dropout`` before the mode adapters are trained, which begin as the file
`ADAPTERS` beside the model.
"""

from dataclasses import replace
from pathlib import Path

import torch

from aligner.checkpoint.model_source import open_model
from aligner.checkpoint.run_state.worker_state import save_worker_state
from aligner.config import (
    CriticConfig,
    DynamicBatchingConfig,
    LoraConfig,
    ModelConfig,
    OptimConfig,
    PeftConfig,
    PolicyPPOConfig,
    SamplingParams,
    SequencePackingConfig,
)
from aligner.distributed.batched_data_dict import BatchedDataDict
from aligner.distributed.workers import LocalCluster
from aligner.examples.tasks.tiny_model import TINY_ARCHITECTURE
from aligner.losses.policy import PPOPolicyLoss
from aligner.losses.value import PPOValueLoss
from aligner.models.gpt.role.settings import RunSettings
from aligner.models.policy.lm_policy import Policy
from aligner.models.value.lm_value import Value
from aligner.parallel.groups import initialize_parallel
from tests.batches import ppo_batch

ROWS, WIDTH = 8, 40
RUN = RunSettings(gradient_clip_val=0.0)
OPTIM = OptimConfig(lr=1e-4, eps=1e-3)
BEGIN_ALIKE = ("shared", "separate", "recorded", "recorded separate", "forked", "forked separate")
FORKS = [[17, 23], [9, 20, 9], [], [5, 7], [26, 14], [], [11, 12, 11], []]  # lengths of sequences
KEPT, VOCABULARY = 6, 259
# Learned positions, biases, and one weight for embedding and output.
TIED_GPT = replace(
    TINY_ARCHITECTURE,
    num_query_groups=8,
    activation="gelu_tanh",
    normalization="layernorm",
    position_embedding="learned_absolute",
    bias_linear=True,
    bias_qkv=True,
    tie_embeddings=True,
    family="gpt2",
)
LORA, ADAPTERS = LoraConfig(adapter_dim=4, alpha=6.0), "begin.lora.safetensors"


def make_batch(layout: str) -> BatchedDataDict:
    alike = layout.endswith(BEGIN_ALIKE)
    lengths = [40, 38, 36, 12, 40, 39, 34, 9] if alike else [16, 9, 33, 16, 5, 40, 2, 10]
    batch = ppo_batch(lengths, [4, 3, 6, 2, 1, 7, 1, 8], seed=11)
    batch["sample_mask"] = torch.tensor([1.0, 1, 0, 1, 1, 1, 1, 0])
    if layout.endswith("masked"):
        batch["sample_mask"][ROWS // 2 :] = 0
    ids, mask = batch["input_ids"], batch["token_mask"]
    if alike:
        ids[:3, :34] = ids[0, :34]
        ids[4:7, :34] = ids[4, :34]  # the last of them is all of it
    if ",forked" in layout:
        batch["position_ids"] = forked(ids)
        mask *= batch["position_ids"] > 1
    if is_recorded(layout):
        mask *= torch.arange(WIDTH) % 9 >= 3  # between them what an environment said
        batch["kept_ids"] = recorded_sets(ids)
        for name in ("prev_logprobs", "generation_logprobs"):
            batch[name].fill_(-1.5)
    return BatchedDataDict(batch)


def forked(ids: torch.Tensor) -> torch.Tensor:
    """Positions int64 [B, S]; sequences of one row begin with up to 8 tokens in common."""
    positions = torch.arange(WIDTH).repeat(ROWS, 1)
    for row, lengths in enumerate(FORKS):
        start = 0
        for length in lengths:
            alike = min(8, length - 1)
            ids[row, start : start + alike] = ids[row, :alike].clone()
            positions[row, start:] = torch.arange(WIDTH - start)
            start += length
    return positions


def is_recorded(layout: str) -> bool:
    return ",recorded" in layout


def recorded_sets(ids: torch.Tensor) -> torch.Tensor:
    """Another set for every token, int32 [B, S, K], -1 where there are fewer; some have none."""
    generator = torch.Generator().manual_seed(11)
    kept = torch.randint(0, VOCABULARY, (*ids.shape, KEPT), generator=generator).int()
    kept[..., 0] = ids
    kept[..., 2:][torch.rand(ids.shape, generator=generator) < 0.5] = -1
    kept[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return kept


def model_config(model: str, layout: str) -> ModelConfig:
    *sizes, mode = layout.split(",")
    tensor, pipeline, context, sequence, expert = [*map(int, sizes), 1][:5]
    ppo, peft, optim = PolicyPPOConfig(), PeftConfig(), OPTIM
    if mode.startswith("lora"):
        lora = replace(LORA, adapter_dropout=0.25 if "dropout" in mode else 0.0)
        peft = PeftConfig("lora", str(Path(model).with_name(ADAPTERS)), lora)
        optim = replace(OPTIM, lr=1e-3)
    if is_recorded(layout):
        sampling = SamplingParams(top_p=0.9)
        ppo = PolicyPPOConfig(sampling_params=sampling, record_kept_tokens=VOCABULARY)
    return ModelConfig(
        restore_from_path=model,
        micro_batch_size=4 if mode in BEGIN_ALIKE else 2,
        shared_prefixes=not mode.endswith("separate"),
        global_batch_size=ROWS,
        tensor_model_parallel_size=tensor,
        pipeline_model_parallel_size=pipeline,
        context_parallel_size=context,
        expert_model_parallel_size=expert,
        sequence_parallel=bool(sequence),
        sequence_packing=SequencePackingConfig(
            enabled=mode.endswith("packed"), train_mb_tokens=56, logprob_mb_tokens=80
        ),
        dynamic_batching=DynamicBatchingConfig(
            enabled=mode.endswith("dynamic"), train_mb_tokens=64, sequence_length_round=4
        ),
        optim=optim,
        ppo=ppo,
        peft=peft,
    )


def weights_of(handle: Policy | Value) -> dict[str, torch.Tensor]:
    weights = handle.worker_group.worker.model.whole_weights()
    return {name: value.clone() for name, value in weights.items()}


def trained_of(handle: Policy | Value) -> dict[str, torch.Tensor]:
    """Adapters, or weights where there are none."""
    adapters = handle.worker_group.worker.model.adapters
    if adapters is None:
        return weights_of(handle)
    return {name: value.clone() for name, value in adapters.gather().items()}


def gradient_of(handle: Policy | Value) -> dict[str, torch.Tensor]:
    """The last update's gradient, whole: it is left in the buffers, each rank's share there."""
    role = handle.worker_group.worker.model
    if role.model.ddp_config.use_distributed_optimizer:
        for buffer in (*role.model.buffers, *role.model.expert_parallel_buffers):
            for bucket in buffer.buckets:
                group = buffer.data_parallel_group
                share = bucket.grad_data.chunk(group.size())[group.rank()].clone()
                torch.distributed.all_gather_into_tensor(bucket.grad_data, share, group=group)
    parameters = [parameter for parameter in role.gpt.parameters() if parameter.requires_grad]
    values = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(parameter.main_grad)
    gradient = trained_of(handle)
    for parameter, value in zip(parameters, values, strict=True):
        parameter.data.copy_(value)
    return gradient


def handle_of(
    role: str, config: ModelConfig, critic: str | None = None, backend: str = "megatron"
) -> Policy | Value:
    """The actor or the critic of a layout. ``critic``: the file of another model for the critic."""
    cluster = LocalCluster(initialize_parallel(config.parallel))
    with open_model(config.restore_from_path) as source:
        tokenizer = source.tokenizer
    if role == "actor":
        return Policy(cluster, config, tokenizer, run=RUN, backend=backend)
    section = CriticConfig(
        critic, config.micro_batch_size, global_batch_size=ROWS, optim=config.optim
    )
    return Value(cluster, section, tokenizer, model=config, run=RUN, backend=backend)


def scores(handle: Policy | Value, batch: BatchedDataDict) -> torch.Tensor:
    """Log-probs of an actor, values of a critic."""
    if isinstance(handle, Policy):
        return handle.get_logprobs(batch)["logprobs"]
    return handle.get_values(batch)["values"]


def loss_of(handle: Policy | Value) -> PPOPolicyLoss | PPOValueLoss:
    if isinstance(handle, Policy):
        return PPOPolicyLoss(entropy_bonus=0.01)
    return PPOValueLoss(value_clip=0.2)


def two_updates(
    handle: Policy | Value, batch: BatchedDataDict, state: Path | None = None, resumes: bool = False
) -> dict[str, object]:
    """Scores before and after two updates, what was reported, and the weights along the way.

    ``state``: where the role is saved after the first update, or what it resumes from in place of
    that update; without ``state`` the gradient of the update is among what is returned.
    """
    loss, seen = loss_of(handle), {"before": scores(handle, batch)}
    if isinstance(handle, Policy):
        seen["one row"] = scores(handle, batch.slice(0, 1))  # fewer than ranks
    handle.prepare_for_training()
    if resumes:
        handle.load_state(state)
    else:
        seen["first"] = reported(handle.train(batch, loss))
        if state is None:
            seen["gradient"] = gradient_of(handle)
        else:
            save_worker_state(handle.worker_group.worker, str(state))
    seen["second"] = reported(handle.train(batch, loss))
    seen["weights"] = weights_of(handle)
    handle.prepare_for_inference()
    seen["after"] = scores(handle, batch)
    if isinstance(handle, Policy):
        seen["reference"] = handle.get_reference_policy_logprobs(batch)["reference_logprobs"]
    return seen


def learn(role: str, model: str, layout: str) -> dict[str, object]:
    """What `two_updates` returns for a layout, and what was trained."""
    handle = handle_of(role, model_config(model, layout))
    if isinstance(handle, Value):
        fill_head(handle)
    return {**two_updates(handle, make_batch(layout)), "trained": trained_of(handle)}


def fill_head(value: Value) -> None:
    """A fresh head is zero and lets no gradient into the body."""
    gpt = value.worker_group.worker.model.gpt
    if hasattr(gpt, "rm_head"):
        with torch.no_grad():
            gpt.rm_head.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(3))


def reported(result: dict[str, object]) -> dict[str, float]:
    metrics = {name: values[0] for name, values in result["all_mb_metrics"].items()}
    return {**metrics, "loss": result["loss"], "grad_norm": result["grad_norm"]}


def learn_all(model: str, layouts: list[str]) -> dict[str, dict[str, dict[str, object]]]:
    """What `learn` returns, by layout and role."""
    seen = {}
    for layout in layouts:
        roles = ["actor"] if is_recorded(layout) else ["actor", "critic"]
        seen[layout] = {role: learn(role, model, layout) for role in roles}
    return seen
