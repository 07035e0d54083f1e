"""Parameter-efficient fine-tuning: adapters that are trained while all other weights are frozen."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval
from pydantic import StrictFloat

from aligner.config.combinations import ReadIf
from aligner.config.fields import Count, FilePath, Positive, aliases

LINEARS: dict[str, tuple[str, ...]] = {
    "attention_qkv": ("self_attention.linear_qkv",),
    "attention_dense": ("self_attention.linear_proj",),
    "mlp_fc1": ("mlp.linear_fc1",),
    "mlp_fc2": ("mlp.linear_fc2",),
}
LINEARS["attention"] = LINEARS["attention_qkv"] + LINEARS["attention_dense"]
LINEARS["mlp"] = LINEARS["mlp_fc1"] + LINEARS["mlp_fc2"]
LINEARS["all"] = LINEARS["attention"] + LINEARS["mlp"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): a linear layer W becomes W + alpha / rank · B A."""

    target_modules: tuple[str, ...] = ("all",)
    """Linear layers with adapters, in every transformer layer. `all`, `attention` (`attention_qkv`,
    `attention_dense`), `mlp` (`mlp_fc1`, `mlp_fc2`), or any single names. With
    `policy.backend=dtensor`: `all`, or parts of transformers' names of modules and of the weights
    of experts (`q_proj`, `self_attn`, `experts.down_proj`)."""

    adapter_dim: Count = 32
    """Rank of the adapters."""

    alpha: Positive = 32.0
    """Scale of the adapters: the product of the matrices is multiplied by alpha / adapter_dim."""

    adapter_dropout: Annotated[StrictFloat, Interval(ge=0, le=0.9)] = 0.0
    """Probability of dropping an input element of an adapter in training, at most 0.9."""

    @property
    def linears(self) -> frozenset[str]:
        """Names of the linear layers with adapters, such as megatron-core's ``linear_qkv``."""
        targets = self.target_modules
        return frozenset(name for target in targets for name in LINEARS.get(target, (target,)))

    @property
    def scale(self) -> float:
        """Factor by which the product B A is multiplied: alpha / rank."""
        return self.alpha / self.adapter_dim


@dataclass(frozen=True)
class PeftConfig:
    """Training of adapters in place of all weights, for policy and critic."""

    peft_scheme: Annotated[Literal["lora"] | None, aliases({"none": None})] = None
    """Kind of adapters, in policy and critic. `lora` trains adapters and heads and freezes all
    other weights (docs/lora.md). `null`, or NeMo's `none`, trains all weights."""

    restore_from_path: FilePath | None = None
    """Initial adapters: the `*.lora.safetensors` of another run. `null` means new adapters."""

    lora_tuning: Annotated[
        LoraConfig,
        ReadIf(lambda run: run.model.peft.lora is not None, "needs model.peft.peft_scheme=lora"),
    ] = field(default_factory=LoraConfig)

    @property
    def lora(self) -> LoraConfig | None:
        """Settings of the adapters. None if all weights are trained."""
        return self.lora_tuning if self.peft_scheme == "lora" else None
