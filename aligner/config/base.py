"""Provides hydra with the defaults of all configurations, derived from the dataclasses.

Files of ``conf/`` extend the default ``base_NAME``, which hydra finds in the source ``models://``.
"""

import dataclasses
from typing import Any, get_args

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from aligner.catalog import ALGORITHMS, imported
from aligner.config.fields import DERIVED, REQUIRED_BY_SCRIPTS
from aligner.config.parse import default_of, field_types, section_in

# The dataclass of each base: the configuration of a script, or a section that is null by default.
BASES = {
    **{f"base_{entry.name}": entry.root for entry in ALGORITHMS.values()},
    "base_generate": "aligner.config.commands.ask:GenerateConfig",
    "base_evaluate": "aligner.config.commands.ask:EvaluateConfig",
    "base_serve": "aligner.config.commands.ask:ServeConfig",
    "base_prompts": "aligner.config.data:PromptSourceConfig",
    "base_reward_model": "aligner.config.reward:RewardModelConfig",
    "base_reward_server": "aligner.config.reward:RewardServerConfig",
}


def default_tree(section: Any) -> dict[str, Any]:
    """Return the defaults of a dataclass, or the values of an instance, as a nested dict."""
    cls = section if isinstance(section, type) else type(section)
    tree: dict[str, Any] = {}
    value: Any
    for field, hint in zip(dataclasses.fields(cls), field_types(cls).values(), strict=True):
        below = section_in(hint)
        if DERIVED in get_args(hint):
            value = None
        elif REQUIRED_BY_SCRIPTS in get_args(hint):
            value = "???"
        elif section is not cls:
            value = getattr(section, field.name)
        elif (value := default_of(field)) is dataclasses.MISSING:
            value = "???" if below is None else below
        is_section = below is not None and value not in (None, "???")
        tree[field.name] = default_tree(value) if is_section else value
    return tree


class ModelSource(ConfigSource):
    """Hydra source of the built-in configurations in ``BASES``."""

    @staticmethod
    def scheme() -> str:
        """Return ``models``, the part before ``://`` in the source's address."""
        return "models"

    def load_config(self, config_path: str) -> ConfigResult:
        """Return the default values of the configuration ``config_path``, such as ``base_ppo``."""
        tree = default_tree(imported(BASES[config_path.removesuffix(".yaml")]))
        return ConfigResult(
            self.provider, self.full_path(), OmegaConf.create(tree), {"package": None}
        )

    def available(self) -> bool:
        """Return True, as hydra requires of an existing source."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Return whether a path is a folder. Only the empty path, the root, is a folder."""
        return not config_path

    def is_config(self, config_path: str) -> bool:
        """Return whether a path is a configuration, a key of ``BASES``."""
        return config_path.removesuffix(".yaml") in BASES

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Return an empty list, because hydra must not offer these files as options."""
        return []


class ModelSearchPath(SearchPathPlugin):
    """Hydra plugin that adds `ModelSource` to every search path."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append `ModelSource` to hydra's search path. Files found earlier have precedence."""
        search_path.append(provider="aligner", path="models://")


Plugins.instance().register(ModelSource)
Plugins.instance().register(ModelSearchPath)
