"""Self-contained HTML documents from the Jinja2 templates of ``templates/``."""

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aligner.observe.report.chart import short_number
from aligner.observe.report.conversation import messages_of

if TYPE_CHECKING:
    from jinja2 import Environment


@cache
def templates(folder: Path | None = None) -> "Environment":
    """Load the library's templates and the templates of ``folder``.

    The templates escape every value and raise an error if a value is missing.
    """
    import jinja2  # only needed by runs that end with a page

    folders = [] if folder is None else [jinja2.FileSystemLoader(folder)]
    environment = jinja2.Environment(
        loader=jinja2.ChoiceLoader([jinja2.PackageLoader("aligner.observe.report"), *folders]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["number"] = short_number
    environment.filters["messages"] = messages_of
    return environment


def render(template: str, *, folder: Path | None = None, **values: Any) -> str:
    """Render a document. ``values`` include at least ``title``, ``lead`` and ``environment``.

    ``folder``: folder of ``template``, if the template is not part of the library.
    """
    return templates(folder).get_template(template).render(**values)
