"""Every configuration in conf/ composes and validates, and agrees with the dataclasses."""

import dataclasses
import re
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from aligner.config import RunConfig, load_config
from aligner.config.parse import field_types

CONF = Path(__file__).parents[1] / "conf"
RECIPES = sorted(path.stem for path in (CONF / "recipes").glob("*.yaml"))
REQUIRED = [
    "model.restore_from_path=m.nemo",
    "reward.function=a.b:reward",
    "data.train.source=train.jsonl",
]
GROUPS = {
    "model": "model",
    "critic": "critic",
    "reward": "reward",
    "data": "data",
    "optim": "optim@model.optim",
    "parallel": "parallel@model",
    "cluster": "cluster",
    "exp_manager": "exp_manager",
}
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def composed(name, overrides=()):
    with initialize_config_dir(config_dir=str(CONF), version_base="1.3"):
        return compose(name, overrides=list(overrides))


def test_gpt_ppo_validates():
    assert isinstance(load_config(composed("gpt_ppo", REQUIRED)), RunConfig)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_validates_and_documents_itself(recipe):
    load_config(composed(f"recipes/{recipe}"))
    header = (CONF / "recipes" / f"{recipe}.yaml").read_text().split("defaults:")[0]
    for word in ("Launch:", "Hardware:", "Expected:"):
        assert word in header


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_group_option_composes(group, option):
    tree = composed("gpt_ppo", [f"{GROUPS[group]}={option}", *REQUIRED])
    assert isinstance(load_config(tree), RunConfig)


def test_yaml_defaults_equal_dataclass_defaults():
    """A default stands in two places, so that both can be read; they must not drift apart."""
    from_yaml = load_config(composed("gpt_ppo", REQUIRED))
    sparse = RunConfig(
        model=type(from_yaml.model)(restore_from_path="m.nemo"),
        reward=type(from_yaml.reward)(function="a.b:reward"),
        data=type(from_yaml.data)(train=type(from_yaml.data.train)(source="train.jsonl")),
    )
    assert from_yaml == sparse


def test_every_key_is_in_the_yaml():
    """So that ``--help`` shows it and it can be overridden without a plus sign."""
    tree = OmegaConf.to_container(composed("gpt_ppo"), resolve=False)

    def missing(cls, level, prefix):
        found = []
        for name, hint in field_types(cls).items():
            if name not in level:
                found.append(f"{prefix}{name}")
            elif dataclasses.is_dataclass(hint):
                found += missing(hint, level[name], f"{prefix}{name}.")
        return found

    assert missing(RunConfig, tree, "") == []


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONF.rglob("*.yaml")) if path.parent.name != "recipes"],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_key_is_documented_where_it_is_defined(path):
    """A file says what it is, and a line that gives a value says what the value means."""
    lines = path.read_text().split("\nhydra:")[0].splitlines()
    assert lines[0].startswith("#")
    bare = [line for line in lines if re.match(r"\s*\w+: [^#]+$", line)]
    assert bare == []
