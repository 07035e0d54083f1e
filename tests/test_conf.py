"""Every configuration in conf/ composes and validates, and contains overrides only."""

import dataclasses
import re

import pytest
from omegaconf import OmegaConf
from recipes import CONF, composed

from aligner.catalog import ALGORITHMS
from aligner.config import BaseRunConfig, EvaluateConfig, GenerateConfig, ServeConfig, load_config
from aligner.config.parse import field_types

RECIPES = sorted(path.stem for path in (CONF / "recipes").glob("*.yaml"))
MODEL, TRAIN = "model.restore_from_path=m.nemo", "data.train.source=train.jsonl"
REWARD, TEACHER = "reward.function=a.b:reward", "teacher.restore_from_path=t.nemo"


def needed(entry):
    """What a training script's configuration has no default for."""
    keys = field_types(entry.root_class)
    given = [one for one in (REWARD, TEACHER) if one.split(".")[0] in keys]
    return [MODEL, TRAIN, *given]


# What a script's configuration describes, and what it has no default for.
ROOTS = {
    **{one.config_name: (one.root_class, needed(one)) for one in ALGORITHMS.values()},
    "gpt_generate": (GenerateConfig, [MODEL, "prompt=[hello]"]),
    "gpt_evaluate": (EvaluateConfig, [MODEL, "+data.prompts.source=t.jsonl", REWARD]),
    "gpt_serve": (ServeConfig, [MODEL]),
}
GROUPS = {
    **{name: name for name in ("model", "critic", "reward", "data", "cluster", "exp_manager")},
    **{"optim": "optim@model.optim", "parallel": "parallel@model"},
}
# Options that belong to one script alone; the others to gpt_ppo at least.
OWNERS = {
    ("model", "trained"): "gpt_sft",
    ("model", "rs"): "gpt_rs",
    ("model", "student"): "gpt_distill",
    ("data", "examples"): "gpt_sft",
    ("data", "arithmetic_examples"): "gpt_sft",
    ("data", "preferences"): "gpt_dpo",
    ("data", "arithmetic_pairs"): "gpt_dpo",
    ("data", "rewards"): "gpt_reward",
    ("data", "arithmetic_rewards"): "gpt_reward",
}
# What an option has no default for.
NEEDS = {
    ("reward", "model"): ["reward.model.restore_from_path=r.nemo"],
    ("reward", "server"): ["reward.server.url=http://localhost:5555"],
    ("reward", "environment"): ["environment.factory=a.b:Game", "reward.function=null"],
}
OPTIONS = [(group, path.stem) for group in GROUPS for path in sorted((CONF / group).glob("*.yaml"))]


def root_of(recipe):
    """The script's configuration that a recipe completes."""
    text = (CONF / "recipes" / f"{recipe}.yaml").read_text()
    other = re.search(r"^  - /recipes/(\S+)$", text, re.MULTILINE)
    return root_of(other[1]) if other else re.search(r"^  - /(gpt_\w+)$", text, re.MULTILINE)[1]


@pytest.mark.parametrize("name", ROOTS)
def test_a_script_validates_and_every_key_is_in_its_yaml(name):
    """So that ``--help`` shows the key and an override needs no plus sign."""
    root, required = ROOTS[name]
    assert isinstance(load_config(composed(name, *required), root), root)
    tree = OmegaConf.to_container(composed(name), resolve=False)

    def missing(cls, level, prefix):
        for key, hint in field_types(cls).items():
            if key not in level:
                yield f"{prefix}{key}"
            elif dataclasses.is_dataclass(hint):
                yield from missing(hint, level[key], f"{prefix}{key}.")

    assert list(missing(root, tree, "")) == []


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_validates_and_documents_itself(recipe):
    run = load_config(composed(recipe), ROOTS[root_of(recipe)][0])
    if isinstance(run, BaseRunConfig):
        assert run.exp_manager.explicit_log_dir == f"results/{recipe}"
    header = (CONF / "recipes" / f"{recipe}.yaml").read_text().split("defaults:")[0]
    for word in ("Launch:", "Hardware:", "Expected:"):
        assert word in header


@pytest.mark.parametrize(("group", "option"), OPTIONS)
def test_every_group_option_composes(group, option):
    name = OWNERS.get((group, option), "gpt_ppo")
    root, required = ROOTS[name]
    needed = [*required, *NEEDS.get((group, option), [])]
    tree = composed(name, f"{GROUPS[group]}={option}", *needed)
    assert isinstance(load_config(tree, root), root)


def test_default_directories_differ():
    """So that no command finds the run of another one in its directory."""
    variants = [
        *((name, []) for name, (root, _) in ROOTS.items() if issubclass(root, BaseRunConfig)),
        *(("gpt_reinforce", [f"trainer.ppo.advantage.estimator={e}"]) for e in ("grpo", "dr_grpo")),
        *(("gpt_dpo", [f"trainer.dpo.loss={loss}"]) for loss in ("ipo", "kto")),
    ]
    trees = [(composed(name, *ROOTS[name][1], *more), ROOTS[name][0]) for name, more in variants]
    folders = [load_config(*tree).exp_manager.explicit_log_dir for tree in trees]
    assert len(set(folders)) == len(folders)


@pytest.mark.parametrize(
    "path",
    [path for path in sorted(CONF.rglob("*.yaml")) if path.parent.name != "recipes"],
    ids=lambda path: f"{path.parent.name}/{path.stem}",
)
def test_every_key_is_documented_where_it_is_defined(path):
    """A file says what it is, and a line that gives a value says what the value means."""
    lines = path.read_text().split("\nhydra:")[0].splitlines()
    assert lines[0].startswith("#")
    bare = [line for line in lines if re.match(r"\s*\w+: [^#]+$", line) and "usage:" not in line]
    assert bare == []
