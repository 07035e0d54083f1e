"""Sources of rewards."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.config.fields import (
    ASKED_FOR,
    Count,
    FilePath,
    Function,
    ModelPath,
    Seconds,
    not_empty,
)


@dataclass(frozen=True)
class RewardModelConfig:
    """A trained reward model on workers of the run, frozen, in the policy's layout."""

    restore_from_path: ModelPath
    """A `.nemo` file with a reward head.

    Written by `examples/train_gpt_reward.py`, or by NeMo-Aligner.
    """

    micro_batch_size: Count = 16
    """Sequences per forward pass, per data-parallel rank."""

    add_bos: StrictBool | None = None
    """Begin sequences with the BOS token; null: as its file says.

    The file remembers what training did; another value than its is refused. Of files that say
    nothing: not.
    """

    workers: Count | None = None
    """On Ray: workers of its own; null: beside the policy's."""

    offload_weights: StrictBool = False
    """Its weights wait in host memory while it is idle."""

    share_body_with_critic: StrictBool = False
    """Score on the critic's backbone, with weights swapped in from host memory.

    It has no backbone of its own then; the two must have one architecture
    (docs/reward.md#one-backbone-with-the-critic).
    """


@dataclass(frozen=True)
class RewardServerConfig:
    """A server of `examples/serve_reward_model.py`, or any that speaks its protocol."""

    url: Annotated[StrictStr, not_empty("one such as http://host:5555")]
    """Such as `http://host:5555`."""

    token_env: StrictStr | None = None
    """Environment variable that holds the bearer token; null: none."""

    token_file: FilePath | None = None
    """Or a file that holds it."""

    timeout_s: Seconds = 60.0
    """Longest wait for one answer, in seconds."""

    retry_for_s: Seconds = 300.0
    """Seconds for which a server that does not answer is asked again; then the run stops."""

    samples_per_request: Count = 64
    """The samples of a rollout are asked for in parts of so many."""

    concurrent_requests: Count = 4
    """Parts asked for at the same time."""


@dataclass(frozen=True)
class RewardConfig:
    """Source of the scores: a Python function, a reward model, a server, or an environment."""

    kind: Literal["function", "model", "server", "environment"] = "function"
    """Source of the scores: `function`, `model`, `server` or `environment` (docs/reward.md).

    `environment`: that of the section `environment` (docs/environments.md).
    """

    function: Annotated[Function | None, ASKED_FOR] = None
    """Function that scores, `package.module:function` or `path/to/file.py:function`; null: none.

    Called as `reward(prompts, responses, ground_truths, **columns)`; returns one float per sample,
    or one dict per sample with at least `reward`. With another kind a verifier: it gives the metric
    `accuracy`, and nobody learns from it.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    """Further keyword arguments of the function."""

    time_limit_s: Seconds = 60.0
    """Seconds of the function for one whole batch."""

    timeout_reward: StrictFloat | None = 0.0
    """Reward of a sample that is not scored in time; null: that ends the run."""

    max_concurrency: Count = 1
    """Parts of a batch scored at the same time, each in a process of its own."""

    model: RewardModelConfig | None = None
    """Section of `reward=model`: a trained reward model on workers of the run."""

    server: RewardServerConfig | None = None
    """Section of `reward=server`: a reward model behind HTTP."""

    attribute_weights: tuple[StrictFloat, ...] | None = None
    """A number for each attribute that a model or server rates; null: it rates one.

    The reward is the weighted sum.
    """
