"""Conversion of omegaconf's tree into the dataclasses of a configuration."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.compat.paths import current_path
from aligner.config.algorithms.names import algorithm_of
from aligner.config.combinations import broken_rules, unread_options
from aligner.config.commands.ask import AskConfig
from aligner.config.parse import build, field_types, refuse
from aligner.config.run import BaseRunConfig, RSRunConfig, RunConfig, SupervisedRunConfig
from aligner.errors import ConfigError

if importlib.util.find_spec("hydra"):  # not installed in the environment of a vLLM engine
    import aligner.config.base  # noqa: F401  (registers the defaults of conf/ with hydra)

Root = TypeVar("Root", bound=BaseRunConfig | AskConfig)
Run = TypeVar("Run", bound=BaseRunConfig)
Section = TypeVar("Section")
# Largest derived batches: global batches of all responses, of kept responses, and micro-batches.
LARGEST_BATCH, LARGEST_KEPT_BATCH, LARGEST_MICRO_BATCH = 64, 16, 8
DATA, REWARD = "data.train.source", "reward.function"
_ENVIRONMENT_TASKS = "aligner.data.readers:own_tasks"
_ARITHMETIC = {
    DATA: "aligner.examples.tasks.arithmetic:arithmetic_prompts",
    "data.validation.arguments": {"split": "validation", "size": 128},
    "data.validation.source": "aligner.examples.tasks.arithmetic:arithmetic_prompts",
    REWARD: "aligner.examples.tasks.exact_number:reward",
}


def load_config(config: DictConfig, root: type[Root] = RunConfig) -> Root:  # type: ignore[assignment]
    """Resolve the interpolations in hydra's configuration and convert it to the class ``root``."""
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the configuration"
        raise ConfigError(f"{key}: cannot be resolved: {str(error).splitlines()[0]}") from error
    return parse_config(plain, root)  # type: ignore[arg-type]


def with_built_in_task(config: DictConfig) -> str:
    """Set missing data and a missing reward in place. Return a note for the user, or "".

    If the reward is missing, and no data or only the arithmetic task's data are set, data and
    reward of the built-in arithmetic task are set. If a run with an environment has no data, 1024
    empty rows are set, because the environment provides the tasks.
    """
    values = OmegaConf.to_container(config)  # interpolations are not resolved yet

    def get(section: Any, name: str) -> Any:
        return section.get(name) if isinstance(section, dict) else None

    # Values at the dotted keys of the task, None for absent keys.
    settings = {key: reduce(get, key.split("."), values) for key in _ARITHMETIC}
    environment = get(values, "environment") or {}
    provides_prompts = environment.get("factory") or environment.get("command")
    if provides_prompts and settings[DATA] == "???":
        OmegaConf.update(config, DATA, _ENVIRONMENT_TASKS)
        return (
            f"{DATA} is not set: the environment provides tasks, and an epoch has 1024 of them "
            "(data.train.arguments.count)"
        )
    data = current_path(str(settings[DATA]))
    if settings[REWARD] != "???" or data not in ("???", _ARITHMETIC[DATA]):
        return ""

    # Set the task's keys. Validation data of the user are kept.
    has_validation = settings["data.validation.source"] not in (None, "???")
    for key, value in _ARITHMETIC.items():
        is_set = settings[key] not in (None, "???")
        if not is_set and not (has_validation and key.startswith("data.validation.")):
            OmegaConf.update(config, key, value, force_add=True)
    return (
        f"built-in task: arithmetic, scored by {_ARITHMETIC[REWARD]}, because {REWARD} is not set. "
        f"To train on your data: {DATA}=FILE.jsonl {REWARD}=FILE.py:FUNCTION"
    )


def parse_config(values: Mapping[str, Any], root: type[Root] = RunConfig) -> Root:  # type: ignore[assignment]
    """Convert nested values to the class ``root``. Raises `ConfigError` if values are invalid."""
    config = build(root, values)
    if isinstance(config, BaseRunConfig):
        config = derive_batches(config, values)
        # The name of the algorithm in the path of the run's directory.
        exp, algorithm = config.exp_manager, algorithm_of(config.as_dict())
        folder = exp.explicit_log_dir.replace("{algorithm}", algorithm.directory)
        config = replace(config, exp_manager=replace(exp, explicit_log_dir=folder))
    check_config(config)
    return config


