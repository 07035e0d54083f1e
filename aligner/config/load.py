"""Conversion of omegaconf's tree into ``RunConfig``, the only one."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.compat.paths import current_path
from aligner.config.commands.ask import AskConfig
from aligner.config.parse import build, field_types
from aligner.config.rules.batches import derive_batches
from aligner.config.rules.checks import check_config
from aligner.config.run import BaseRunConfig, RunConfig, algorithm_of
from aligner.errors import ConfigError

if importlib.util.find_spec("hydra"):  # an engine's environment has none, and composes nothing
    import aligner.config.base  # noqa: F401  (hydra finds the defaults of conf/ by it)

Root = TypeVar("Root", bound=BaseRunConfig | AskConfig)
Run = TypeVar("Run", bound=BaseRunConfig)
Section = TypeVar("Section")
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
        missing = sorted(OmegaConf.missing_keys(config))
        if missing:
            raise ConfigError(_not_given(missing))
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
    given = {key: reduce(_below, key.split("."), plain) for key in _TASK}
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


def _below(node: Any, name: str) -> Any:
    return node.get(name) if isinstance(node, dict) else None


def _not_given(keys: list[str]) -> str:
    others = f" (also missing: {', '.join(keys[1:])})" if keys[1:] else ""
    return f"{keys[0]}: required and not set; give it as {keys[0]}=... on the command line{others}"


def parse_config(values: Mapping[str, Any], root: type[Root] = RunConfig) -> Root:  # type: ignore[assignment]
    """Validate a plain nested mapping as a ``root``."""
    config = build(root, values)
    if isinstance(config, BaseRunConfig):
        config = _named(derive_batches(config, values))
    check_config(config)
    return config


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
