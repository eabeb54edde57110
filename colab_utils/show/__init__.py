"""Every figure and page that a person sees; their HTML stands in ``templates``."""

from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

_TEMPLATES = Environment(
    loader=PackageLoader(__name__), autoescape=True, trim_blocks=True, undefined=StrictUndefined
)


def render(template: str, **content: Any) -> Markup:
    """Fill in a template; what is no `Markup` is escaped.

    Args:
        template: its name, without ``.html``.
        content: what it names: ``page`` takes ``title``, and ``body`` and ``style``, which are HTML
            and CSS already.

    Example:
        >>> "<title>a &lt; b</title>" in render("page", title="a < b", body="<p>hello</p>")
        True
    """
    return Markup(_TEMPLATES.get_template(f"{template}.html").render(content))
