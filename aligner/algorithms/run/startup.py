"""Before the first step: the model's description, lengths, and the start-up report."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from aligner.algorithms.run.engine import Workers
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapter_shapes, check_same, read_adapters
from aligner.checkpoint.canonical import expected_shapes
from aligner.checkpoint.model_source import open_model
from aligner.config import (
    BaseRunConfig,
    SamplingRunConfig,
    SupervisedRunConfig,
    TrainedModelConfig,
)
from aligner.config.parse import refuse
from aligner.data.prompts import PromptDataset
from aligner.data.tokenizers.loading import (
    named_tokenizer,
    with_chat_template,
    with_template_kwargs,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device.accelerator import DeviceInfo
from aligner.device.host_memory import available_bytes
from aligner.errors import ConfigError
from aligner.foreign_keys import IGNORED
from aligner.logprobs.output_layer import tile_bytes
from aligner.observe.memory import RoleMemory, activation_bytes, head_bytes, kv_cache_bytes
from aligner.observe.startup import (
    BatchPlan,
    StartupSummary,
    TrainedRole,
    batch_arithmetic,
    saving_sentence,
)
from aligner.packages import find_packages, untried_versions


def describe_model_of(config: BaseRunConfig) -> tuple[Tokenizer, GPTArchitecture]:
    """`describe_model` of a run's model, with the chat template that the run's conversations have.

    Raises:
        ConfigError: ``environment.chat_template`` or ``data.chat_template_kwargs`` cannot be used.
    """
    tokenizer, architecture = describe_model(config.model)
    if isinstance(config, SamplingRunConfig) and config.environment.chat_template is not None:
        template, key = config.environment.chat_template, "environment.chat_template"
        tokenizer = with_chat_template(tokenizer, template, key=key)
    assert isinstance(config, SamplingRunConfig | SupervisedRunConfig), "every run has data"
    return with_template_kwargs(tokenizer, config.data.chat_template_kwargs), architecture


def describe_model(model: TrainedModelConfig) -> tuple[Tokenizer, GPTArchitecture]:
    """Tokenizer and architecture of the model, without reading its weights.

    Adapters that do not fit it are refused.
    """
    with open_model(model.restore_from_path) as checkpoint:
        tokenizer = (
            checkpoint.tokenizer
            if model.tokenizer is None
            else named_tokenizer(model.tokenizer, key="model.tokenizer")
        )
        architecture = checkpoint.architecture
    lora, path = model.peft.lora, model.peft.restore_from_path
    if lora is not None:
        adapter_shapes(architecture, lora)  # refuses targets that the model lacks
        if path is not None:
            check_same(lora, read_adapters(path, architecture).lora, path)
    return tokenizer.with_end_tokens(model.rollout.sampling_params.end_tokens), architecture


def count_parameters(architecture: GPTArchitecture) -> int:
    """Parameters of the whole model, without a role's head."""
    return sum(math.prod(shape) for shape in expected_shapes(architecture).values())


def check_lengths(
    config: SamplingRunConfig, architecture: GPTArchitecture, longest_prompt: int
) -> None:
    """Refuse prompts that leave no room for a response, in the model or in a token budget."""
    refuse(config.length_problems(longest_prompt))
    check_room(
        architecture,
        longest_prompt,
        f"{config.model.rollout_key}.length_params.max_length",
        config.model.rollout.length_params.max_length,
    )


def check_room(
    architecture: GPTArchitecture,
    longest_prompt: int,
    key: str,
    response: int,
    limit_key: str = "data.max_prompt_length",
) -> None:
    """Refuse prompts that leave no room for ``response`` new tokens, which ``key`` asks for.

    ``limit_key``: the key that limits prompts.
    """
    positions = architecture.max_position_embeddings
    if longest_prompt + response <= positions:
        return
    remedy = (
        f"set {limit_key}={positions - response} to drop longer prompts, or lower max_length"
        if positions > response
        else f"lower max_length below {positions}"
    )
    raise ConfigError(
        f"the longest prompt has {longest_prompt} tokens and {key}={response} more may follow, but "
        f"the model has {positions} positions; {remedy}"
    )


