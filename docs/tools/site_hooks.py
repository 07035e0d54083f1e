"""What `make docs` adds to the pages of docs/: the API, pages outside docs/, links between them.

MkDocs calls the functions below (`hooks` of mkdocs.yml). The API has a page for every module of
`PACKAGES` that is in the tree when the site is built. No page lists modules by hand.
"""

import posixpath
import re
from itertools import chain
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
PACKAGES = ("aligner", "aligner_environments", "aligner_plan")
REFERENCE = "reference/"
# Pages that stand where one looks for them in the repository, and in the site under the same path.
OUTSIDE = ("CONTRIBUTING.md", "CHANGELOG.md", "examples/README.md", "benchmarks/LOG.md")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#:\s]+)(#[^)\s]*)?\)")


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Replace the entry of the API by the tree of its modules."""
    library, *others = PACKAGES
    api = [
        *modules_below(ROOT / library),
        *({package: modules_below(ROOT / package)} for package in others),
    ]
    config.nav = [
        {title: api if target == REFERENCE else target}
        for entry in config.nav
        for title, target in entry.items()
    ]
    return config


def modules_below(folder: Path) -> list[Any]:
    """Navigation of a package: its own page, packages below it, then its modules."""
    entries: list[Any] = [page_of(folder / "__init__.py")]
    for path in sorted(folder.iterdir(), key=lambda path: (path.is_file(), path.name)):
        if path.name.startswith("_"):
            continue
        if (path / "__init__.py").exists():
            entries.append({path.name: modules_below(path)})
        elif path.suffix == ".py":
            entries.append({path.stem: page_of(path)})
    return entries


def page_of(source: Path) -> str:
    """The page of a module or, for an ``__init__.py``, of a package."""
    path = source.relative_to(ROOT)
    name = path.parent / "index" if path.stem == "__init__" else path.with_suffix("")
    return f"{REFERENCE}{name.as_posix()}.md"


def sources(folder: Path) -> list[Path]:
    """Public modules below a package, those of packages without ``__init__.py`` left out."""
    found = [folder / "__init__.py"]
    for path in sorted(folder.iterdir()):
        if path.name.startswith("_"):
            continue
        if (path / "__init__.py").exists():
            found += sources(path)
        elif path.suffix == ".py":
            found.append(path)
    return found


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for every module, and the pages outside docs/."""
    for source in chain.from_iterable(sources(ROOT / package) for package in PACKAGES):
        names = source.relative_to(ROOT).with_suffix("").parts
        module = ".".join(names[:-1] if names[-1] == "__init__" else names)
        files.append(
            File.generated(config, page_of(source), content=f"# {names[-1]}\n\n::: {module}\n")
        )
    for path in OUTSIDE:
        files.append(File.generated(config, path, content=(ROOT / path).read_text()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Make the repository's links and tables the site's."""
    here = page.file.src_uri
    if here.startswith(REFERENCE):
        return markdown
    in_repository = here if here in OUTSIDE else f"docs/{here}"

    def rewritten(link: re.Match[str]) -> str:
        image, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath((PurePosixPath(in_repository).parent / target).as_posix())
        known = path if path in OUTSIDE else path.removeprefix("docs/")
        if files.get_file_from_path(known) is None:
            # A file of the repository that is no page; a path that is wrong is left to MkDocs.
            return text if not image and (ROOT / path).exists() else link[0]
        relative = posixpath.relpath(known, PurePosixPath(here).parent.as_posix())
        return f"{image}[{text}]({relative}{anchor})"

    return "\n".join(
        cell_bars(line) if line.startswith("|") else line
        for line in LINK.sub(rewritten, markdown).split("\n")
    )


def cell_bars(row: str) -> str:
    r"""Inside code spans of a table row GitHub wants ``\|`` and MkDocs ``|``."""
    return re.sub(r"`[^`]*`", lambda span: span[0].replace("\\|", "|"), row)
