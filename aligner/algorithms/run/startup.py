"""Description of the model, checks of lengths, and the start-up report."""

import math
from collections.abc import Sequence

from aligner.algorithms.run.engine import Workers
from aligner.architecture import GPTArchitecture
from aligner.checkpoint.adapters import adapter_shapes, check_same, read_adapters
from aligner.checkpoint.canonical import Shape, expected_shapes
from aligner.checkpoint.hf.any_model import parameter_shapes, require_megatron
from aligner.checkpoint.model_source import open_model
from aligner.config import BaseRunConfig, SamplingRunConfig, SupervisedRunConfig, TrainedModelConfig
from aligner.data.tokenizers.loading import (
    named_tokenizer,
    with_chat_template,
    with_template_kwargs,
)
from aligner.data.tokenizers.tokenizer import Tokenizer
from aligner.device.host_memory import available_bytes
from aligner.errors import ConfigError
from aligner.foreign_keys import IGNORED
from aligner.logprobs.output_layer import tile_bytes
from aligner.observe.startup import RoleMemory, StartupSummary, saving_sentence
from aligner.packages import find_packages, untried_versions


def describe_model_of(config: BaseRunConfig) -> tuple[Tokenizer, GPTArchitecture]:
    """Return tokenizer and architecture of a run's model, without loading weights."""
    tokenizer, architecture = describe_model(config.model, config.policy.backend)
    if config.policy.backend == "megatron":
        require_megatron(architecture)
    if isinstance(config, SamplingRunConfig) and (engine := config.generation.engine) is not None:
        engine.check_model(architecture)
    if isinstance(config, SamplingRunConfig) and config.environment.chat_template is not None:
        template, key = config.environment.chat_template, "environment.chat_template"
        tokenizer = with_chat_template(tokenizer, template, key=key)
    assert isinstance(config, SamplingRunConfig | SupervisedRunConfig), "every run has data"
    return with_template_kwargs(tokenizer, config.data.chat_template_kwargs), architecture


def describe_model(
    model: TrainedModelConfig, backend: str = "megatron"
) -> tuple[Tokenizer, GPTArchitecture]:
    """Return tokenizer and architecture of a model. Raises if its adapters do not fit."""
    trusted = model.trust_remote_code
    lora, path = model.peft.lora, model.peft.restore_from_path
    source = open_model(model.restore_from_path, backend, lora is not None, trusted=trusted)
    with source as checkpoint:
        name, key = model.tokenizer, "model.tokenizer"
        tokenizer = checkpoint.tokenizer if name is None else named_tokenizer(name, key=key)
        architecture = checkpoint.architecture
    # Adapters must fit the model.
    if lora is not None:
        adapter_shapes(architecture, lora)  # raises for targets that the model lacks
        if path is not None:
            check_same(lora, read_adapters(path, architecture).lora, path)
    return tokenizer.with_end_tokens(model.rollout.sampling_params.end_tokens), architecture


def shapes_of(architecture: GPTArchitecture) -> dict[str, Shape]:
    """Return the shape of each parameter of the model, by name, without heads."""
    return (expected_shapes if architecture.has_table else parameter_shapes)(architecture)


def count_parameters(architecture: GPTArchitecture) -> int:
    """Return the number of parameters of the model, without heads."""
    return sum(math.prod(shape) for shape in shapes_of(architecture).values())


def check_room(
    architecture: GPTArchitecture,
    longest_prompt: int,
    key: str,
    response: int,
    limit_key: str = "data.max_prompt_length",
) -> None:
    """Raise if ``response`` new tokens after the longest prompt exceed the model's positions."""
    positions = architecture.max_position_embeddings
    if longest_prompt + response <= positions:
        return
    remedy = f"Lower max_length below {positions}"
    if positions > response:
        remedy = (
            f"Set {limit_key}={positions - response} to drop longer prompts, or lower max_length"
        )
    raise ConfigError(
        f"the longest prompt has {longest_prompt} tokens, and a response may add {key}={response} "
        f"tokens, but the model has {positions} positions. {remedy}"
    )


def dropout_in_words(model: TrainedModelConfig, architecture: GPTArchitecture) -> str:
    """Return a sentence about dropout in training, and about different rates in the checkpoint."""
    rates = f"{architecture.hidden_dropout:g} of hidden states, "
    rates += f"{architecture.attention_dropout:g} of attention weights"
    if model.dropout is None:
        return f"dropout as in the checkpoint: {rates}"
    dropout = f"dropout {model.dropout:g}"
    if architecture.with_dropout(model.dropout) == architecture:
        return dropout
    return f"{dropout} (in the checkpoint: {rates}. model.dropout=null restores it)"


