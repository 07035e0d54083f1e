"""Translation of a YAML file of NeMo-RL or NeMo-Aligner into a command of this library."""

import dataclasses
import math
import re
import shlex
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from aligner.catalog import ALGORITHMS
from aligner.compat.nemo_rl import PublishedRole, read_role
from aligner.compat.nemo_rl_values import Notes, is_off
from aligner.config.cli import check_key
from aligner.config.roles.model import CriticConfig, ModelConfig
from aligner.errors import ConfigError
from aligner.foreign_keys import IGNORED, is_inert, table

# Section of theirs that says what is trained: our algorithm, and the name below ``trainer``.
_BOTH = {name: (name, name) for name in ("ppo", "sft", "dpo")}
_NEMO_RL = {"grpo": ("reinforce", "ppo"), **_BOTH}
_NEMO_ALIGNER = {**_BOTH, "rs": ("rs", "rs"), "rm": ("reward", "reward_model")}
# NeMo-RL's keys outside of policy and value; {a}: its algorithm's section, {t}: ours.
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
_OWN = "state it by a key of ours (docs/published.md), or leave it out"


def translate(path: str | Path) -> str:
    """Return the command for what a file describes, below comments on what it leaves out.

    Raises:
        ConfigError: the file cannot be read, or describes no algorithm that there is here.
    """
    values, notes = _read(Path(path)), Notes("")
    of_nemo_rl = "policy" in values
    sections, place = (_NEMO_RL, values) if of_nemo_rl else (_NEMO_ALIGNER, values.get("trainer"))
    section = next((name for name in sections if name in (place or {})), None)
    if section is None:
        where = "the file" if of_nemo_rl else "trainer"
        raise ConfigError(f"{path}: {where} has none of {', '.join(sections)}")
    algorithm, own = sections[section]
    if of_nemo_rl:
        settings = dict(_from_nemo_rl(values, section, own, notes))
    else:
        given = {key: value for key, value in _leaves(values) if value is not None}
        settings = {key: value for key, value in given.items() if not is_inert(key, value)}
        notes.ignored += [key for key in given if key in IGNORED]
    entry, lines = ALGORITHMS[algorithm], []
    for key, value in settings.items():
        try:
            check_key(key, entry.root_class)
            lines.append(shlex.quote(f"{key}={_literal(value)}"))
        except ConfigError as error:
            notes.refused.append((key, value, str(error).partition(": ")[2]))
    command = " \\\n    ".join([f"python examples/{entry.script}.py", *lines])
    comments = table(notes.refused).splitlines() if notes.refused else []
    if notes.ignored:
        comments.append(f"  without a counterpart here: {', '.join(notes.ignored)}")
    return "\n".join([*(f"#{comment}" for comment in comments), command])


def _read(path: Path) -> dict[str, Any]:
    """Read a file as plain values, over those of the files that its ``defaults`` name."""
    for name, resolve in (("mul", lambda *each: math.prod(each)), ("max", max)):
        if not OmegaConf.has_resolver(name):
            OmegaConf.register_new_resolver(name, resolve)
    try:
        values = OmegaConf.to_container(_merged(path), resolve=True)
    except (OSError, ValueError, OmegaConfBaseException) as error:
        raise ConfigError(f"{path}: cannot be read: {error}") from error
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items() if key != "hydra"}


def _merged(path: Path) -> DictConfig | ListConfig:
    own = OmegaConf.load(path)
    if not isinstance(own, DictConfig):
        raise ValueError(f"{path} is a list")
    defaults = own.pop("defaults", None)
    names = [defaults] if isinstance(defaults, str) else defaults or ()
    files = [path.parent / name for name in names if str(name).endswith(".yaml")]
    return OmegaConf.merge(*map(_merged, files), own)


def _from_nemo_rl(
    values: Mapping[str, Any], section: str, own: str, notes: Notes
) -> Iterator[tuple[str, Any]]:
    """Yield our keys and values; ``notes`` gets what is refused and what is ignored."""
    roles: tuple[Literal["policy"], Literal["value"]] = ("policy", "value")
    for name in roles:
        if name in values:
            role, of_role = read_role(values[name], name)
            notes.refused += of_role.refused
            notes.ignored += of_role.ignored
            if role is not None:
                yield from _of_role(role, name, own)
    others = {key: value for key, value in values.items() if key not in ("policy", "value")}
    given = dict(_leaves(others))
    for theirs, ours in _KEYS.items():
        value = given.pop(theirs.format(a=section), None)
        if value is not None:
            yield ours.format(t=own), value
    prompts = given.pop(f"{section}.num_prompts_per_step", None)
    if prompts is not None:
        answers = values[section].get("num_generations_per_prompt", 1)
        yield "model.ppo.num_rollout_samples", prompts * answers
    clip = [given.pop(f"loss_fn.ratio_clip_{side}", None) for side in ("min", "max")]
    if None not in clip:
        yield "model.ppo.ratio_eps", clip
    if section == "grpo":
        yield "trainer.ppo.advantage.estimator", "grpo"
    notes.refused += [(key, value, _OWN) for key, value in given.items() if not is_off(value)]


def _of_role(role: PublishedRole, name: str, own: str) -> Iterator[tuple[str, Any]]:
    if name == "value":
        yield from _changes("critic", role.critic, CriticConfig())
        return
    yield "policy.backend", role.backend
    yield "trainer.precision", role.precision
    yield f"trainer.{own}.gradient_clip_val", role.gradient_clip_val
    plain = ModelConfig("", micro_batch_size=0, global_batch_size=0)
    for key, value in _changes("model", role.model, plain):
        if own == "ppo" or not key.startswith("model.ppo."):
            yield key, value
    for key, value in role.env_vars.items():
        yield f"cluster.env_vars.{key}", value


def _changes(key: str, value: Any, default: Any) -> Iterator[tuple[str, Any]]:
    """Yield the keys of a section whose values are not the defaults, with the values."""
    if not dataclasses.is_dataclass(value):
        if value != default:
            yield key, value
        return
    for each in dataclasses.fields(value):
        other = getattr(default, each.name, None)
        yield from _changes(f"{key}.{each.name}", getattr(value, each.name), other)


def _leaves(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping) and value.get("enabled") is False:
            continue
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _literal(value: Any) -> str:
    """Spell a value for hydra's command line."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, list | tuple):
        return f"[{','.join(map(_literal, value))}]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{_literal(each)}" for key, each in value.items()) + "}"
    text = str(value)
    if not isinstance(value, str) or re.fullmatch(r"[A-Za-z_./][\w./-]*", text):
        return text
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
