"""Options are described once, below their fields; the tables in docs/ say the same."""

import re
import runpy
from typing import Any

import pytest
from documented import ROOT, tables
from test_conf import ROOTS
from test_docs_tables import SCRIPT_OF, code, takes

from aligner.config.parse import arms_of, build, keys_below
from aligner.config.translation.nemo_rl import PolicyConfig
from aligner.errors import ConfigError
from aligner.examples.pipeline_config import PipelineConfig, StageConfig
from aligner_plan.options import PlanConfig

TOOL = runpy.run_path(str(ROOT / "docs" / "tools" / "options.py"))
KINDS = [*TOOL["ROOTS"].values(), PlanConfig, PipelineConfig, StageConfig]


def test_pages_say_of_options_what_the_sections_say():
    stale = [path.relative_to(ROOT).as_posix() for path in TOOL["stale"]()]
    assert stale == [], "run: python -m docs.tools.options --write"


@pytest.mark.parametrize("cls", KINDS, ids=lambda cls: cls.__name__)
def test_every_option_is_described_with_its_choices(cls):
    lacking = []
    for option in TOOL["options"](cls):
        if not option.meaning:
            lacking.append(f"{option.key}: no docstring")
        for choice in option.choices:
            if not re.search(rf"\b{choice}\b", option.meaning):
                lacking.append(f"{option.key}: does not say what {choice} is")
    assert lacking == []


@pytest.mark.parametrize("cls", [*KINDS, PolicyConfig], ids=lambda cls: cls.__name__)
def test_no_value_is_taken_for_one_of_another_kind(cls):
    """Not where Python or pydantic would: "8" is no number, "yes" and 1 are no booleans."""
    values = (("yes", str), ("8", str), (b"8", bytes), (True, bool), (1, int), (1.5, float))
    taken, refusals = [], []
    for key, hint in keys_below(cls):
        kinds = set(arms_of(hint))
        kinds |= {int} if float in kinds else set()
        for value, kind in values:
            if kind in kinds or Any in kinds:
                continue
            try:
                build(hint, value, key)
                taken.append(f"{key}={value!r}")
            except ConfigError as error:
                refusals.append((key, str(error)))
    assert taken == []
    assert [message for key, message in refusals if not message.startswith(key)] == []
    assert len(refusals) > 10


TRAINING = {"ppo", "reinforce", "rs", "sft", "dpo", "reward", "distill"}  # pages, and scripts
# Parts of docs/options.md, and the pages of the scripts that take what stands there.
SHARED = {"Every training run": TRAINING, "Runs that sample and score": {"ppo", "reinforce", "rs"}}


def keys_of(cell):
    """Return the keys of a row: one, or those of a section, as "`section`: `key`, `key`"."""
    section = re.fullmatch(r"`([\w.]+)`: (.+)", cell)
    return [f"{section[1]}.{name}" for name in code(section[2])] if section else code(cell)


def keys_on(page, begin=0, end=None):
    """Keys of the tables of options between two lines of a page."""
    found = [
        name
        for table in tables()
        if table.page == f"docs/{page}.md" and table.header[:3] == ("key", "default", "meaning")
        if begin <= table.line and (end is None or table.line < end)
        for row in table.rows
        for name in keys_of(row[0])
    ]
    assert len(found) == len(set(found)), page
    return set(found)


def parts():
    """Heading of a part of docs/options.md, and the keys in it."""
    lines = (ROOT / "docs" / "options.md").read_text().splitlines()
    starts = [(n, line[3:]) for n, line in enumerate(lines, 1) if line.startswith("## ")]
    ends = [*(n for n, _ in starts[1:]), None]
    return {name: keys_on("options", n, end) for (n, name), end in zip(starts, ends, strict=True)}


def test_shared_options_are_those_of_the_scripts_that_share_them():
    assert parts().keys() == SHARED.keys()
    for part, keys in parts().items():
        taken = {
            key: {one for one in TRAINING if takes(ROOTS[SCRIPT_OF[one]][0], key)} for key in keys
        }
        assert {key: pages for key, pages in taken.items() if pages != SHARED[part]} == {}


@pytest.mark.parametrize("page", sorted(TRAINING))
def test_every_option_of_an_algorithm_is_on_its_page_or_shared(page):
    """Of REINFORCE and its kin, which are PPO without a critic, on PPO's."""
    found = {"ppo"} if page == "reinforce" else {page}
    found = set().union(*map(keys_on, found)) | keys_on(page)
    found |= {key for part, keys in parts().items() if page in SHARED[part] for key in keys}
    assert {option.key for option in TOOL["options"](ROOTS[SCRIPT_OF[page]][0])} - found == set()
