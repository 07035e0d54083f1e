"""Tables of algorithms, rollout engines, environment kinds, estimators and surrogates.

A new algorithm needs a row, a script in examples/, a configuration and a recipe in conf/, and a
page in docs/. Rows contain import paths, so that large modules are imported only when needed.
"""

import importlib
from typing import Any, NamedTuple


class AlgorithmEntry(NamedTuple):
    """A training algorithm and its files."""

    name: str  # part of the names of its script, command and configuration
    summary: str  # for `aligner --help`
    root: str  # package.module:Class of its configuration
    builder: str  # package.module:function that runs it with a configuration

    @property
    def recipe(self) -> str:
        """Name of the small recipe for a CPU in conf/recipes/."""
        return "grpo_tiny_cpu" if self.name == "reinforce" else f"{self.name}_tiny_cpu"

    @property
    def page(self) -> str:
        """File name of the algorithm's page in docs/."""
        return f"{self.name}.md"

    @property
    def script(self) -> str:
        """Name of the algorithm's script in examples/, without suffix."""
        return f"train_{self.config_name}"

    @property
    def config_name(self) -> str:
        """Name of the algorithm's configuration in conf/, without suffix."""
        return f"gpt_{self.name}"

    @property
    def root_class(self) -> Any:
        """Class of the algorithm's configuration."""
        return imported(self.root)


def imported(path: str) -> Any:
    """Import the object with the path ``package.module:name``."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


# Name, summary, beginning of a class ``…RunConfig``, and function below aligner.algorithms.
_ALGORITHMS = (
    ("ppo", "PPO", "", "ppo.trainer:train_ppo"),
    ("reinforce", "REINFORCE, RLOO, GRPO and their kin", "", "ppo.trainer:train_ppo"),
    ("rs", "rejection sampling: the best responses are learned", "RS", "rs.trainer:train_rs"),
    ("sft", "supervised fine-tuning", "SFT", "supervised.build:train_sft"),
    ("dpo", "preference optimisation: DPO and its relatives", "DPO", "preference.build:train_dpo"),
    (
        "reward",
        "a reward model, from comparisons or ratings",
        "Reward",
        "reward_model.build:train_reward_model",
    ),
    ("distill", "distillation of a larger model", "Distill", "distill.build:train_distill"),
)
ALGORITHMS = {
    name: AlgorithmEntry(
        name, summary, f"aligner.config.run:{root}RunConfig", f"aligner.algorithms.{builder}"
    )
    for name, summary, root, builder in _ALGORITHMS
}
BY_SCRIPT = {entry.script: entry for entry in ALGORITHMS.values()}

# Rollout engine → subclass of `aligner.config.engine.EngineConfig`, its section ``generation.X``.
ENGINES = {"vllm": "aligner.generation.vllm.settings:VllmConfig"}

# ``environment.kind`` → subclass of `aligner.algorithms.rollout.kinds.EnvironmentKind`. A program
# may add rows before it parses a configuration.
ENVIRONMENT_KINDS = {
    "messages": "aligner.algorithms.rollout.kinds:Messages",
    "endpoint": "aligner.algorithms.rollout.kinds:Endpoint",
}


class EstimatorEntry(NamedTuple):
    """An advantage estimator, one of the values of `trainer.ppo.advantage.estimator`."""

    title: str  # name of the algorithm, for reports
    compares_group: bool = False  # whether it needs at least two responses to each prompt
    # Import path of an `aligner.algorithms.ppo.user_estimator.AdvantageEstimator`, or None for a
    # formula in `aligner.losses.groups`.
    function: str | None = None


class SurrogateEntry(NamedTuple):
    """A surrogate objective of the policy loss, one of the values of `model.ppo.surrogate`."""

    function: str  # import path of an `aligner.losses.policy.SurrogateFunction`
    title: str | None = None  # name of the algorithm for reports. None: the estimator's title


# A program may add rows to both tables before it parses a configuration.
ESTIMATORS = {
    "gae": EstimatorEntry("PPO"),
    "reinforce": EstimatorEntry("REINFORCE"),
    "rloo": EstimatorEntry("RLOO", compares_group=True),
    "grpo": EstimatorEntry("GRPO", compares_group=True),
    "dr_grpo": EstimatorEntry("Dr. GRPO", compares_group=True),
    "reinforce_plus_plus": EstimatorEntry("REINFORCE++"),
    "reinforce_plus_plus_baseline": EstimatorEntry("REINFORCE++ with a baseline", True),
}
SURROGATES = {
    "clip": SurrogateEntry("aligner.losses.policy:clip_surrogate"),
    "cispo": SurrogateEntry("aligner.losses.policy:cispo_surrogate", "CISPO"),
}
