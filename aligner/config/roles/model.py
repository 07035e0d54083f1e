"""Policy and critic: where they come from, how they are cut, and how they are trained."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, TypeVar

from aligner.config.fields import (
    DERIVED,
    BatchSize,
    Count,
    FilePath,
    Fraction,
    ModelPath,
    Natural,
    NonNegative,
    Positive,
    Range,
    UserClass,
)
from aligner.config.layout import LayerOptions, LayerSpec, ParallelConfig
from aligner.config.roles.optim import OptimConfig
from aligner.config.roles.peft import PeftConfig

FP8_MULTIPLE = 16  # rows of 8-bit matrix products come in multiples of it
KLEstimator = Literal["k1", "k2", "k3", "abs"]
LAYOUT_KEYS = (
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "sequence_parallel",
)
Model = TypeVar("Model", bound="TrainedModelConfig")


@dataclass(frozen=True)
class LengthParams:
    """Limits of a response's length in tokens, the end-of-sequence token included."""

    max_length: Count = 64  # most new tokens
    min_length: Natural = 1  # EOS and stop strings cannot end a response before this many tokens


@dataclass(frozen=True)
class SamplingParams:
    """Sampling of the next token."""

    temperature: Positive = 1.0  # logits are divided by it, in training log-probs too
    top_k: Natural = 0  # 0: off
    top_p: Annotated[float, Range(low=0.0, high=1.0, exclusive=True)] = 1.0  # 1: off
    repetition_penalty: Positive = 1.0  # 1: off; CTRL (Keskar et al. 2019): seen logits divided
    use_greedy: bool = False  # always the likeliest token
    end_strings: tuple[str, ...] = ()  # the response ends (properly) after the first of these
    # Further tokens, as text, that end it: beside EOS, those of generation_config.json and the end
    # of a turn in the chat template.
    end_tokens: tuple[str, ...] = ()


@dataclass(frozen=True)
class Drawing:
    """Lengths and sampling of responses."""

    length: LengthParams
    sampling: SamplingParams


@dataclass(frozen=True)
class KLLossConfig:
    """KL to the reference policy as a term of the loss (GRPO's place for it)."""

    coef: NonNegative = 0.0  # 0: off, and no reference pass for its sake
    estimator: KLEstimator = "k3"  # k1 is refused: its gradient has mean 0


@dataclass(frozen=True)
class RolloutConfig:
    """Sampling of a policy's rollouts, in every algorithm that learns from its own samples."""

    num_rollout_samples: BatchSize = 64  # responses per step, over all ranks
    num_rollouts_per_prompt: Count = 1  # responses to the same prompt; divides the samples
    rollout_micro_batch_size: Count = 64  # sequences in flight together while generating, per rank
    forward_micro_batch_size: Count = 16  # sequences per forward pass of log-probs, per rank
    offload_adam_states: bool = False  # optimizer state to host memory while not training
    # Gradient buffers, and float32 weights beside bf16 ones, off the device while not training.
    offload_gradients: bool = False
    # All that it has on the device to host memory while it neither generates, scores nor trains.
    offload_weights: bool = False
    length_params: LengthParams = field(default_factory=LengthParams)
    sampling_params: SamplingParams = field(default_factory=SamplingParams)


@dataclass(frozen=True)
class PolicyRSConfig(RolloutConfig):
    """One step of rejection sampling, seen from the policy."""

    num_rollouts_per_prompt: Count = 4  # responses to the same prompt; divides the samples
    top_n_rollouts: Count = 1  # of them the best so many are learned


@dataclass(frozen=True)
class PolicyPPOConfig(RolloutConfig):
    """One PPO step, seen from the policy."""

    ppo_epochs: Count = 1  # passes over the same rollout
    # Clip range of the ratio: one number for both sides or [low, high] (clip-higher).
    ratio_eps: Fraction | tuple[Fraction, NonNegative] = 0.2
    ratio_level: Literal["token", "sequence"] = "token"  # sequence: GSPO's ratio, one per response
    # clip: PPO's pessimistic bound. cispo: the clipped ratio weighs the log-prob, without gradient.
    surrogate: Literal["clip", "cispo"] = "clip"
    # token_mean: over all tokens of the global batch. sequence_mean: over responses of their token
    # means (GRPO). fixed_length: over responses of token sums / max_length (Dr. GRPO).
    loss_aggregation: Literal["token_mean", "sequence_mean", "fixed_length"] = "token_mean"
    # Dual clip (Ye et al. 2020): bound on the loss for negative advantages; null: off.
    dual_clip: Annotated[float, Range(low=1.0, exclusive=True)] | None = None
    entropy_bonus: NonNegative = 0.0  # weight of the entropy in the loss; 0: off
    kl_loss: KLLossConfig = field(default_factory=KLLossConfig)
    # A loss of the user's own (`algorithms.losses.user.PolicyLoss`) in place of the built-in one,
    # package.module:Class or path/to/file.py:Class; null: the built-in one.
    loss: UserClass | None = None
    loss_kwargs: Mapping[str, Any] = field(default_factory=dict)  # of its constructor
    # Upper bound of the trainer/sampler probability ratio that weights each token, or with
    # ratio_level=sequence each response; null: off.
    truncated_importance_sampling: Positive | None = None

    @property
    def ratio_eps_range(self) -> tuple[float, float]:
        """Clip range as (low, high): the ratio stays in [1 - low, 1 + high]."""
        if isinstance(self.ratio_eps, tuple):
            return self.ratio_eps
        return self.ratio_eps, self.ratio_eps