def dropout_in_words(model: TrainedModelConfig, architecture: GPTArchitecture) -> str:
    """Dropout in training, and the checkpoint's own rates where they differ."""
    own = f"{architecture.hidden_dropout:g} of hidden states, {architecture.attention_dropout:g} "
    own += "of attention weights"
    if model.dropout is None:
        return f"dropout as in the checkpoint: {own}"
    dropout = f"dropout {model.dropout:g}"
    if architecture.with_dropout(model.dropout) == architecture:
        return dropout
    return f"{dropout} (in the checkpoint: {own}; model.dropout=null brings it back)"


def repetition_in_words(config: SamplingRunConfig, *, on_gpus: bool) -> str:
    """Ways in which a GPU run that is repeated or resumed may differ; empty on a CPU."""
    if not on_gpus:
        return ""
    engine = config.generation.engine
    drawn = "" if engine is None else f" {engine.title}'s samples may differ."
    if config.trainer.deterministic:
        return f"trainer.deterministic: the same run twice is the same to the bit.{drawn}"
    return (
        "A resumed run goes on from the exact state, but sums are made in varying order (flash "
        "attention's gradient, gathered rows, NCCL): numbers differ in their last bits, and "
        f"samples in time. trainer.deterministic=true has them repeat.{drawn}"
    )


@dataclass(frozen=True)
class Summary:
    """Summary of a run, for its start-up report.

    Args:
        restores: what a run state brings back, in words.
        batches: how many of what makes a step, one sentence each.
        memory: models per process.
        longest: tokens of the longest sequence that is trained.
        notes: anything else to be read before the first step.
    """

    restores: Sequence[str]
    batches: Sequence[str]
    memory: Sequence[RoleMemory]
    longest: int
    notes: Sequence[str] = ()


def sampling_summary(
    config: SamplingRunConfig,
    workers: Workers,
    prompts: PromptDataset,
    *,
    steps: int,
    trained: Sequence[TrainedRole],
    passes: int = 1,
    with_reference: bool = False,
    frozen: Sequence[RoleMemory] = (),
    restores: Sequence[str],
    notes: Sequence[str],
) -> Summary:
    """Summary of a run that samples.

    ``prompts``: those of training; ``trained``: roles that go ``passes`` times over every rollout;
    ``with_reference``: the initial policy is kept; ``frozen``: further models.
    """
    architecture = workers.architecture
    data_size = config.model.parallel.data_size(workers.clusters.policy.world_size())
    rollout = config.model.rollout
    plan = BatchPlan(
        steps=steps,
        train_prompts=len(prompts),
        num_rollout_samples=rollout.num_rollout_samples,
        num_rollouts_per_prompt=rollout.num_rollouts_per_prompt,
        rollout_micro_batch_size=rollout.rollout_micro_batch_size,
        data_parallel_size=data_size,
        ppo_epochs=passes,
        roles=trained,
    )
    # Memory of the roles of the run's own model, the last that is trained first.
    roles = [
        role_memory(
            config,
            architecture,
            role.data_parallel_size or data_size,
            role.name,
            model_parallel_size=role.model_parallel_size,
        )
        for role in reversed(trained)
    ]
    if with_reference and config.model.peft.lora is None:  # else it is the policy without adapters
        roles.append(role_memory(config, architecture, data_size, "reference", trainable=False))
    return Summary(
        restores,
        batch_arithmetic(plan),
        [*roles, *frozen],
        prompts.max_length + rollout.length_params.max_length,
        notes,
    )


