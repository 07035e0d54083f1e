"""Sources of rewards."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from pydantic import StrictBool, StrictFloat, StrictStr

from aligner.config.environment import WITHOUT_ENVIRONMENT
from aligner.config.fields import (
    ASKED_FOR,
    Count,
    FilePath,
    Function,
    ModelPath,
    Seconds,
    not_empty,
)
from aligner.foreign_keys import shown


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
    """Begin sequences with the BOS token. `null` means as its file says.

    The file remembers what training did; another value than its is refused. Of files that say
    nothing: not.
    """

    workers: Count | None = None
    """On Ray: workers of its own. `null` means beside the policy's."""

    offload_weights: StrictBool = False
    """Its weights wait in host memory while it is idle."""

    share_body_with_critic: StrictBool = False
    """Score on the critic's backbone, with weights swapped in from host memory.

    It has no backbone of its own then; the two must have one architecture
    (docs/reward.md#one-backbone-with-the-critic).
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse workers that no layout divides, and a body that cannot be shared."""
        size = run.model.parallel.model_parallel_size
        if self.workers is not None and run.cluster.engine != "ray":
            yield (
                f"{key}.workers={self.workers} needs cluster.engine=ray. Set it, or leave "
                f"{key}.workers at null"
            )
        elif self.workers is not None and self.workers % size:
            yield (
                f"{key}.workers={self.workers} is not a multiple of tensor x pipeline x context = "
                f"{size}, the layout that the reward model shares with the policy. Use "
                f"{-(-self.workers // size) * size}"
            )
        if not self.share_body_with_critic:
            return
        key = f"{key}.share_body_with_critic=true"
        if getattr(run, "critic", None) is None:
            yield f"{key}, but this run has no critic. Set it to false"
        if run.value_parallel != run.model.parallel:
            yield (
                f"{key}: a reward model has the policy's layout, and this critic one of its own. "
                "Leave the critic's sizes at null, or set share_body_with_critic to false"
            )
        if run.policy.backend != "megatron":
            yield (
                f"{key} swaps weights of megatron-core models, and policy.backend="
                f"{run.policy.backend}. Set one of them to false or megatron"
            )
        if run.model.peft.lora is not None:
            yield (
                f"{key}, but with model.peft.peft_scheme=lora the critic is adapters beside frozen "
                "weights. Set one of them to false or null"
            )
        for name, unset in (("workers", None), ("offload_weights", False)):
            if value := getattr(self, name):
                yield (
                    f"{key} has the reward model score on the critic's workers, and reward.model."
                    f"{name}={shown(value)} is for workers of its own. Set one of them to "
                    f"{shown(unset)}"
                )


@dataclass(frozen=True)
class RewardServerConfig:
    """A server of `examples/serve_reward_model.py`, or any that speaks its protocol."""

    url: Annotated[StrictStr, not_empty("one such as http://host:5555")]
    """Such as `http://host:5555`."""

    token_env: StrictStr | None = None
    """Environment variable that holds the bearer token. `null` means none."""

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

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse two tokens, and waits that are longer than the other processes'."""
        if self.token_env is not None and self.token_file is not None:
            yield f"{key}.token_env and {key}.token_file are both given. Set one to null"
        longest, limit = self.retry_for_s + self.timeout_s, run.cluster.timeout_s
        if run.cluster.engine == "local" and longest >= limit:
            yield (
                f"{key}.retry_for_s={self.retry_for_s:g} and timeout_s={self.timeout_s:g} together "
                f"must stay below cluster.timeout_s={limit:g}, for which the other processes wait. "
                "Lower them, or raise it"
            )


@dataclass(frozen=True)
class RewardConfig:
    """Source of the scores: a Python function, a reward model, a server, or an environment."""

    kind: Literal["function", "model", "server", "environment"] = "function"
    """Source of the scores: `function`, `model`, `server` or `environment` (docs/reward.md).

    `environment`: that of the section `environment` (docs/environments.md).
    """

    function: Annotated[Function | None, ASKED_FOR] = None
    """Function that scores, `package.module:function` or `path/to/file.py:function`.

    `null` means none. Called as `reward(prompts, responses, ground_truths, **columns)`; returns one
    float per sample, or one dict per sample with at least `reward`. With another kind a verifier:
    it gives the metric `accuracy`, and nobody learns from it.
    """

    kwargs: Annotated[Mapping[str, Any], WITHOUT_ENVIRONMENT] = field(default_factory=dict)
    """Further keyword arguments of the function."""

    time_limit_s: Annotated[Seconds, WITHOUT_ENVIRONMENT] = 60.0
    """Seconds of the function for one whole batch."""

    timeout_reward: Annotated[StrictFloat | None, WITHOUT_ENVIRONMENT] = 0.0
    """Reward of a sample that is not scored in time. `null` means that ends the run."""

    max_concurrency: Count = 1
    """Parts of a batch scored at the same time, each in a process of its own."""

    model: RewardModelConfig | None = None
    """Section of `reward=model`: a trained reward model on workers of the run."""

    server: RewardServerConfig | None = None
    """Section of `reward=server`: a reward model behind HTTP."""

    attribute_weights: tuple[StrictFloat, ...] | None = None
    """A number for each attribute that a model or server rates. `null` means it rates one.

    The reward is the weighted sum.
    """

    def problems(self, key: str, run: Any) -> Iterator[str]:
        """Refuse a source without its section, and sections that nobody reads."""
        examples = {
            "function": "reward.function=my_rewards.py:reward",
            "model": "reward=model reward.model.restore_from_path=REWARD.nemo",
            "server": "reward=server reward.server.url=http://host:5555",
        }
        if self.kind in examples and getattr(self, self.kind) is None:
            yield (
                f"{key}.kind={self.kind} needs {key}.{self.kind}. Give it, for example "
                f"{examples[self.kind]}"
            )
        for other in ("model", "server"):
            if other != self.kind and getattr(self, other) is not None:
                yield (
                    f"{key}.{other} is given, and {key}.kind={self.kind} does not read it. Set "
                    f"{key}.kind={other}, or {key}.{other}=null"
                )
        if self.attribute_weights is not None and self.kind not in ("model", "server"):
            yield (
                f"{key}.attribute_weights weighs what a reward model or a server rates, and "
                f"{key}.kind={self.kind}. Set it to null"
            )
        if (self.kind == "environment") != run.environment.is_set:
            yield (
                f"{key}.kind={self.kind} and {run.environment.named}: set reward=environment and "
                "environment.factory=my_game.py:Class, or neither"
            )
        if run.environment.is_set and self.function is not None:
            yield (
                f"{key}.function={self.function} scores single responses, and the rewards are the "
                "environment's. Set it to null"
            )
