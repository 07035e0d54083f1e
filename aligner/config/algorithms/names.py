"""Derives the name of the algorithm from the configuration of a run."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from aligner.catalog import ESTIMATORS, SURROGATES


class Algorithm(NamedTuple):
    """An algorithm's title, the key of its section in ``trainer``, and whether it has a critic."""

    name: str
    section: str  # of ``trainer``
    has_critic: bool

    @property
    def directory(self) -> str:
        """Name for use in a directory's name, such as ``dr_grpo`` for "Dr. GRPO"."""
        plain = self.name.lower().replace("reinforce++", "reinforce_plus_plus")
        return re.sub(r"[^a-z0-9]+", "_", plain.replace(" with a baseline", "_baseline")).strip("_")


def algorithm_of(config: Mapping[str, Any]) -> Algorithm:
    """Return the algorithm of a configuration: nested dicts of a current or a saved run."""
    sections = ("ppo", "rs", "sft", "dpo", "reward_model", "distill")
    trainer = config["trainer"]
    section = next(name for name in sections if name in trainer)
    loop = trainer[section]
    if section == "ppo":
        estimator = loop.get("advantage", {}).get("estimator", "gae")
        entry = ESTIMATORS.get(estimator)
        name = f"Policy gradients ({estimator})" if entry is None else entry.title
        variants = ", ".join(_variants(loop, config.get("model", {}).get("ppo", {})))
        if variants:
            name = variants if estimator == "grpo" else f"{name} ({variants})"
    else:
        source = "on-policy" if loop.get("on_policy") else "offline"
        name = {
            "rs": "Rejection sampling",
            "sft": "Fine-tuning",
            "dpo": f"Preference optimisation ({loop.get('loss', 'dpo').upper()})",
            "reward_model": f"Reward model ({loop.get('loss', '').replace('_', ' ')})",
            "distill": f"Distillation ({source}, {loop.get('kl')} KL)",
        }[section]
    return Algorithm(name, section, config.get("critic") is not None)


def _variants(loop: Mapping[str, Any], policy: Mapping[str, Any]) -> list[str]:
    """Return the variants of GRPO, such as DAPO, that ``trainer.ppo`` and ``model.ppo`` select."""
    eps = policy.get("ratio_eps")
    clips_higher = isinstance(eps, Sequence) and len(set(eps)) > 1
    surrogate = SURROGATES.get(policy.get("surrogate", ""))
    is_set = {
        "DAPO": loop.get("dynamic_sampling", {}).get("enabled") and clips_higher,
        "GSPO": policy.get("ratio_level") == "sequence",
    }
    names = [name for name, value in is_set.items() if value]
    return [*names, surrogate.title] if surrogate and surrogate.title else names
