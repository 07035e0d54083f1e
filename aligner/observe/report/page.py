"""HTML documents that need nothing but themselves, from the Jinja2 templates of ``templates/``."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.observe.report.chart import short_number
from aligner.observe.report.conversation import messages_of

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates(folder: Path | None = None) -> "Environment":
    """Templates that escape every value and raise where a value is missing; also of ``folder``."""
    import jinja2  # only runs that end with a page

    further = [] if folder is None else [jinja2.FileSystemLoader(folder)]
    found = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("aligner.observe.report"), *further]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["number"] = short_number
    found.filters["messages"] = messages_of
    return found


def render(template: str, *, folder: Path | None = None, **values: Any) -> str:
    """A whole document; ``values`` hold at least ``title``, ``lead`` and ``environment``.

    ``folder``: where ``template`` is, if it is not one of the library's.
    """
    return templates(folder).get_template(template).render(**values)
