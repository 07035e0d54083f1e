"""Choice of the few weights that are trained beside frozen ones."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from annotated_types import Interval
from pydantic import StrictFloat

from aligner.config.combinations import ReadIf
from aligner.config.fields import Count, FilePath, Positive, aliases

AdapterTarget = Literal[
    "all", "attention", "mlp", "attention_qkv", "attention_dense", "mlp_fc1", "mlp_fc2"
]
_LINEARS: dict[str, tuple[str, ...]] = {
    "attention_qkv": ("self_attention.linear_qkv",),
    "attention_dense": ("self_attention.linear_proj",),
    "mlp_fc1": ("mlp.linear_fc1",),
    "mlp_fc2": ("mlp.linear_fc2",),
}
_LINEARS["attention"] = _LINEARS["attention_qkv"] + _LINEARS["attention_dense"]
_LINEARS["mlp"] = _LINEARS["mlp_fc1"] + _LINEARS["mlp_fc2"]
_LINEARS["all"] = _LINEARS["attention"] + _LINEARS["mlp"]


@dataclass(frozen=True)
class LoraConfig:
    """Low-rank adapters (Hu et al. 2021): a linear layer W becomes W + alpha / rank · B A."""

    target_modules: tuple[AdapterTarget, ...] = ("all",)
    """Linear layers with adapters, of every transformer layer.

    `all`, `attention` (`attention_qkv`, `attention_dense`), `mlp` (`mlp_fc1`, `mlp_fc2`), or some
    of those in brackets.
    """

    adapter_dim: Count = 32
    """Rank."""

    alpha: Positive = 32.0
    """The product of an adapter's matrices is multiplied by alpha / adapter_dim."""

    adapter_dropout: Annotated[StrictFloat, Interval(ge=0, le=0.9)] = 0.0
    """Probability of dropping a number that an adapter reads, in training; at most 0.9.

    A token's draw depends on seed, update and the tokens up to it, never on the layout.
    """

    @property
    def linears(self) -> frozenset[str]:
        """megatron-core's names of the adapted linears, within a transformer layer."""
        return frozenset(name for target in self.target_modules for name in _LINEARS[target])

    @property
    def scale(self) -> float:
        """Factor of the product of an adapter's matrices."""
        return self.alpha / self.adapter_dim


@dataclass(frozen=True)
class PeftConfig:
    """Adapters instead of all weights; the critic follows."""

    peft_scheme: Annotated[Literal["lora"] | None, aliases({"none": None})] = None
    """Adapters and heads are trained, all other weights frozen.

    `lora`; null, or NeMo's `none`: all weights are trained. Policy and critic. See docs/lora.md.
    """

    restore_from_path: FilePath | None = None
    """Adapters to begin with: the `*.lora.safetensors` of another run. `null` means fresh ones."""

    lora_tuning: Annotated[
        LoraConfig,
        ReadIf(lambda run: run.model.peft.lora is not None, "needs model.peft.peft_scheme=lora"),
    ] = field(default_factory=LoraConfig)

    @property
    def lora(self) -> LoraConfig | None:
        """The adapters. None means there are none."""
        return self.lora_tuning if self.peft_scheme == "lora" else None
