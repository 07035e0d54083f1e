"""Conversion of omegaconf's tree into ``RunConfig``, the only one."""

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

if importlib.util.find_spec("hydra"):  # an engine's environment has none, and composes nothing
    import aligner.config.base  # noqa: F401  (hydra finds the defaults of conf/ by it)

Root = TypeVar("Root", bound=BaseRunConfig | AskConfig)
Run = TypeVar("Run", bound=BaseRunConfig)
Section = TypeVar("Section")
LARGEST_BATCH, LARGEST_KEPT_BATCH = 64, 16  # of global batches that nobody gave
LARGEST_MICRO_BATCH = 8  # likewise
DATA, REWARD = "data.train.source", "reward.function"
_TASK = {
    DATA: "aligner.examples.tasks.arithmetic:arithmetic_prompts",
    "data.validation.arguments": {"split": "validation", "size": 128},
    "data.validation.source": "aligner.examples.tasks.arithmetic:arithmetic_prompts",
    REWARD: "aligner.examples.tasks.exact_number:reward",
}


def load_config(config: DictConfig, root: type[Root] = RunConfig) -> Root:  # type: ignore[assignment]
    """Resolve interpolations and validate hydra's configuration as a ``root``."""
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        key = getattr(error, "full_key", None) or "the configuration"
        raise ConfigError(f"{key}: cannot be resolved: {str(error).splitlines()[0]}") from error
    return parse_config(plain, root)  # type: ignore[arg-type]


def with_built_in_task(config: DictConfig) -> str:
    """Fill in the arithmetic task where a run names neither data nor reward; returns a note.

    Or only its reward, where its data are chosen. An empty note: nothing was filled in.
    """
    plain = OmegaConf.to_container(config)  # interpolations as they stand

    def below(node: Any, name: str) -> Any:
        return node.get(name) if isinstance(node, dict) else None

    given = {key: reduce(below, key.split("."), plain) for key in _TASK}
    if given[REWARD] != "???" or current_path(str(given[DATA])) not in ("???", _TASK[DATA]):
        return ""
    validates = given["data.validation.source"] not in (None, "???")
    for key, value in _TASK.items():
        if given[key] in (None, "???") and not (validates and key.startswith("data.validation.")):
            OmegaConf.update(config, key, value, force_add=True)
    return (
        f"built-in task: arithmetic, scored by {_TASK[REWARD]}, as no reward was named; of your "
        f"own: {DATA}=FILE.jsonl {REWARD}=FILE.py:FUNCTION"
    )


def parse_config(values: Mapping[str, Any], root: type[Root] = RunConfig) -> Root:  # type: ignore[assignment]
    """Validate a plain nested mapping as a ``root``."""
    config = build(root, values)
    if isinstance(config, BaseRunConfig):
        config = _named(derive_batches(config, values))
    check_config(config)
    return config


def derive_batches(config: Run, values: Mapping[str, Any]) -> Run:
    """``config`` with batch sizes that are null in ``values`` worked out from the others.

    A global batch is what a step learns from, in equal parts of no more than 64 samples; it never
    depends on the layout. A micro-batch is the largest number up to 8 that the shares of the
    data-parallel ranks divide by. Where nothing fits, the usual sizes stay and the checks speak.
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
    section, given = getattr(config, role), values.get(role) or {}
    rows = config.rows_per_example if isinstance(config, SupervisedRunConfig) else 1
    if given.get("global_batch_size") is None:
        batch = _global_batch(config) or section.global_batch_size
        section = replace(section, global_batch_size=batch)
    if given.get("micro_batch_size") is None:
        layout = config.value_parallel if role == "critic" else config.model.parallel
        ranks = max(1, layout.data_size(world_size))
        share, rest = divmod(section.global_batch_size, ranks)
        sizes = range(min(LARGEST_MICRO_BATCH, share), 0, -1)
        fitting = [] if rest else [n for n in sizes if share % n == 0 and n % rows == 0]
        section = replace(section, micro_batch_size=(*fitting, section.micro_batch_size)[0])
    return section


def _global_batch(config: BaseRunConfig) -> int | None:
    """The samples a step learns from in the fewest equal parts. None means there is no such number."""
    if isinstance(config, RSRunConfig):
        rs = config.model.rs
        learned = rs.num_rollout_samples // rs.num_rollouts_per_prompt * rs.top_n_rollouts
        largest = LARGEST_KEPT_BATCH
    elif isinstance(config, RunConfig):
        learned, largest = config.model.ppo.num_rollout_samples, LARGEST_BATCH
    else:
        return None
    fewest = -(-learned // largest)
    # No more than twice as many: a prime number of samples is not learned one by one.
    for parts in range(fewest, 2 * fewest + 1) if learned else ():
        if learned % parts == 0:
            return learned // parts
    return None


def check_config(config: BaseRunConfig | AskConfig) -> None:
    """Refuse combinations of values that cannot work, all of them in one error."""
    if isinstance(config, BaseRunConfig):
        refuse([*broken_rules(config, "", config), *unread_options(config)])
    else:
        refuse(config.problems("", config))


def _named(config: Run) -> Run:
    """``config`` with the algorithm's name in ``exp_manager.explicit_log_dir``."""
    exp = config.exp_manager
    if "{algorithm}" not in exp.explicit_log_dir:
        return config
    name = algorithm_of(config.as_dict()).directory
    folder = exp.explicit_log_dir.replace("{algorithm}", name)
    return replace(config, exp_manager=replace(exp, explicit_log_dir=folder))


def as_omegaconf(values: Mapping[str, Any]) -> DictConfig:
    """A plain mapping in the form that NeMo's base class insists on."""
    return values if isinstance(values, DictConfig) else OmegaConf.create(dict(values))


def plain_mapping(values: Mapping[str, Any], keys: Sequence[str] | None = None) -> dict[str, Any]:
    """hydra's or a plain mapping as a plain one: interpolations resolved, missing keys left out.

    ``keys``: only those that are there of these; the others need not resolve.
    """
    found = [key for key in values if keys is None or key in keys]
    if not isinstance(values, DictConfig):
        return {key: values[key] for key in found}
    plain = {}
    for key in found:
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
    """A section of a run's configuration out of a mapping: the first kind that has its keys.

    ``prefix``: of the keys in messages. Where none has them all, the first one's error is raised.
    """
    kind = next((kind for kind in kinds if set(values) <= set(field_types(kind))), kinds[0])
    return build(kind, values, prefix)
