"""Keys of every configuration set to odd values, in-process: accepted, or refused by their name."""

import traceback
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import aligner.config as roots
from aligner.catalog import ALGORITHMS
from aligner.config.cli import check_overrides
from aligner.config.load import parse_config
from aligner.errors import AlignerError
from campaigns.harness import ROOT, Campaign

_CONF = ROOT / "conf"
_ROOTS: dict[str, type[roots.BaseRunConfig]] = {
    entry.config_name: entry.root_class for entry in ALGORITHMS.values()
}
_FUNCTION = ("reward.function=m:f",)
_NEEDED = {
    "gpt_ppo": _FUNCTION,
    "gpt_reinforce": _FUNCTION,
    "gpt_rs": _FUNCTION,
    "gpt_distill": ("teacher.restore_from_path=t.nemo",),
}
_ON_COMMAND_LINE = (
    *("null", "true", "-1", "0", "1", "1.5", "-0.5", "nan", "inf", "-inf", "1e308", "1e-320"),
    *("99999999999999999999", "9" * 400, "''", "abc", "日本語", "[]", "[1]", "[1,2]", "[nan,inf]"),
    *("{}", "{a: 1}", "{a: {b: [null]}}", "'${seed}'", "'${nope.nope}'", "'${oc.env:NOPE}'"),
    *("0x10", "1_000", "' 3 '", "1e3", "[[[[]]]]", "'" + "a" * 5000 + "'", "true1"),
    *("'\\u202e\\u0000x'", "'../../../../etc/passwd'"),
)
_IN_A_TREE: tuple[Any, ...] = (
    *("\u0000", b"bytes", 10**400, -(10**400), float("nan"), float("inf"), 2**63, True, None, ""),
    *([], {}, [None], {"": 1}, {1: 2}, "x" * 10**6, 5e-324, "１２", complex),
)
_COUNT = 2000


def run_campaign(campaign: Campaign) -> None:
    """Try mutations one at a time, until the time is over."""
    trees = {name: OmegaConf.to_container(_composed(name, ())) for name in _ROOTS}
    keys = {name: list(_keys(tree)) for name, tree in trees.items()}
    tally: Counter[str] = Counter()
    for number in campaign.while_time(range(_COUNT)):
        del number
        name = campaign.rng.choice(["gpt_ppo"] * 4 + list(_ROOTS))
        key = campaign.rng.choice(keys[name])
        by_override = campaign.rng.random() < 0.6
        value = campaign.rng.choice(_ON_COMMAND_LINE if by_override else _IN_A_TREE)
        if by_override and campaign.rng.random() < 0.1:  # misspelt
            position = campaign.rng.randrange(len(key))
            key = key[:position] + campaign.rng.choice("xé_ .") + key[position + 1 :]
        campaign.trials += 1
        described = (
            f"{name} {key}={str(value)[:60]!r}" if by_override else f"{name} {key}:={value!r:.60}"
        )
        try:
            if by_override:
                overrides = check_overrides([f"{key}={value}"], _ROOTS[name], _CONF)
                roots.load_config(_composed(name, overrides), _ROOTS[name])
            else:
                parse_config(_with(trees[name], key, value), _ROOTS[name])
            tally["accepted"] += 1
        except AlignerError as error:
            tally["refused"] += 1
            if not any(part in str(error) for part in (key.split(".")[-1], key.split(".")[0])):
                campaign.trials -= 1
                campaign.record(described, False, f"the refusal names no key: {str(error)[:150]}")
        except Exception as error:
            if type(error).__module__.startswith(("hydra", "omegaconf")):
                tally["hydra's own message"] += 1
                continue
            place_of = traceback.extract_tb(error.__traceback__)[-1]
            campaign.trials -= 1
            note = f"{type(error).__name__} in {Path(place_of.filename).name}:{place_of.lineno}"
            campaign.record(described, False, note)
    print(f"  {dict(tally)}", flush=True)


def _composed(name: str, overrides: Any) -> Any:
    required = ["model.restore_from_path=m.nemo", "data.train.source=d.jsonl"]
    with initialize_config_dir(config_dir=str(_CONF), version_base="1.3"):
        return compose(name, overrides=[*required, *_NEEDED.get(name, ()), *overrides])


def _keys(tree: Any, prefix: str = "") -> Iterator[str]:
    for name, value in tree.items():
        key = f"{prefix}.{name}" if prefix else str(name)
        yield key
        if isinstance(value, Mapping) and value:
            yield from _keys(value, key)


def _with(tree: Any, key: str, value: Any) -> dict[str, Any]:
    """Return a copy of ``tree`` with ``value`` at the dotted ``key``."""
    first, _, tail = key.partition(".")
    return {**tree, first: _with(tree[first], tail, value) if tail else value}
