"""HTML documents that need nothing but themselves, from the Jinja2 templates of ``templates/``."""

from functools import cache
from typing import TYPE_CHECKING, Any

from aligner.observe.report.chart import short_number
from aligner.observe.report.conversation import messages_of

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates() -> "Environment":
    """Templates that escape every value and raise where a value is missing."""
    from jinja2 import Environment, PackageLoader, StrictUndefined  # only runs that end with a page

    found = Environment(
        loader=PackageLoader("aligner.observe.report"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters["number"] = short_number
    found.filters["messages"] = messages_of
    return found


def render(template: str, **values: Any) -> str:
    """A whole document; ``values`` hold at least ``title``, ``lead`` and ``environment``."""
    return templates().get_template(template).render(**values)
