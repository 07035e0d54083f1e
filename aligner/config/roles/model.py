"""Policy and critic: where they come from, how they are cut, and how they are trained."""

import math
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from annotated_types import Interval
from pydantic import StrictBool, StrictFloat

from aligner.config.fields import (
    DERIVED,
    BatchSize,
    Count,
    FilePath,
    ModelPath,
    Positive,
)
from aligner.config.layout import LayerOptions, LayerSpec, ParallelConfig
from aligner.config.roles.optim import OptimConfig
from aligner.config.roles.peft import PeftConfig
from aligner.config.roles.sampling import PolicyPPOConfig, PolicyRSConfig, RolloutConfig

FP8_MULTIPLE = 16  # rows of 8-bit matrix products come in multiples of it
LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
STAGE_KEYS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
Model = TypeVar("Model", bound="TrainedModelConfig")


@dataclass(frozen=True)
class ReferenceConfig:
    """Frozen reference policy. Not built at all where no KL term needs it."""

    mode: Literal["keep", "swap"] = "keep"
    """Place of the reference's weights.

    `keep`: the reference is a second model on the device. `swap`: its weights wait in host memory
    and change places with the policy's when needed. With adapters it is the policy without them,
    and this says nothing.
    """


PackingAlgorithmName = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


@dataclass(frozen=True)
class MegatronOnly:
    """Mark in a field's type: with ``policy.backend=dtensor`` only its default can be used."""

    instead: str
    """What dtensor has in its place, as the end of a sentence."""


@dataclass(frozen=True)
class TokenBudgets:
    """Micro-batches of a number of tokens, not of sequences; the critic has the policy's."""

    enabled: StrictBool = False
    train_mb_tokens: Count = 4096
    """Tokens of a micro-batch in training, with padding, per rank; no sequence may be longer."""

    logprob_mb_tokens: Count | None = None
    """Tokens of a micro-batch in log-probs and values. `null` means as in training."""


@dataclass(frozen=True)
class SequencePackingConfig(TokenBudgets):
    """Micro-batches of several sequences in one row."""

    enabled: StrictBool = False
    """Micro-batches of several sequences in one row, without padding between them.

    Policy and critic; `micro_batch_size` then says nothing.
    """

    algorithm: PackingAlgorithmName = "modified_first_fit_decreasing"
    """Choice of the sequences that share a row.

    `modified_first_fit_decreasing`, `first_fit_decreasing`, `first_fit_shuffle` or `concatenative`
    (in order).
    """


@dataclass(frozen=True)
class DynamicBatchingConfig(TokenBudgets):
    """Padded micro-batches of sequences of similar length."""

    enabled: StrictBool = False
    """Padded micro-batches of a token budget, of sequences of similar length.

    Policy and critic. Not together with packing; `micro_batch_size` then says nothing.
    """

    sequence_length_round: Count = 8
    """Padded lengths are rounded up to a multiple of it."""


