"""Configurations of training runs from a few settings."""

import copy
import re

import yaml

from aligner.config import RunConfig, parse_config
from aligner.config.parse import field_types

REQUIRED = {
    "model": {"restore_from_path": "m.nemo"},
    "data": {"train": {"source": "train.jsonl"}},
    "reward": {"function": "a.b:reward"},
    "teacher": {"restore_from_path": "t.nemo"},
}


def pairs(settings):
    """Dotted keys and values of ``key=value`` texts with spaces between them."""
    parts = (setting.partition("=") for setting in settings.split())
    return {key: yaml.safe_load(value) for key, _, value in parts}


def tree(settings="", root=RunConfig):
    """The required values of ``root``, and settings by their dotted keys.

    ``settings``: a mapping, or text such as ``seed=3 model.optim.lr=1`` with values as in YAML.
    """
    required = {key: value for key, value in REQUIRED.items() if key in field_types(root)}
    values = copy.deepcopy(required)
    for key, value in (pairs(settings) if isinstance(settings, str) else settings).items():
        *path, last = key.split(".")
        level = values
        for name in path:
            level = level.setdefault(name, {})
        level[last] = value
    return values


def parsed(settings="", root=RunConfig):
    """The configuration of `tree`."""
    return parse_config(tree(settings, root), root)


def rows_of(table):
    """Cells of the rows of a text, with " | " between cells.

    A row may go on in lines with an indentation; lines that begin with # are left out.
    """
    lines = re.sub(r"\n +", " ", table.strip()).splitlines()
    return [line.split(" | ") for line in lines if not line.startswith("#")]
