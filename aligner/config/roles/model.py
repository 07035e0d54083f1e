"""Policy and critic: checkpoint, parallel layout, batching and training."""

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from annotated_types import Interval
from pydantic import StrictBool, StrictFloat

from aligner.config.fields import DERIVED, BatchSize, Count, FilePath, ModelPath, Positive
from aligner.config.layout import LayerOptions, LayerSpec, ParallelConfig
from aligner.config.roles.optim import OptimConfig
from aligner.config.roles.peft import PeftConfig
from aligner.config.roles.sampling import PolicyPPOConfig, PolicyRSConfig, RolloutConfig

FP8_MULTIPLE = 16  # 8-bit matrix products need a multiple of 16 rows
LAYOUT_KEYS = (
    *("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "sequence_parallel"),
)
STAGE_KEYS = ("num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage")
Model = TypeVar("Model", bound="TrainedModelConfig")


@dataclass(frozen=True)
class ReferenceConfig:
    """Options of the frozen reference policy, which is built only if a KL term uses it."""

    mode: Literal["keep", "swap"] = "keep"
    """Storage of the reference's weights. `keep`: a second model on the device. `swap`: in host
    memory, swapped with the policy's weights when needed. No effect with adapters."""


PackingAlgorithmName = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


@dataclass(frozen=True)
class TokenBudgets:
    """Maximum numbers of tokens in a micro-batch, for policy and critic."""

    enabled: StrictBool = False
    train_mb_tokens: Count = 4096
    """Maximum number of tokens in a training micro-batch, with padding, per rank. No sequence may
    be longer."""

    logprob_mb_tokens: Count | None = None
    """Maximum number of tokens in a micro-batch for log-probs and values. `null` means as in
    training."""


@dataclass(frozen=True)
class SequencePackingConfig(TokenBudgets):
    """Micro-batches of several sequences in one row."""

    enabled: StrictBool | Literal["auto"] = "auto"  # type: ignore[assignment]
    """Micro-batches of several sequences in one row, without padding, in policy and critic. With
    `true`, `micro_batch_size` has no effect. `auto`: the sequences of a micro-batch share a row if
    the model is of another family of transformers and can run packed rows
    (docs/checkpoints.md#any-other-model-of-transformers). Otherwise as `false`."""

    algorithm: PackingAlgorithmName = "modified_first_fit_decreasing"
    """Assignment of sequences to rows. `modified_first_fit_decreasing`, `first_fit_decreasing`,
    `first_fit_shuffle` or `concatenative`."""


@dataclass(frozen=True)
class DynamicBatchingConfig(TokenBudgets):
    """Padded micro-batches of sequences of similar length."""

    enabled: StrictBool = False
    """Padded micro-batches within a token budget, of similarly long sequences. Excludes packing."""

    sequence_length_round: Count = 8
    """Multiple to which padded lengths are rounded up."""


@dataclass(frozen=True)
class ModelSourceConfig:
    """A model, and its parallel layout, which all roles of the run have."""

    restore_from_path: ModelPath
    """The model to train: a `.nemo` file, an unpacked `.nemo`, or a Hugging Face directory."""

    trust_remote_code: StrictBool = False
    """Run Python code from a Hugging Face directory (`auto_map` in `config.json`). Needs
    `policy.backend=dtensor`."""

    tokenizer: FilePath | None = None
    """Path of another tokenizer, or a function that returns one, `package.module:function` or
    `path/to/file.py:function` (docs/howto.md#own-code-by-path). `null` means the tokenizer in the
    `.nemo`."""

    tensor_model_parallel_size: Count = 1
    """Number of processes that split every layer. `parallel@model=tensor2` sets 2 with sequence
    parallelism (docs/layouts.md)."""

    pipeline_model_parallel_size: Count = 1
    """Number of pipeline stages, each with consecutive layers. `parallel@model=pipeline2` sets
    2."""

    context_parallel_size: Count = 1
    """Number of processes that split every sequence. `parallel@model=context2` sets 2."""

    expert_model_parallel_size: Count = 1
    """Number of processes that divide the experts of a mixture of experts."""

    sequence_parallel: StrictBool = False
    """Shard norms and dropouts over the tensor-parallel processes. Needs
    `tensor_model_parallel_size` above 1."""


@dataclass(frozen=True)
class TrainedModelConfig(ModelSourceConfig):
    """A model that a run trains."""

    rollout_key: ClassVar[str] = ""  # of the sampling options, if the model samples

    micro_batch_size: Annotated[Count, DERIVED] = 8
    """Sequences per forward and backward pass, per rank. `null` means the largest divisor up to 8
    of a rank's share. Does not affect results."""

    global_batch_size: Annotated[BatchSize, DERIVED] = 64
    """Sequences per optimizer update, over all ranks. It must divide the samples of a step, and be
    a multiple of `micro_batch_size` × ranks. `null` divides a rollout into the fewest equal parts
    of up to 64 samples (rejection sampling: 16)."""

    num_layers_in_first_pipeline_stage: Count | None = None
    """Layers of the first pipeline stage. `null` means as many as middle stages."""

    num_layers_in_last_pipeline_stage: Count | None = None
    """Layers of the last pipeline stage. `null` means as many as middle stages."""

    freeze_moe_router: StrictBool = False
    """Freeze the routers of a mixture of experts, in policy and critic."""

    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    shared_prefixes: StrictBool = True
    """Compute common prefixes of sequences of a micro-batch once (docs/shared_prefixes.md)."""

    activations_checkpoint_granularity: Literal["full", "selective"] | None = None
    """Recomputed parts in the backward pass: `full` (layers), `selective` (attention) or `null`."""

    dropout: Annotated[StrictFloat, Interval(ge=0, le=0.9)] | None = 0.0
    """Probability of dropping hidden states and attention weights in training. Only training passes
    drop, so a positive probability distorts the ratio. `null` means the checkpoint's probability
    (0.1 if a `.nemo` has none) and is the default of SFT. With `policy.backend=dtensor`, Llama-like
    models need 0."""

    fp8: Literal["e4m3", "hybrid"] | None = None
    """Format of 8-bit matrix products in policy and critic. Sampling uses bf16. `e4m3`, `hybrid`
    with e5m2 in the backward pass, or `null` (none). Needs Transformer Engine, a GPU with 8-bit
    products and `trainer.precision=bf16`."""

    layer_spec: LayerSpec = "auto"
    """Implementation of the layers: `transformer_engine`, or `local` (megatron-core). `auto`
    selects Transformer Engine on GPUs if it is installed and no adapters are trained."""

    fusions: StrictBool = True
    """Use fused kernels for SwiGLU, rotary embedding, biases and experts, on GPUs with Triton and a
    C compiler with Python's headers."""

    overlap_grad_reduce: StrictBool = False
    """Sum gradients over data-parallel ranks during the backward pass. Useful on several nodes."""

    overlap_param_gather: StrictBool = False
    """Collect updated weights from data-parallel ranks during the next forward pass. Needs
    `overlap_grad_reduce`. Not available with adapters."""

    peft: PeftConfig = field(default_factory=PeftConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)

    @property
    def rollout(self) -> RolloutConfig:
        """Options of rollouts. Default values for algorithms that do not sample."""
        return RolloutConfig(forward_micro_batch_size=self.micro_batch_size)

    @property
    def reference_mode(self) -> Literal["keep", "swap"]:
        """Storage of the reference policy's weights, `keep` or `swap`. See `ReferenceConfig`."""
        return "keep"

    @property
    def parallel(self) -> ParallelConfig:
        """Parallel layout of the model."""
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
        """Implementation of the transformer layers."""
        return LayerOptions(self.layer_spec, self.fusions)

    @cached_property
    def token_budgets(self) -> SequencePackingConfig | DynamicBatchingConfig | None:
        """Token limits of micro-batches, or None if each has ``micro_batch_size`` sequences."""
        if self.sequence_packing.enabled is True:
            return self.sequence_packing
        return self.dynamic_batching if self.dynamic_batching.enabled else None

    @property
    def token_limits(self) -> dict[str, int]:
        """Token limits in use, by key, such as ``sequence_packing.train_mb_tokens``."""
        budgets = self.token_budgets
        if budgets is None:
            return {}
        name = "sequence_packing" if budgets is self.sequence_packing else "dynamic_batching"
        limits = {
            "train_mb_tokens": budgets.train_mb_tokens,
            "logprob_mb_tokens": budgets.logprob_mb_tokens,
        }
        return {f"{name}.{key}": tokens for key, tokens in limits.items() if tokens is not None}

    @property
    def length_multiple(self) -> int:
        """Number of which padded sequence lengths are multiples. 1 without token limits."""
        if self.sequence_packing.enabled is True:
            return self.parallel.sequence_multiple
        if self.dynamic_batching.enabled:
            return self.parallel.row_multiple(self.sequence_length_round)
        return 1

    @property
    def sequence_length_round(self) -> int:
        """Number of which the padded lengths in a micro-batch are multiples."""
        dynamic = self.dynamic_batching
        multiple = dynamic.sequence_length_round if dynamic.enabled else 1
        if self.fp8 is None:
            return multiple
        return math.lcm(multiple, FP8_MULTIPLE * self.tensor_model_parallel_size)


@dataclass(frozen=True)
class ModelConfig(TrainedModelConfig):
    """The policy of a PPO run."""

    rollout_key: ClassVar[str] = "model.ppo"
    ppo: PolicyPPOConfig = field(default_factory=PolicyPPOConfig)

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling options of rollouts."""
        return self.ppo

    reference: ReferenceConfig = field(default_factory=ReferenceConfig)

    @property
    def reference_mode(self) -> Literal["keep", "swap"]:
        """Storage of the reference policy's weights, `keep` or `swap`."""
        return self.reference.mode


@dataclass(frozen=True)
class RSModelConfig(TrainedModelConfig):
    """The policy of a rejection-sampling run."""

    rollout_key: ClassVar[str] = "model.rs"
    rs: PolicyRSConfig = field(default_factory=PolicyRSConfig)

    @property
    def rollout(self) -> RolloutConfig:
        """Sampling options of rollouts."""
        return self.rs


@dataclass(frozen=True)
class CriticConfig:
    """The critic: the policy's architecture with a value head, and options of its training."""

    restore_from_path: ModelPath | None = None
    """A `.nemo` file or Hugging Face directory. `null` means the policy's file, with a new value
    head that outputs 0. The `rm_head` of a reward model becomes the value head."""

    micro_batch_size: Annotated[Count, DERIVED] = 8
    """As `model.micro_batch_size`."""

    global_batch_size: Annotated[BatchSize, DERIVED] = 64
    """As `model.global_batch_size`. The two sizes may differ."""

    forward_micro_batch_size: Count = 16
    """Sequences per forward pass of values, per rank."""

    value_clip: Positive | None = 0.2
    """Clip range of the new value around the rollout's value. `null` turns clipping off."""

    tensor_model_parallel_size: Count | None = None
    """Size in the critic's layout. `null` means the policy's size. Needs `cluster.engine=ray`."""

    pipeline_model_parallel_size: Count | None = None
    """See `tensor_model_parallel_size`."""

    context_parallel_size: Count | None = None
    """See `tensor_model_parallel_size`."""

    expert_model_parallel_size: Count | None = None
    """See `tensor_model_parallel_size`."""

    sequence_parallel: StrictBool | None = None
    """As `model.sequence_parallel`, in the critic's layout. `null` means the policy's value."""

    offload_adam_states: StrictBool = False
    """As `model.ppo.offload_adam_states`."""

    offload_gradients: StrictBool = False
    """As `model.ppo.offload_gradients`."""

    offload_weights: StrictBool = False
    """Keep the critic in host memory while it neither scores nor trains. GPUs only."""

    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    @property
    def layout_overrides(self) -> dict[str, int | bool]:
        """Parallel sizes that are set for the critic, by key."""
        sizes = {key: getattr(self, key) for key in LAYOUT_KEYS}
        return {key: size for key, size in sizes.items() if size is not None}

    def with_layout(self, model: Model) -> Model:
        """Return a copy of the policy's section with the critic's parallel layout."""
        layout: dict[str, Any] = self.layout_overrides
        if "pipeline_model_parallel_size" in layout:
            layout |= dict.fromkeys(STAGE_KEYS)
        return replace(model, **layout) if layout else model
