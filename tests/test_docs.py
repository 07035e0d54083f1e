"""What the documentation says of options, metrics, files and commands is so."""

import re
import runpy
from contextlib import closing

import pytest
from documented import PAGES, ROOT

from aligner.observe.metrics import METRICS, PREFIXES
from aligner.rewards.function.runner import RewardFunction

ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PPO = (ROOT / "docs" / "ppo.md").read_text()


def test_every_metric_is_explained_as_the_registry_explains_it():
    tool = runpy.run_path(str(ROOT / "docs" / "tools" / "metrics.py"))
    text = tool["PAGE"].read_text()
    assert tool["page"](text) == text, "run: python -m docs.tools.metrics --write"
    tables = text.split(tool["BEGIN"])[1]
    names = [name.rpartition("/")[2] for name in METRICS] + [f"{prefix}*" for prefix in PREFIXES]
    explained = {name for row in tables.split("\n|") for name in row.split("|")[0].split("`")}
    assert set(names) - explained == set()


def tree_entries():
    """Paths of the annotated tree: names, two blanks or more, what it is."""
    section = ARCHITECTURE[ARCHITECTURE.index("## Where things are") :]
    block = re.search(r"```text\n(.*?)```", section, re.DOTALL)
    folders = []
    for line in block[1].splitlines():
        depth = (len(line) - len(line.lstrip())) // 2
        names = re.split(r"\s{2,}", line.strip())[0].split()
        for name in names:
            yield "/".join([*folders[:depth], name])
        folders[depth:] = [names[-1].rstrip("/")]


def test_the_annotated_tree_is_the_tree():
    entries = list(tree_entries())
    assert [entry for entry in entries if not (ROOT / entry).exists()] == []
    packages = {
        path.parent.relative_to(ROOT).as_posix()
        for library in ("aligner", "aligner_environments", "aligner_plan")
        for path in (ROOT / library).rglob("__init__.py")
        if len(list(path.parent.glob("*.py"))) > 1
    }
    assert packages - {entry.rstrip("/") for entry in entries} == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_and_files_lead_somewhere(page):
    """Targets of make and modules are in test_docs_commands.py."""
    text = page.read_text()
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", text)
    assert [link for link in links if not (page.parent / link).exists()] == []
    folders = "aligner|benchmarks|campaigns|conf|docs/tools|examples|tests"
    scripts = set(re.findall(rf"(?<![\w/.])(?:{folders})/[\w/]+\.(?:py|yaml)", text))
    shown = re.compile("NAME|example")  # names in which a page leaves a part to the reader
    missing = [script for script in scripts if not (ROOT / script).exists()]
    assert [script for script in missing if not shown.search(script)] == []


def test_the_page_lists_what_continuous_integration_runs():
    runs = re.findall(r"^make [a-z-]+", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    sentence = re.search(r"`\.ci/run` calls ([^.]*)\.", (ROOT / "docs/development.md").read_text())[
        1
    ]
    assert re.findall(r"make [a-z-]+", sentence) == runs


def test_the_reward_function_of_the_page_does_what_the_page_says(tmp_path):
    source = re.search(r"```python\n# my_rewards\.py\n(.*?)```", PPO, re.DOTALL)[1]
    (tmp_path / "my_rewards.py").write_text(source)
    name, kwargs = f"{tmp_path}/my_rewards.py:reward", {"partial": 0.2}
    with closing(RewardFunction(name, kwargs=kwargs)) as function:
        ended = {"is_end": [True, True, False, True]}
        scored = function(["p"] * 4, ["21", "22", "21", "no"], ["21"] * 4, ended)
    assert scored.rewards.tolist() == pytest.approx([1.0, 0.2, 0.0, 0.0])
    assert scored.parts == {"accuracy": [1, 0, 0, 0], "is_number": [1, 1, 0, 0]}


def test_the_picture_of_results_shows_the_tables():
    drawn = runpy.run_path(str(ROOT / "docs" / "tools" / "results_chart.py"))
    assert (ROOT / "docs" / "results.svg").read_text() == drawn["picture"]()


def test_the_script_of_the_readme_is_the_example():
    script = (ROOT / "examples" / "python" / "grpo.py").read_text()
    _, _, body = script.split('"""', 2)
    assert f"```python\n{body.strip()}\n```" in (ROOT / "README.md").read_text()
