"""Typed configuration. Work in progress: dataclasses mirror conf/*.yaml key by key."""

from dataclasses import dataclass


@dataclass(frozen=True)
class LengthParams:
    """How long a response may be, in tokens, the end-of-sequence token included."""

    max_length: int = 64  # most new tokens
    min_length: int = 1  # EOS and stop strings cannot end a response before this many tokens


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is drawn."""

    temperature: float = 1.0  # logits are divided by it, in training log-probs too
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    repetition_penalty: float = 1.0  # 1: off; CTRL (Keskar et al. 2019): seen logits are divided
    use_greedy: bool = False
    end_strings: tuple[str, ...] = ()  # the response ends (properly) after the first of these


@dataclass(frozen=True)
class OptimConfig:
    """Optimizer of one role; NeMo's names."""

    name: str = "adam"  # adam (AdamW) | sgd
    lr: float = 1e-6
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    sched: "SchedConfig | None" = None


@dataclass(frozen=True)
class SchedConfig:
    """Learning-rate schedule, counted in optimizer steps."""

    name: str = "constant"  # constant | cosine | linear
    warmup_steps: int = 0
    constant_steps: int = 0  # cosine: steps held at min_lr at the end
    min_lr: float = 0.0
    max_steps: int | None = None  # None: the run's own number of optimizer steps