def repetition_in_words(config: BaseRunConfig, *, on_gpus: bool) -> str:
    """Return a sentence about differences between repeated runs on GPUs, or '' without any."""
    if not on_gpus or not isinstance(config, SamplingRunConfig):
        return ""
    engine = config.generation.engine
    samples = "" if engine is None else f" {engine.title}'s samples may differ."
    if config.trainer.deterministic:
        return f"trainer.deterministic=true: repeated runs have equal results, bit by bit.{samples}"
    return (
        "A resumed run continues from the exact state, but sums are computed in varying order "
        "(flash attention's gradient, gathered rows, NCCL): numbers differ in their last bits, and "
        f"sampled tokens after some steps. trainer.deterministic=true avoids this.{samples}"
    )


def startup_summary(
    workers: Workers,
    batches: Sequence[str],
    roles: Sequence[RoleMemory],
    longest: int,
    *,
    restores: Sequence[str],
    notes: Sequence[str],
) -> StartupSummary:
    """Return the start-up report. ``longest``: length in tokens, for the memory estimate."""
    config, architecture = workers.config, workers.architecture
    processes, device = workers.clusters.policy.world_size(), workers.roles[0].device_info()
    text = f"ignored, because no result depends on it here: {', '.join(IGNORED)}"
    ignored = [text] if IGNORED else []
    return StartupSummary(
        processes=processes,
        device=device,
        algorithm=config.algorithm,
        model=config.model.restore_from_path,
        log_dir=config.exp_manager.explicit_log_dir,
        batches=batches,
        roles=roles,
        working_bytes=working_memory(config, architecture, longest, on_gpus=device.has_gpu),
        run_states=saving_sentence(
            roles,
            in_background=config.exp_manager.async_save,
            processes_here=max(1, processes // config.trainer.num_nodes),
            free_bytes=available_bytes(),
        ),
        packages=find_packages(),
        restores=restores,
        remarks=[
            workers.roles[0].way_in_words(),
            dropout_in_words(config.model, architecture),
            repetition_in_words(config, on_gpus=device.has_gpu),
        ],
        notes=[*notes, *untried_versions(), *ignored],
    )


def role_memory(
    config: BaseRunConfig,
    architecture: GPTArchitecture,
    data_size: int,
    name: str,
    *,
    trainable: bool = True,
    model_parallel_size: int | None = None,
) -> RoleMemory:
    """Return the memory of a model. ``data_size`` ranks share the optimizer's state."""
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


def working_memory(
    config: BaseRunConfig, architecture: GPTArchitecture, length: int, *, on_gpus: bool
) -> dict[str, int]:
    """Estimate the bytes per process that a run needs in addition to its models, by purpose.

    ``KV cache``: keys and values of sequences of ``length`` tokens that are sampled together.
    ``activations``: tensors of a micro-batch that are stored for the backward pass. A micro-batch
    contains as many tokens as its token budget allows, or sequences of ``length`` tokens. A layer
    stores 17 values per token and hidden unit (Korthikanti et al. 2022, 34 bytes in 16 bit, without
    attention scores). Full recomputation stores the inputs of all layers and the activations of one
    layer. ``output layer``: float32 hidden states, their gradient, and two tiles of logits.

    The estimate excludes the device's context, buffers of NCCL, fragmentation, feed-forward layers
    wider than 4 times the hidden size, experts, and temporary tensors of the backward pass.
    """
    model, memory = config.model, {}
    layers = architecture.num_layers // model.pipeline_model_parallel_size
    value_bytes = 2 if config.trainer.precision == "bf16" else 4
    # Keys and values.
    if isinstance(config, SamplingRunConfig):
        values = 2 * layers * architecture.num_query_groups * architecture.kv_channels
        rows = model.rollout.rollout_micro_batch_size
        cache = values * rows * length * value_bytes
        memory["KV cache"] = cache // model.tensor_model_parallel_size
    # Activations of one micro-batch.
    budgets = model.token_budgets
    tokens = model.micro_batch_size * length if budgets is None else budgets.train_mb_tokens
    tokens //= model.context_parallel_size
    hidden = tokens * architecture.hidden_size
    recomputes = model.activations_checkpoint_granularity == "full"
    values_per_unit = (layers + 17) if recomputes else 17 * layers
    activations = hidden * values_per_unit * value_bytes
    memory["activations"] = activations // model.tensor_model_parallel_size
    # The output layer.
    columns = architecture.padded_vocab_size(model.tensor_model_parallel_size)
    logit_bytes = tokens * columns // model.tensor_model_parallel_size * 4  # float32
    tile = min(logit_bytes, tile_bytes("accelerator" if on_gpus else "cpu"))
    memory["output layer"] = 2 * hidden * 4 + 2 * tile
    return memory


def dropped_note(count: int, items: str, key: str) -> list[str]:
    """Return a list with a note that ``count`` too long ``items`` were dropped, or [] for 0."""
    return [f"{count} {items} are longer than {key} and were dropped"] if count else []
