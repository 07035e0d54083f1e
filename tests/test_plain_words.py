"""The check of plain names and prose finds what it counts."""

from docs.tools.plain import measures


def exceeded(root):
    return {measure.subject: measure.places for measure in measures(root) if measure.is_exceeded}


def checkout(folder, code="x = 1\n", page="A page.\n"):
    (folder / "aligner").mkdir()
    (folder / "docs").mkdir()
    (folder / "aligner" / "module.py").write_text(code)
    (folder / "README.md").write_text("# aligner\n")
    (folder / "docs" / "page.md").write_text(page)
    return folder


def test_plain_text_passes(tmp_path):
    assert exceeded(checkout(tmp_path)) == {}


def test_vague_names_are_counted_wherever_they_are_bound(tmp_path):
    code = "def found(one, rows):\n    for each in rows:\n        _kept = each\n"
    places = exceeded(checkout(tmp_path, code))["vague names"]
    lines = ["1: found", "1: one", "2: each", "3: _kept"]
    assert sorted(places) == [f"aligner/module.py:{line}" for line in lines]


def test_phrases_are_counted_in_docstrings_comments_messages_and_pages(tmp_path):
    code = '"""It stands here."""\n\n# This stands.\nerror = "the value stands alone"\nstands = 1\n'
    page = "The key stands in a table. `it stands in code`\n\n```\nthat stands in a block\n```\n"
    phrases = exceeded(checkout(tmp_path, code, page))
    code_places, page_places = (
        phrases[rf"\b(?:stands?|stood)\b in {k}"] for k in ("code", "documents")
    )
    assert sorted(code_places) == [f"aligner/module.py:{line}: stands" for line in (1, 3, 4)]
    assert page_places == ["docs/page.md: stands"]
