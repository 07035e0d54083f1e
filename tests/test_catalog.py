"""The table of algorithms: every row has what it names, and nothing stands beside it.

`test_conf` composes and validates every row's configuration and recipe, `test_commands` finds its
command, `test_docs_tables` holds its page's options.
"""

import re

import pytest
from documented import ROOT, commands, tables
from test_conf import RECIPES, ROOTS, root_of

from aligner.catalog import ALGORITHMS, BY_SCRIPT
from aligner.commands import COMMANDS
from aligner.config import BaseRunConfig
from aligner.config.algorithms.names import algorithm_of


def test_every_training_script_and_configuration_is_a_row():
    scripts = {path.stem for path in (ROOT / "examples").glob("train_*.py")}
    assert scripts == set(BY_SCRIPT)
    configured = {name for name, (root, _) in ROOTS.items() if issubclass(root, BaseRunConfig)}
    assert configured == {entry.config_name for entry in ALGORITHMS.values()}
    assert {root_of(recipe) for recipe in RECIPES} - {"gpt_evaluate"} == configured


@pytest.mark.parametrize("entry", ALGORITHMS.values(), ids=ALGORITHMS)
def test_a_row_has_what_it_names(entry):
    assert COMMANDS[f"train-{entry.name}"].script == entry.script
    script = (ROOT / "examples" / f"{entry.script}.py").read_text()
    assert re.findall(r'ALGORITHMS\["(\w+)"\]', script) == [entry.name]
    assert issubclass(entry.root_class, BaseRunConfig)
    assert root_of(entry.recipe) == entry.config_name
    module, _, function = entry.builder.partition(":")
    source = (ROOT / f"{module.replace('.', '/')}.py").read_text()
    told = re.search(rf"^def {function}\(config: (\w+)\) -> None:", source, re.MULTILINE)
    assert told[1] == entry.root_class.__name__
    # The page runs the script, and the README leads to the page.
    assert entry.script in {each.script for each in commands() if each.page == f"docs/{entry.page}"}
    overview = [each for each in tables() if each.header[:3] == ("what", "script", "page")]
    rows = [row for table in overview if table.page == "README.md" for row in table.rows]
    assert any(f"{entry.script}.py" in row[1] and entry.page in row[2] for row in rows)


def test_run_states_tell_every_algorithm():
    sections = {"reinforce": "ppo", "reward": "reward_model"}
    for name in ALGORITHMS:
        section = sections.get(name, name)
        assert algorithm_of({"trainer": {section: {}}}).section == section