def startup_summary(
    config: BaseRunConfig,
    architecture: GPTArchitecture,
    processes: int,
    device: DeviceInfo,
    summary: Summary,
) -> StartupSummary:
    """Everything the start-up report shows of a new run.

    ``processes``: workers of the policy; ``device``: what they compute on.
    """
    cache: dict[str, int] = {}
    repetition, ignored = "", ", ".join(IGNORED)
    if isinstance(config, SamplingRunConfig):
        cache = {"KV cache": _cache_memory(config, architecture, summary.longest)}
        repetition = repetition_in_words(config, on_gpus=device.has_gpu)
    return StartupSummary(
        processes=processes,
        algorithm=config.algorithm,
        model=config.model.restore_from_path,
        log_dir=config.exp_manager.explicit_log_dir,
        batches=summary.batches,
        roles=summary.memory,
        working_bytes={
            **cache,
            **training_memory(config, architecture, summary.longest, on_gpus=device.has_gpu),
        },
        run_states=saving_sentence(
            summary.memory,
            in_background=config.exp_manager.async_save,
            processes_here=max(1, processes // config.trainer.num_nodes),
            free_bytes=available_bytes(),
        ),
        packages=find_packages(),
        dropout=dropout_in_words(config.model, architecture),
        repetition=repetition,
        device=device,
        notes=[
            *summary.notes,
            *untried_versions(),
            *([f"ignored, since no result depends on it here: {ignored}"] if ignored else []),
        ],
    )


def trained_policy(config: SamplingRunConfig) -> TrainedRole:
    """Sentence on how the policy is trained."""
    return TrainedRole("policy", config.model.global_batch_size, config.model.micro_batch_size)


def role_memory(
    config: BaseRunConfig,
    architecture: GPTArchitecture,
    data_size: int,
    name: str,
    *,
    trainable: bool = True,
    model_parallel_size: int | None = None,
) -> RoleMemory:
    """Memory of a role of the run's model, on ``data_size`` data-parallel ranks.

    ``model_parallel_size``: default the policy's.
    """
    low_precision = config.trainer.precision == "bf16"
    lora = config.model.peft.lora if trainable else None
    adapters = {} if lora is None else adapter_shapes(architecture, lora)
    return RoleMemory(
        name,
        count_parameters(architecture),
        trainable,
        model_parallel_size=model_parallel_size or config.model.parallel.model_parallel_size,
        optimizer_shards=data_size,
        weight_bytes=2 if low_precision else 4,
        optimizer_bytes=12 if low_precision else 8,
        adapter_parameters=sum(math.prod(shape) for shape in adapters.values()),
    )


def _cache_memory(config: SamplingRunConfig, architecture: GPTArchitecture, length: int) -> int:
    """Bytes per process of the keys and values of sequences of ``length`` tokens in flight."""
    cache = kv_cache_bytes(
        layers=architecture.num_layers // config.model.pipeline_model_parallel_size,
        query_groups=architecture.num_query_groups,
        kv_channels=architecture.kv_channels,
        sequences=config.model.rollout.rollout_micro_batch_size,
        length=length,
        value_bytes=2 if config.trainer.precision == "bf16" else 4,
    )
    return cache // config.model.tensor_model_parallel_size


def training_memory(
    config: BaseRunConfig, architecture: GPTArchitecture, length: int, *, on_gpus: bool
) -> dict[str, int]:
    """Bytes per process of a training micro-batch, by what holds them.

    Of as many tokens as the budget of packed or dynamic micro-batches allows, else of sequences of
    ``length`` tokens. Left out are the device's context, buffers of NCCL, fragmentation and what
    `activation_bytes` and `head_bytes` leave out.
    """
    model = config.model
    budgets = model.token_budgets
    tokens = model.micro_batch_size * length if budgets is None else budgets.train_mb_tokens
    here = tokens // model.context_parallel_size
    layers = activation_bytes(
        layers=architecture.num_layers // model.pipeline_model_parallel_size,
        hidden_size=architecture.hidden_size,
        tokens=here,
        value_bytes=2 if config.trainer.precision == "bf16" else 4,
        recompute=model.activations_checkpoint_granularity == "full",
    )
    columns = architecture.padded_vocab_size(model.tensor_model_parallel_size)
    logits = here * columns // model.tensor_model_parallel_size * 4
    return {
        "activations": layers // model.tensor_model_parallel_size,
        "output layer": head_bytes(
            hidden_size=architecture.hidden_size,
            tokens=here,
            tile_bytes=min(logits, tile_bytes("accelerator" if on_gpus else "cpu")),
        ),
    }


def dropped_note(count: int, what: str, key: str) -> list[str]:
    """Note that ``count`` examples are longer than ``key`` allows; empty where none is."""
    return [f"{count} {what} are longer than {key} and were dropped"] if count else []
