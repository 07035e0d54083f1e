"""Sources of rewards."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.config import fields
from aligner.config.environment import WITHOUT_ENVIRONMENT
from aligner.foreign_keys import shown


@dataclass(frozen=True)
class RewardModelConfig:
    """A frozen reward model on workers of the run, in the policy's layout."""

    restore_from_path: fields.ModelPath
    """A `.nemo` file with a reward head, or a directory of a sequence or token classifier."""

    micro_batch_size: fields.Count = 16
    """Sequences per forward pass, per data-parallel rank."""

    add_bos: StrictBool | None = None
    """Begin sequences with the BOS token. `null` means as in the reward model's training."""

    workers: fields.Count | None = None
    """On Ray: number of separate workers. `null` means the policy's workers."""

    offload_weights: StrictBool = False
    """Keep the weights in host memory while the reward model is idle."""

    share_body_with_critic: StrictBool = False
    """Score on the critic's backbone, with weights swapped in from host memory. See
    docs/reward.md#one-backbone-with-the-critic."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for invalid numbers of workers, or an unsuitable critic."""
        # Separate workers.
        size = run.model.parallel.model_parallel_size
        if self.workers is not None and run.cluster.engine != "ray":
            yield f"{key}.workers={self.workers} needs cluster.engine=ray. Set it, or workers=null"
        elif self.workers is not None and self.workers % size:
            yield (
                f"{key}.workers={self.workers} is not a multiple of tensor x pipeline x context = "
                f"{size}, the layout that the reward model shares with the policy. Use "
                f"{math.ceil(self.workers / size) * size}"
            )

        # One backbone with the critic.
        if not self.share_body_with_critic:
            return
        setting = f"{key}.share_body_with_critic=true"
        if run.critic is None:
            yield f"{setting} needs a critic, but this run has none. Set it to false"
        if run.value_parallel != run.model.parallel:
            yield (
                f"{setting} needs a critic in the policy's layout, but the layouts differ. Set the "
                "critic's sizes to null, or share_body_with_critic to false"
            )
        if run.policy.backend != "megatron":
            yield (
                f"{setting} needs megatron-core models, but policy.backend={run.policy.backend}. "
                "Set it to false, or policy.backend=megatron"
            )
        if run.model.peft.lora is not None:
            yield (
                f"{setting} needs a critic whose weights are all trained, but "
                "model.peft.peft_scheme=lora. Set it to false, or model.peft.peft_scheme=null"
            )
        for name, default in (("workers", None), ("offload_weights", False)):
            if value := getattr(self, name):
                yield (
                    f"reward.model.{name}={shown(value)} needs separate workers, but {setting} "
                    f"uses the critic's. Set {name}={shown(default)}, or "
                    "share_body_with_critic=false"
                )


@dataclass(frozen=True)
class RewardServerConfig:
    """A server with the HTTP protocol of `examples/serve_reward_model.py`."""

    url: Annotated[StrictStr, fields.not_empty("one such as http://host:5555")]
    """Address of the server, such as `http://host:5555`."""

    token_env: StrictStr | None = None
    """Environment variable with the bearer token. `null` means no variable."""

    token_file: fields.FilePath | None = None
    """File with the bearer token, instead of `token_env`."""

    timeout_s: fields.Seconds = 60.0
    """Longest wait for one answer, in seconds."""

    retry_for_s: fields.Seconds = 300.0
    """Seconds for which requests without an answer are repeated. The run then stops."""

    samples_per_request: fields.Count = 64
    """Maximum number of samples in one request."""

    concurrent_requests: fields.Count = 4
    """Number of requests at the same time."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message for two tokens, and for waits above ``cluster.timeout_s``."""
        if self.token_env is not None and self.token_file is not None:
            yield f"{key}.token_env and {key}.token_file are both set. Set one of them to null"
        longest, limit = self.retry_for_s + self.timeout_s, run.cluster.timeout_s
        if run.cluster.engine == "local" and longest >= limit:
            yield (
                f"the sum of {key}.retry_for_s={self.retry_for_s:g} and timeout_s="
                f"{self.timeout_s:g} must be below cluster.timeout_s={limit:g}, the longest wait "
                "of the other processes. Lower them, or raise cluster.timeout_s"
            )


@dataclass(frozen=True)
class RewardConfig:
    """Source of rewards: a Python function, a reward model, a server or an environment."""

    kind: Literal["function", "model", "server", "environment"] = "function"
    """Source of rewards: `function`, `model`, `server` (docs/reward.md) or `environment`."""

    function: Annotated[fields.Function | None, fields.REQUIRED_BY_SCRIPTS] = None
    """Function that scores, `package.module:function` or `path/to/file.py:function`. See
    docs/ppo.md#the-reward-function. `null` means no function. With another kind the function is a
    verifier, whose result is only the metric `accuracy`."""

    kwargs: Annotated[Mapping[str, Any], WITHOUT_ENVIRONMENT] = field(default_factory=dict)
    """Additional keyword arguments of the function."""

    time_limit_s: Annotated[fields.Seconds, WITHOUT_ENVIRONMENT] = 60.0
    """Time limit of the function for a batch, in seconds."""

    timeout_reward: Annotated[StrictFloat | None, WITHOUT_ENVIRONMENT] = 0.0
    """Reward of a sample that is not scored in time. `null` ends the run instead."""

    max_concurrency: fields.Count = 1
    """Number of processes, each of which scores a part of a batch."""

    model: RewardModelConfig | None = None
    """Section of `reward=model`: a trained reward model on workers of the run."""

    server: RewardServerConfig | None = None
    """Section of `reward=server`: a reward model behind HTTP."""

    attribute_weights: tuple[StrictFloat, ...] | None = None
    """Weights of the attributes that a model or server rates. `null` means a single attribute. The
    reward is the weighted sum of the attributes."""

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Yield an error message if the section of ``kind`` is missing, or another one is set."""
        # The section of the selected source must be set, and no other.
        examples = {
            "function": "reward.function=my_rewards.py:reward",
            "model": "reward=model reward.model.restore_from_path=REWARD.nemo",
            "server": "reward=server reward.server.url=http://host:5555",
        }
        if self.kind in examples and getattr(self, self.kind) is None:
            section = f"{key}.{self.kind}"
            yield f"{key}.kind={self.kind} needs {section}. Set it: {examples[self.kind]}"
        for source in ("model", "server"):
            if source != self.kind and getattr(self, source) is not None:
                yield (
                    f"{key}.{source} is set, but {key}.kind={self.kind} ignores it. Set "
                    f"{key}.kind={source}, or {key}.{source}=null"
                )
        if self.attribute_weights is not None and self.kind not in ("model", "server"):
            kinds = f"{key}.kind=model or server, not {self.kind}"
            yield f"{key}.attribute_weights needs {kinds}. Set it to null"

        # Rewards of an environment.
        if (self.kind == "environment") != run.environment.is_set:
            yield (
                f"{key}.kind={self.kind} and {run.environment.setting} do not match. Set both "
                "reward=environment and environment.factory=my_game.py:Class, or neither"
            )
        if run.environment.is_set and self.function is not None:
            yield (
                f"{key}.function={self.function} scores single responses, but the environment "
                "provides the rewards. Set it to null"
            )
