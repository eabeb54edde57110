"""All figures and pages that a person looks at. Their HTML templates are in ``templates``."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATES = Environment(
    loader=PackageLoader(__name__), autoescape=True, trim_blocks=True, undefined=StrictUndefined
)


def render(template: str, **content: Any) -> Markup:
    """Fill in a template. Every text that is not a `Markup` is escaped.

    Args:
        template: Name of the template, without ``.html``.
        content: Values of the names in the template. The template ``page`` takes ``title``, the
            HTML ``body`` and the CSS ``style``.

    Example:
        >>> "<title>a &lt; b</title>" in render("page", title="a < b", body="<p>hello</p>")
        True
    """
    return Markup(_TEMPLATES.get_template(f"{template}.html").render(content))