@dataclass(frozen=True)
class ReferenceConfig:
    """Frozen reference policy. Not built at all where no KL term needs it."""

    mode: Literal["keep", "swap"] = "keep"  # keep: a second model; swap: weights held on the host


PackingAlgorithmName = Literal[
    "concatenative", "first_fit_decreasing", "first_fit_shuffle", "modified_first_fit_decreasing"
]


@dataclass(frozen=True)
class SequencePackingConfig:
    """Micro-batches of several sequences in one row, without padding between them.

    The critic follows. ``micro_batch_size`` then says nothing.
    """

    enabled: bool = False
    train_mb_tokens: Count = 4096  # tokens of a row in training; no sequence may be longer
    logprob_mb_tokens: Count | None = None  # in log-probs and values; null: train_mb_tokens
    algorithm: PackingAlgorithmName = "modified_first_fit_decreasing"  # which sequences share a row


@dataclass(frozen=True)
class DynamicBatchingConfig:
    """Padded micro-batches of a token budget instead of a number of sequences.

    Sequences of similar length go together. The critic follows. ``micro_batch_size`` then says
    nothing.
    """

    enabled: bool = False
    train_mb_tokens: Count = 4096  # tokens of a micro-batch in training, padding included
    logprob_mb_tokens: Count | None = None  # in log-probs and values; null: train_mb_tokens
    sequence_length_round: Count = 8  # padded lengths are rounded up to a multiple of it


@dataclass(frozen=True)
class TrainedModelConfig:
    """A model that a run trains. Its parallel layout is the layout of every role of the run."""

    restore_from_path: ModelPath  # a .nemo file, or a Hugging Face directory
    # Path of another tokenizer, or package.module:function that makes one; null: the one in the
    # .nemo.
    tokenizer: FilePath | None = None
    # Sequences per forward-backward, per data-parallel rank; null: up to 8, what divides evenly.
    micro_batch_size: Count = field(default=8, metadata=DERIVED)
    # Sequences per optimizer step, over all ranks; null: those of a rollout, in equal parts of up
    # to 64 (16 of those that rejection sampling keeps).
    global_batch_size: BatchSize = field(default=64, metadata=DERIVED)
    tensor_model_parallel_size: Count = 1
    pipeline_model_parallel_size: Count = 1
    context_parallel_size: Count = 1
    expert_model_parallel_size: Count = 1
    sequence_parallel: bool = False  # shard norms and dropouts over the tensor-parallel group
    sequence_packing: SequencePackingConfig = field(default_factory=SequencePackingConfig)
    dynamic_batching: DynamicBatchingConfig = field(default_factory=DynamicBatchingConfig)
    # full: recompute whole layers in backward; selective: the attention only; null: nothing.
    activations_checkpoint_granularity: Literal["full", "selective"] | None = None
    # Probability of dropping hidden states and attention weights while training, critic too; null:
    # what the checkpoint says.
    dropout: Annotated[float, Range(low=0.0, high=0.9)] | None = 0.0
    # Format of 8-bit matrix products, on GPUs with Transformer Engine; hybrid: e5m2 backward.
    fp8: Literal["e4m3", "hybrid"] | None = None
    # auto: Transformer Engine's layers on GPUs where it is installed; local: megatron-core's.
    layer_spec: LayerSpec = "auto"
    # On GPUs: SwiGLU, rotary embedding, biases and the products of experts in one kernel each.
    fusions: bool = True
    overlap_grad_reduce: bool = False  # sum gradients over ranks during the backward pass
    overlap_param_gather: bool = False  # collect updated weights during the next forward pass
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
        )

    @property
    def layers(self) -> LayerOptions:
        """Choice of layer implementations."""
        return LayerOptions(self.layer_spec, self.fusions)

    @property
    def token_budgets(self) -> SequencePackingConfig | DynamicBatchingConfig | None:
        """Token budgets that form micro-batches; None: ``micro_batch_size`` forms them."""
        if self.sequence_packing.enabled:
            return self.sequence_packing
        return self.dynamic_batching if self.dynamic_batching.enabled else None

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

    restore_from_path: FilePath | None = None  # null: model.restore_from_path, with a fresh head
    micro_batch_size: Count = field(default=8, metadata=DERIVED)  # as the model's
    global_batch_size: BatchSize = field(default=64, metadata=DERIVED)  # as the model's
    forward_micro_batch_size: Count = 16  # sequences per forward pass of values, per rank
    value_clip: Positive | None = 0.2  # clip of the new value around the old one; null: off
    tensor_model_parallel_size: Count | None = None  # null: model.tensor_model_parallel_size
    pipeline_model_parallel_size: Count | None = None  # null: model.pipeline_model_parallel_size
    context_parallel_size: Count | None = None  # null: model.context_parallel_size
    expert_model_parallel_size: Count | None = None  # null: model.expert_model_parallel_size
    sequence_parallel: bool | None = None  # null: model.sequence_parallel
    offload_adam_states: bool = False  # optimizer state to host memory while not training
    # Gradient buffers, and float32 weights beside bf16 ones, off the device while not training.
    offload_gradients: bool = False
    offload_weights: bool = False  # weights and gradient buffers to host memory while idle
    optim: OptimConfig = field(default_factory=lambda: OptimConfig(lr=1e-5))

    @property
    def own_layout(self) -> dict[str, int | bool]:
        """The sizes that are given, by their keys."""
        given = {key: getattr(self, key) for key in LAYOUT_KEYS}
        return {key: size for key, size in given.items() if size is not None}

    def laid_out(self, model: Model) -> Model:
        """The policy's section in the critic's layout: what the critic shares with the policy."""
        return replace(model, **self.own_layout) if self.own_layout else model  # type: ignore[arg-type]
