"""Sources of rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from aligner.config.fields import Count, FilePath, Function, ModelPath, NotEmpty, Seconds


@dataclass(frozen=True)
class RewardModelConfig:
    """A trained reward model on workers of the run, frozen, in the policy's layout."""

    restore_from_path: ModelPath  # a .nemo file of examples/train_gpt_reward.py, or of NeMo-Aligner
    micro_batch_size: Count = 16  # sequences per forward pass, per data-parallel rank
    add_bos: bool | None = None  # begin sequences with the BOS token; null: as its file says
    workers: Count | None = None  # ray: workers of its own; null: beside the policy's
    offload_weights: bool = False  # weights to host memory while idle
    # No body of its own: it scores in the critic's, into which its weights are swapped from host
    # memory. The two must have one architecture.
    share_body_with_critic: bool = False


@dataclass(frozen=True)
class RewardServerConfig:
    """A server of `examples/serve_reward_model.py`, or any that speaks its protocol."""

    url: Annotated[str, NotEmpty("one such as http://host:5555")]
    token_env: str | None = None  # environment variable that holds the bearer token; null: none
    token_file: FilePath | None = None  # or a file that holds it
    timeout_s: Seconds = 60.0  # longest wait for one answer
    retry_for_s: Seconds = 300.0  # a server that does not answer is asked again for so long
    samples_per_request: Count = 64
    concurrent_requests: Count = 4


@dataclass(frozen=True)
class RewardConfig:
    """Source of the scores of responses: one of a Python function, a reward model, and a server."""

    kind: Literal["function", "model", "server"] = "function"
    # package.module:function or path/to/file.py:function, called as
    # ``reward(prompts, responses, ground_truths, **columns)``; returns one float per sample, or one
    # dict per sample with at least ``reward``. Beside another kind it is a verifier: it gives the
    # metric accuracy, and nobody learns from it. null: none.
    function: Function | None = None
    kwargs: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of it
    time_limit_s: Seconds = 60.0  # of the function, for one whole batch
    # Reward of a sample for which it does not answer in time; null: that ends the run.
    timeout_reward: float | None = 0.0
    max_concurrency: Count = 1  # parts of a batch it scores at the same time, each in a process
    model: RewardModelConfig | None = None  # kind model
    server: RewardServerConfig | None = None  # kind server
    # Weight of each attribute, where a model or a server rates several: the reward is their sum.
    attribute_weights: tuple[float, ...] | None = None