def derive_batches(config: Run, values: Mapping[str, Any]) -> Run:
    """Return ``config`` with computed batch sizes where ``values`` contains null or no size.

    The samples of a step are divided into the smallest number of equal global batches of at most 64
    samples. The micro-batch size is the largest divisor of a data-parallel rank's share, at most 8.
    If no size divides evenly, the default is kept and `check_config` raises an error.
    """
    model = _with_batches(config, "model", values, config.trainer.world_size)
    config = replace(config, model=model)
    if isinstance(config, RunConfig) and config.critic is not None:
        critic = _with_batches(config, "critic", values, config.value_world_size)
        config = replace(config, critic=critic)
    return config


def _with_batches(
    config: BaseRunConfig, role: str, values: Mapping[str, Any], world_size: int
) -> Any:
    section, settings = getattr(config, role), values.get(role) or {}
    rows = config.rows_per_example if isinstance(config, SupervisedRunConfig) else 1
    if settings.get("global_batch_size") is None:
        batch = _global_batch(config) or section.global_batch_size
        section = replace(section, global_batch_size=batch)
    if settings.get("micro_batch_size") is None:
        layout = config.value_parallel if role == "critic" else config.model.parallel
        ranks = max(1, layout.data_size(world_size))
        share, remainder = divmod(section.global_batch_size, ranks)
        sizes = range(min(LARGEST_MICRO_BATCH, share), 0, -1)
        divisors = [n for n in sizes if not remainder and share % n == 0 and n % rows == 0]
        section = replace(section, micro_batch_size=(*divisors, section.micro_batch_size)[0])
    return section


def _global_batch(config: BaseRunConfig) -> int | None:
    """Return the size of the largest equal batches into which a step's samples divide, or None."""
    if isinstance(config, RSRunConfig):
        rs = config.model.rs
        learned = rs.num_rollout_samples // rs.num_rollouts_per_prompt * rs.top_n_rollouts
        largest = LARGEST_KEPT_BATCH
    elif isinstance(config, RunConfig):
        learned, largest = config.model.ppo.num_rollout_samples, LARGEST_BATCH
    else:
        return None
    fewest = -(-learned // largest)
    # At most twice the fewest parts, so that a prime number of samples does not give parts of 1.
    for parts in range(fewest, 2 * fewest + 1) if learned else ():
        if learned % parts == 0:
            return learned // parts
    return None


def check_config(config: BaseRunConfig | AskConfig) -> None:
    """Raise a `ConfigError` that lists all invalid combinations of values."""
    if isinstance(config, BaseRunConfig):
        refuse([*broken_rules(config, "", config), *unread_options(config)])
    else:
        refuse(config.problems("", config))


def as_omegaconf(values: Mapping[str, Any]) -> DictConfig:
    """Convert a mapping to ``DictConfig``, as NeMo's base class requires."""
    return values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))


def plain_mapping(values: Mapping[str, Any], keys: Sequence[str] | None = None) -> dict[str, Any]:
    """Convert a mapping or ``DictConfig`` to a dict. Resolves interpolations, omits missing values.

    ``keys``: top-level keys to convert. None means all. Other keys may have invalid interpolations.
    """
    selected = [key for key in values if keys is None or key in keys]
    if not isinstance(values, DictConfig):
        return {key: values[key] for key in selected}
    plain = {}
    for key in selected:
        if OmegaConf.is_missing(values, key):
            continue
        try:
            value = values[key]
            if OmegaConf.is_config(value):
                value = OmegaConf.to_container(value, resolve=True)
        except OmegaConfBaseException as error:
            name = getattr(error, "full_key", None) or key
            raise ConfigError(f"{name}: cannot be resolved: {error}") from error
        plain[str(key)] = value
    return plain


def section_of(
    kinds: Sequence[type[Section]], values: Mapping[str, Any], prefix: str = "model"
) -> Section:
    """Convert ``values`` to the first class in ``kinds`` with all their keys, or ``kinds[0]``."""
    kind = next((kind for kind in kinds if set(values) <= set(field_types(kind))), kinds[0])
    return build(kind, values, prefix)