@dataclass(frozen=True)
class TrainedModelConfig:
    """A model that a run trains. Its parallel layout is the layout of every role of the run."""

    restore_from_path: ModelPath
    """The model to train: a `.nemo` file, an unpacked one, or a Hugging Face directory."""

    tokenizer: FilePath | None = None
    """Path of another tokenizer. `null` means the one in the `.nemo`.

    Or a function that makes one, `package.module:function` or `path/to/file.py:function`
    (docs/howto.md#own-code-by-path).
    """

    micro_batch_size: Annotated[Count, DERIVED] = 8
    """Sequences per forward and backward pass, per rank. `null` means up to 8, evenly.

    The most up to 8 that divide a rank's share. Memory and speed, never results.
    """

    global_batch_size: Annotated[BatchSize, DERIVED] = 64
    """Sequences per optimizer update, over all ranks. `null` means a rollout in equal parts.

    The fewest parts of up to 64, or of up to 16 of the responses that rejection sampling keeps.
    Divides the samples of a step; a multiple of `micro_batch_size` × ranks.
    """

    tensor_model_parallel_size: Count = 1
    """Processes that share every layer.

    Divides heads, query groups, feed-forward and hidden columns. `parallel@model=tensor2` sets 2
    with sequence parallelism.
    """

    pipeline_model_parallel_size: Annotated[
        Count, MegatronOnly("fits more layers by model.tensor_model_parallel_size")
    ] = 1
    """Processes that hold a run of layers each.

    Divides the layers, unless stages are given their numbers. `parallel@model=pipeline2` sets 2.
    """

    num_layers_in_first_pipeline_stage: Annotated[Count | None, MegatronOnly("has one stage")] = (
        None
    )
    """Layers of the first pipeline stage. `null` means as many as stages in between have."""

    num_layers_in_last_pipeline_stage: Annotated[Count | None, MegatronOnly("has one stage")] = None
    """Layers of the last pipeline stage. `null` means as many as stages in between have."""

    context_parallel_size: Annotated[
        Count,
        MegatronOnly(
            "fits longer sequences by model.tensor_model_parallel_size and "
            "model.activations_checkpoint_granularity=full"
        ),
    ] = 1
    """Processes that share every sequence, in chunks.

    `parallel@model=context2` sets 2. See docs/layouts.md.
    """

    expert_model_parallel_size: Annotated[
        Count, MegatronOnly("holds every expert on every rank")
    ] = 1
    """Processes that share the experts of a mixture of experts.

    Divides the experts and the processes of a pipeline stage.
    """

    freeze_moe_router: Annotated[StrictBool, MegatronOnly("has no experts")] = False
    """Train all but the routers of a mixture of experts.

    Policy and critic. A dense model has none.
    """

    sequence_parallel: Annotated[StrictBool, MegatronOnly("splits layers alone")] = False
    """Shard norms and dropouts over the tensor-parallel processes.

    Needs `tensor_model_parallel_size` above 1.
    """

    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    shared_prefixes: StrictBool = True
    """Pass what sequences begin with in common through the model once.

    Responses to one prompt, forks of a conversation, pairs: what token ids of one micro-batch share
    (docs/shared_prefixes.md). Memory and speed; results differ in rounding only.
    """

    activations_checkpoint_granularity: Literal["full", "selective"] | None = None
    """Parts recomputed in the backward pass.

    `full` (layers), `selective` (attention) or null (nothing: all is kept). Policy and critic.
    """

    dropout: Annotated[StrictFloat, Interval(ge=0, le=0.9)] | None = 0.0
    """Probability of dropping hidden states and attention weights. `null` means the checkpoint's.

    In training, of policy and critic, whatever the checkpoint says: old log-probs, the reference's
    and samples are without, and the ratio would measure the dropout. null (a `.nemo` without the
    keys means NeMo's 0.1) is what SFT begins with. With `policy.backend=dtensor` a Llama-like model
    has no dropout of hidden states, and other values than 0 of it are refused.
    """

    fp8: Annotated[Literal["e4m3", "hybrid"] | None, MegatronOnly("has no 8-bit products")] = None
    """Format of 8-bit matrix products.

    `e4m3`, `hybrid` with e5m2 in the backward pass, or null (none). Policy and critic; sampling
    stays in bf16. Needs Transformer Engine, a GPU with such products and `trainer.precision=bf16`.
    """

    layer_spec: Annotated[LayerSpec, MegatronOnly("has transformers' layers")] = "auto"
    """Library of the layers; the weights are the same.

    `transformer_engine`'s, `local` (megatron-core's and this library's), or by `auto` the former on
    GPUs where Transformer Engine is installed and no adapters are trained.
    """

    fusions: StrictBool = True
    """On GPUs: SwiGLU, rotary embedding, biases and the products of experts in one kernel each.

    A bias with its residual, and the experts of a layer one product each way in bf16. Needs Triton
    and a C compiler with Python's headers; without them, and on CPUs, operations run one by one.
    """

    overlap_grad_reduce: Annotated[StrictBool, MegatronOnly("has FSDP2's overlap")] = False
    """Sum gradients over data-parallel ranks during the backward pass.

    For training over nodes; on NVLink there is little to hide.
    """

    overlap_param_gather: Annotated[StrictBool, MegatronOnly("has FSDP2's overlap")] = False
    """Collect updated weights from data-parallel ranks during the next forward pass.

    Needs `overlap_grad_reduce`; not with adapters.
    """

    peft: PeftConfig = field(default_factory=PeftConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def rollout_key(self) -> str:
        """Section of its sampling options; empty where it does not sample."""
        return ""

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling of rollouts, where the algorithm uses them; else the defaults."""
        return RolloutConfig(forward_micro_batch_size=self.micro_batch_size)

    @property
    def reference_mode(self) -> Literal["keep", "swap"]:
        """Storage of the frozen copy of the initial weights, where one is needed."""
        return "keep"

    @property
    def parallel(self) -> ParallelConfig:
        """Layout sizes under short names."""
        return ParallelConfig(
            tensor=self.tensor_model_parallel_size,
            pipeline=self.pipeline_model_parallel_size,
            context=self.context_parallel_size,
            expert=self.expert_model_parallel_size,
            sequence_parallel=self.sequence_parallel,
            first_stage=self.num_layers_in_first_pipeline_stage,
            last_stage=self.num_layers_in_last_pipeline_stage,
        )

    @property
    def layers(self) -> LayerOptions:
        """Choice of layer implementations."""
        return LayerOptions(self.layer_spec, self.fusions)

    @property
    def token_budgets(self) -> SequencePackingConfig | DynamicBatchingConfig | None:
        """Token budgets that form micro-batches. None means ``micro_batch_size`` forms them."""
        if self.sequence_packing.enabled:
            return self.sequence_packing
        return self.dynamic_batching if self.dynamic_batching.enabled else None

    @property
    def token_limits(self) -> dict[str, int]:
        """Token budgets in force, by their keys below the section."""
        name = "sequence_packing" if self.sequence_packing.enabled else "dynamic_batching"
        budgets = self.token_budgets
        if budgets is None:
            return {}
        limits = {
            "train_mb_tokens": budgets.train_mb_tokens,
            "logprob_mb_tokens": budgets.logprob_mb_tokens,
        }
        return {f"{name}.{key}": tokens for key, tokens in limits.items() if tokens is not None}

    @property
    def length_multiple(self) -> int:
        """Multiple that lengths are rounded up to before a token budget counts them."""
        if self.sequence_packing.enabled:
            return self.parallel.sequence_multiple
        if self.dynamic_batching.enabled:
            return self.parallel.row_multiple(self.sequence_length_round)
        return 1

    @property
    def plans_shared_prefixes(self) -> bool:
        """Formation of micro-batches of rows that share; only of a model that drops nothing out."""
        return self.shared_prefixes and self.dropout == 0.0

    @property
    def sequence_length_round(self) -> int:
        """Multiple to which padded lengths of micro-batches are rounded up."""
        dynamic = self.dynamic_batching
        multiple = dynamic.sequence_length_round if dynamic.enabled else 1
        if self.fp8 is None:
            return multiple
        return math.lcm(multiple, FP8_MULTIPLE * self.tensor_model_parallel_size)


@dataclass(frozen=True)
class ModelConfig(TrainedModelConfig):
    """The policy of a PPO run."""

    ppo: PolicyPPOConfig = field(default_factory=PolicyPPOConfig)
    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def rollout_key(self) -> str:
        """Section of its sampling options."""
        return "model.ppo"

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling of rollouts."""
        return self.ppo

    @property
    def reference_mode(self) -> Literal["keep", "swap"]:
        """See ``reference.mode``."""
        return self.reference.mode


@dataclass(frozen=True)
class RSModelConfig(TrainedModelConfig):
    """The policy of a rejection-sampling run."""

    rs: PolicyRSConfig = field(default_factory=PolicyRSConfig)

    @property
    def rollout_key(self) -> str:
        """Section of its sampling options."""
        return "model.rs"

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling of rollouts."""
        return self.rs


@dataclass(frozen=True)
class CriticConfig:
    """The critic: the policy's architecture with a value head.

    It has the policy's parallel layout unless it is given sizes of its own, which need workers of
    its own: ``cluster.engine=ray``.
    """

    restore_from_path: FilePath | None = None
    """A `.nemo` file. `null` means the policy's, with a fresh head that says 0.

    For instance a reward model, whose `rm_head` becomes the value head.
    """

    micro_batch_size: Annotated[Count, DERIVED] = 8
    """As `model.micro_batch_size`."""

    global_batch_size: Annotated[BatchSize, DERIVED] = 64
    """As `model.global_batch_size`; the two may differ."""

    forward_micro_batch_size: Count = 16
    """Sequences per forward pass of values, per rank."""

    value_clip: Positive | None = 0.2
    """Clip of the new value around the rollout's. `null` means off."""

    tensor_model_parallel_size: Count | None = None
    """Size in the critic's own layout. `null` means `model.tensor_model_parallel_size`.

    With `cluster.engine=ray`. The numbers do not depend on it.
    """

    pipeline_model_parallel_size: Count | None = None
    """The same. `null` means `model.pipeline_model_parallel_size`."""

    context_parallel_size: Count | None = None
    """The same. `null` means `model.context_parallel_size`."""

    expert_model_parallel_size: Count | None = None
    """The same. `null` means `model.expert_model_parallel_size`."""

    sequence_parallel: StrictBool | None = None
    """The same. `null` means `model.sequence_parallel`."""

    offload_adam_states: StrictBool = False
    """As `model.ppo.offload_adam_states`."""

    offload_gradients: StrictBool = False
    """As `model.ppo.offload_gradients`."""

    offload_weights: StrictBool = False
    """All it has on its device waits in host memory while it is idle.

    Weights, gradient buffers and optimizer state (float32 weights of a bf16 critic included), while
    it is neither asked nor trained. GPUs only.
    """

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    @property
    def own_layout(self) -> dict[str, int | bool]:
        """The sizes that are given, by their keys."""
        given = {key: getattr(self, key) for key in LAYOUT_KEYS}
        return {key: size for key, size in given.items() if size is not None}

    def laid_out(self, model: Model) -> Model:
        """The policy's section in the critic's layout: what the critic shares with the policy."""
        layout: dict[str, Any] = self.own_layout
        if "pipeline_model_parallel_size" in layout:
            layout |= dict.fromkeys(STAGE_KEYS)
        return replace(model, **layout) if layout else model
