"""`make docs`: the site is built without a warning, with a page for every public module."""

import html
import os
import re
import subprocess

import pytest
from documented import PAGES, ROOT, name_of

PYTHON = ROOT / ".venv-docs" / "bin" / "python"
pytestmark = [
    pytest.mark.extended,
    pytest.mark.skipif(not PYTHON.exists(), reason="needs the environment that `make docs` makes"),
]


def build(folder, config=ROOT / "mkdocs.yml"):
    return subprocess.run(
        [PYTHON, "-m", "mkdocs", "build", "--strict", "-f", config, "-d", folder],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    done = build(folder)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    return folder


def text_of(page):
    """The words of a page, without its navigation."""
    body = page.read_text().split("<article", 1)[1].split("</article>", 1)[0]
    return html.unescape(re.sub(r"<[^>]+>", "", body))


def test_every_public_module_has_a_page(site):
    modules = [
        path.relative_to(ROOT).with_suffix("")
        for library in ("aligner", "aligner_environments", "aligner_plan")
        for path in (ROOT / library).rglob("*.py")
        if not path.stem.startswith("_") and (path.parent / "__init__.py").exists()
    ]
    assert len(modules) > 200
    missing = [str(path) for path in modules if not (site / "reference" / path).is_dir()]
    assert missing == []


def test_every_page_of_the_repository_is_there_and_in_one_piece(site):
    for page in PAGES:
        if name_of(page) == "README.md":
            continue  # docs/index.md begins the site
        name = name_of(page).removeprefix("docs/").removesuffix(".md")
        folder = name.removesuffix("/README").removesuffix("index")
        words = text_of(site / folder / "index.html")
        left = re.search(r"\]\([\w./#-]+\)|^\|.+\|.+\|$|\\\|", words, re.MULTILINE)
        assert left is None, f"{name}: {left[0]}"


def test_docstrings_of_a_terminal_are_shown_as_tables_and_drawings(site):
    types = (site / "reference/aligner/types/index.html").read_text()
    row = re.search(r"<td>.*?token_mask.*?</td>\s*<td>(.*?)</td>\s*<td>(.*?)</td>", types)
    assert row[2] == "1 where the token was generated (EOS included)"
    kinds = text_of(site / "reference/aligner/types/index.html")
    assert "=====" not in kinds
    for page in (site / "reference").rglob("index.html"):
        body = page.read_text().split("<article", 1)[1].split("</article>", 1)[0]
        prose = re.sub(r"<pre.*?</pre>", "", body, flags=re.DOTALL)
        left = re.search(r".*(?:::\s*</p>|─►|={5,}).*", prose)
        assert left is None, f"{page}: {left[0]}"


def test_what_a_handle_declares_is_shown_as_the_workers_method(site):
    words = text_of(site / "reference/aligner/models/policy/lm_policy/index.html")
    assert "get_logprobs" in words
    assert "Column t is the log-prob of token t" in words
    phases = text_of(site / "reference/aligner/models/handle/index.html")
    assert "prepare_for_training" in phases
    assert "Move weights and optimizer state to the device, and enter training mode." in phases
