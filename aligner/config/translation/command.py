"""Translation of a YAML file of NeMo-RL or NeMo-Aligner to a command of this library."""

import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.catalog import ALGORITHMS
from aligner.compat.nemo_aligner import is_inert
from aligner.config.cli import check_key
from aligner.config.combinations import changed_keys
from aligner.config.roles.model import CriticConfig, ModelConfig
from aligner.config.translation.nemo_rl import PublishedRole, read_role
from aligner.config.translation.nemo_rl_values import Notes, is_off
from aligner.errors import ConfigError, raised_as
from aligner.foreign_keys import IGNORED, as_override, table

# Section of NeMo's file for an algorithm → name of the algorithm here, its key below ``trainer``.
_BOTH = {name: (name, name) for name in ("ppo", "sft", "dpo")}
_NEMO_RL = {"grpo": ("reinforce", "ppo"), **_BOTH}
_NEMO_ALIGNER = {**_BOTH, "rs": ("rs", "rs"), "rm": ("reward", "reward_model")}
# NeMo-RL's key outside of the sections policy and value → key here. {a} and {t} are the section of
# the algorithm in NeMo-RL and here.
_KEYS = {
    "{a}.max_num_steps": "trainer.{t}.max_steps",
    "{a}.max_num_epochs": "trainer.{t}.max_epochs",
    "{a}.num_generations_per_prompt": "model.ppo.num_rollouts_per_prompt",
    "{a}.seed": "seed",
    "{a}.val_period": "trainer.{t}.val_check_interval",
    "checkpointing.checkpoint_dir": "exp_manager.explicit_log_dir",
    "checkpointing.save_period": "trainer.{t}.save_interval",
    "cluster.gpus_per_node": "trainer.devices",
    "cluster.num_nodes": "trainer.num_nodes",
    "loss_fn.ratio_clip_c": "model.ppo.dual_clip",
    "loss_fn.reference_policy_kl_penalty": "model.ppo.kl_loss.coef",
}
_NO_COUNTERPART = "a key of this library (docs/published.md), or leave it out"


def translate(path: str | Path) -> str:
    """Return a command for the training run that a YAML file of NeMo-Aligner or NeMo-RL describes.

    Comment lines before the command list keys that cannot be translated. Raises `ConfigError` if
    the file cannot be read or has none of this library's algorithms.
    """
    # Find the algorithm: a top-level section of NeMo-RL, or a section of NeMo-Aligner's trainer.
    values = _read(Path(path))
    notes = Notes("")
    is_nemo_rl = "policy" in values
    sections, parent = (_NEMO_RL, values) if is_nemo_rl else (_NEMO_ALIGNER, values.get("trainer"))
    section = next((name for name in sections if name in (parent or {})), None)
    if section is None:
        label = "the file" if is_nemo_rl else "trainer"
        raise ConfigError(
            f"{path}: {label} has none of the sections {', '.join(sections)}. "
            "Give a configuration of one of these algorithms"
        )
    algorithm, loop = sections[section]

    # Translate the dotted keys and their values.
    if is_nemo_rl:
        settings = dict(_from_nemo_rl(values, section, loop, notes))
    else:
        leaves = {key: value for key, value in _leaves(values) if value is not None}
        settings = {key: value for key, value in leaves.items() if not is_inert(key, value)}
        notes.ignored += [key for key in leaves if key in IGNORED]

    # Write the command, and comments about keys that it cannot have.
    entry = ALGORITHMS[algorithm]
    arguments = []
    for key, value in settings.items():
        try:
            check_key(key, entry.root_class)
            arguments.append(shlex.quote(f"{key}={as_override(value)}"))
        except ConfigError as error:
            problem = str(error).partition(": ")[2]  # without the key
            notes.refused.append((key, value, problem))
    command = " \\\n    ".join([f"aligner train-{entry.name}", *arguments])
    comments = table(notes.refused).splitlines() if notes.refused else []
    if notes.ignored:
        comments.append(f"  keys without effect here: {', '.join(notes.ignored)}")
    return "\n".join([*(f"#{comment}" for comment in comments), command])


def _read(path: Path) -> dict[str, Any]:
    for name, resolve in (("mul", lambda *factors: math.prod(factors)), ("max", max)):
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolve)
    damage = (OSError, ValueError, OmegaConfBaseException)
    with raised_as(ConfigError, f"{path}: cannot be read", *damage):
        values = OmegaConf.to_container(_merged(path), resolve=True)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != "hydra"}


def _merged(path: Path) -> DictConfig | ListConfig:
    content = OmegaConf.load(path)
    if not isinstance(content, DictConfig):
        raise ValueError(f"{path} is a list")
    defaults = content.pop("defaults", None)
    names = [defaults] if isinstance(defaults, str) else defaults or ()
    files = [path.parent / name for name in names if str(name).endswith(".yaml")]
    return OmegaConf.merge(*map(_merged, files), content)


def _from_nemo_rl(
    values: Mapping[str, Any], section: str, loop: str, notes: Notes
) -> Iterator[tuple[str, Any]]:
    """Yield (key of this library, value). Add refused and ignored keys to ``notes``.

    ``section``: section of the algorithm in NeMo-RL. ``loop``: its section below ``trainer`` here.
    """
    # Convert the models' sections.
    roles: tuple[Literal["policy"], Literal["value"]] = ("policy", "value")
    for name in roles:
        if name in values:
            role, role_notes = read_role(values[name], name)
            notes.refused += role_notes.refused
            notes.ignored += role_notes.ignored
            if role is not None:
                yield from _role_settings(role, name, loop)

    # Convert keys that have another name here. _KEYS has placeholders for section and loop.
    leaves = dict(_leaves({key: values[key] for key in values if key not in roles}))
    for nemo_key, key in _KEYS.items():
        value = leaves.pop(nemo_key.format(a=section), None)
        if value is not None:
            yield key.format(t=loop), value

    # Convert settings that depend on several keys, or on the algorithm.
    prompts = leaves.pop(f"{section}.num_prompts_per_step", None)
    if prompts is not None:
        per_prompt = values[section].get("num_generations_per_prompt", 1)
        yield "model.ppo.num_rollout_samples", prompts * per_prompt
    clip_range = [leaves.pop(f"loss_fn.ratio_clip_{side}", None) for side in ("min", "max")]
    if None not in clip_range:
        yield "model.ppo.ratio_eps", clip_range
    if section == "grpo":
        yield "trainer.ppo.advantage.estimator", "grpo"
    notes.refused += [
        (key, value, _NO_COUNTERPART) for key, value in leaves.items() if not is_off(value)
    ]


def _role_settings(role: PublishedRole, name: str, loop: str) -> Iterator[tuple[str, Any]]:
    if name == "value":
        yield from changed_keys("critic", asdict(role.critic), asdict(CriticConfig()))
        return
    yield "policy.backend", role.backend
    yield "trainer.precision", role.precision
    yield f"trainer.{loop}.gradient_clip_val", role.gradient_clip_val
    default = ModelConfig("", micro_batch_size=0, global_batch_size=0)
    for key, value in changed_keys("model", asdict(role.model), asdict(default)):
        if loop == "ppo" or not key.startswith("model.ppo."):
            yield key, value
    for key, value in role.env_vars.items():
        yield f"cluster.env_vars.{key}", value


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value.get("enabled") is False:
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
