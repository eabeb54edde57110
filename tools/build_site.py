"""The site: the first page, the executed notebooks, the texts, the API and a comparison, as pages
that need no server: `make site`.
"""

from __future__ import annotations

import copy
import inspect
import json
import pkgutil
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from html import escape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import colab_utils
from colab_utils.errors import ColabUtilsError
from tools.cells import PLACEHOLDER, ROOT, read_slug, set_title
from tools.command import parse_folders, print_result
from tools.pages import WIDGET, collapse_progress
from tools.run_notebooks import run_demo

__all__ = [
    "build_site",
    "find_broken_links",
    "main",
    "prepare_notebook",
    "write_first_page",
    "write_llms",
]

_TEXTS = (
    "SCRIPT.md",
    "COMMANDS.md",
    "TEACHING.md",
    "HANDOUT.md",
    "GLOSSARY.md",
    "FORMATS.md",
    "SCALE.md",
    "errors.md",
)
# The calls that a program which helps somebody needs first.
_CALLS = ("watch", "diagnose", "open_dataset", "make_loader", "train")
_FLOORS = {
    "data": "COCO files, masks and images",
    "shards": "Write, verify and copy shards",
    "loading": "From samples to batches on the device",
    "diagnosis": "What training waits for",
    "training": "Train Mask R-CNN",
    "comparison": "Ways of loading, side by side",
    "show": "Charts, pictures and pages",
    "course": "What only the notebooks need",
}
_SLIDERS = (
    '<p>Sliders move in a running notebook. On this site they are on the <a href="../index.html">'
    "first page</a>.</p>"
)


def build_site(demo: Path, output: Path, *, root: Path = ROOT) -> list[str]:
    """Build the site; warnings of Sphinx are errors. An earlier site there is replaced.

    Args:
        demo: the folder with the executed notebooks, as `make demo` leaves it; where there are
            none, the demo is run.
        output: the folder of the site. What Sphinx reads lies beside it, in ``output-source``.
        root: the checkout.

    Returns:
        The links that lead nowhere: page and address.

    Raises:
        ColabUtilsError: Sphinx is missing or warns, or the folder holds somebody else's files.
    """
    names = [path.stem for path in sorted((root / "notebooks").glob("[0-9][0-9]_*.ipynb"))]
    if not all((demo / f"{name}.ipynb").is_file() for name in names):
        print(f"No executed notebooks in {demo}: the demo runs first, which takes some minutes.")
        run_demo(demo)
    source = output.with_name(f"{output.name}-source")
    for folder in (output, source):
        _empty(folder)
    slug = read_slug(root)
    _write_source(source, demo, names, slug, root)
    _run_sphinx(source, output)
    write_first_page(output, slug, root=root)
    write_llms(output, slug, root=root)
    return find_broken_links(output)


def _empty(folder: Path) -> None:
    """Make an empty folder; one that this tool has not made is left alone."""
    mark = folder / ".made-by-make-site"
    if folder.exists():
        if any(folder.iterdir()) and not mark.is_file():
            raise ColabUtilsError(
                f"{folder} holds files that make site has not made. Choose another --output."
            )
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    mark.touch()


def _write_source(source: Path, demo: Path, names: Sequence[str], slug: str, root: Path) -> None:
    """Lay out what Sphinx reads."""
    import nbformat

    site = root / "docs" / "site"
    shutil.copy(site / "conf.py", source)
    shutil.copy(site / "contents.md", source)
    (source / "_static").mkdir()
    for name in ("site.css", "site.js"):
        shutil.copy(site / name, source / "_static")
    for name in _TEXTS:
        shutil.copy(root / "docs" / name, source)
    (source / "notebooks").mkdir()
    for name in names:
        text = _hide_folders((demo / f"{name}.ipynb").read_text(encoding="utf-8"), demo)
        notebook = nbformat.reads(text, as_version=4)
        nbformat.write(prepare_notebook(notebook, slug), source / "notebooks" / f"{name}.ipynb")
    (source / "comparison.md").write_text(_write_comparison(demo), encoding="utf-8")
    (source / "api.md").write_text(_write_api(), encoding="utf-8")
    (source / "modules.md").write_text(_write_modules(source), encoding="utf-8")


def _hide_folders(text: str, demo: Path) -> str:
    """Return the text of a notebook without the folders of the machine that ran it."""
    place = re.escape(str(demo.resolve()))
    return re.sub(rf"{place}/work-\w+", "/demo", text)


def prepare_notebook(notebook: Any, slug: str) -> Any:
    """Return an executed notebook as the site shows it; the one given is not changed.

    The badge opens the notebook where a repository is known. Folded cells are folded, a figure
    carries its alternative text, sliders, which cannot move here, are named, and the cell that set
    the folders of the demo is left out.

    Args:
        notebook: an nbformat notebook.
        slug: the repository, as ``owner/name``; the placeholder where there is none.
    """
    prepared = copy.deepcopy(notebook)
    prepared.metadata.pop("widgets", None)
    prepared.cells = [
        cell
        for cell in prepared.cells
        if "injected-parameters" not in cell.metadata.get("tags", ())
    ]
    section = ""
    for cell in prepared.cells:
        headings = re.findall(r"^#{1,3} +(.+)$", cell.source, re.MULTILINE)
        if cell.cell_type == "markdown":
            section = headings[-1] if headings else section
            # Sphinx's Markdown would show the letters of an embedded drawing in place of it.
            drawing = r"!\[([^]]*)\]\((data:image/svg\S+)[^)]*\)"
            source = set_title(cell.source, slug)
            cell.source = re.sub(drawing, r'<img alt="\1" src="\2">', source)
        else:
            if cell.metadata.get("cellView") == "form":
                cell.metadata["tags"] = [*cell.metadata.get("tags", ()), "hide-input"]
            shown = collapse_progress(cell).outputs
            cell.outputs = [_prepare_output(output, section) for output in shown]
    return prepared


def _prepare_output(output: Any, section: str) -> Any:
    data = output.get("data", {})
    if WIDGET in data:
        output.data = {"text/html": _SLIDERS}
    elif "image/png" in data:
        known = output.get("metadata", {}).get("image/png", {}).get("alt")
        text = known or f"Figure of the section “{section}”; the text beside it says what it shows."
        picture = "".join("".join(data["image/png"]).split())
        html = f'<img alt="{escape(text)}" src="data:image/png;base64,{picture}">'
        if known:
            # On a phone the letters of a figure are too small: its words stand below it there.
            html += f'<p aria-hidden="true" class="words">{escape(known)}</p>'
        output.data = {"text/html": html}
        output.metadata = {}
    elif "<iframe" in data.get("text/html", ""):
        titled = '<iframe title="A page that the cell above made"'
        html = re.sub(r"<iframe(?![^>]*\stitle=)", titled, data["text/html"])
        output.data = {"text/html": html}
    return output


def _write_comparison(demo: Path) -> str:
    """Return the page of what notebook 05 measured, with the receipt inside."""
    from colab_utils.show.comparison_charts import (
        describe_hours,
        plot_cold_start,
        plot_comparison,
    )
    from colab_utils.show.report import show_chart, show_notes, tabulate_comparison

    parts = ["# The comparison of this run", ""]
    receipts = sorted(demo.glob("work-*/drive/receipt"))
    titles = {"comparison.json": "On a bad day", "comparison_good_day.json": "On a good day"}
    for name, title in titles.items():
        paths = [folder / name for folder in receipts if (folder / name).is_file()]
        if not paths:
            continue
        content = json.loads(paths[-1].read_text(encoding="utf-8"))
        parts += [f"## {title}", ""]
        for plot in (plot_comparison, plot_cold_start):
            parts += _show_raw(show_chart(plot(content), "p"))
        parts += [describe_hours(content), ""]
        parts += _show_raw(tabulate_comparison(content).to_html())
        parts += _show_raw(show_notes(content))
    if len(parts) == 2:
        parts.append(
            "Notebook 05 left no receipt in this run: its own page shows what it measured."
        )
    return "\n".join(parts) + "\n"


def _show_raw(html: str) -> list[str]:
    return ["```{raw} html", "\n".join(line for line in str(html).splitlines()), "```", ""]


def _write_api() -> str:
    """Return the page of the names at the top of the package."""
    parts = [
        "# The API",
        "",
        "What `from colab_utils import ...` gives. [All modules](modules.md) has the rest.",
        "",
        "```{eval-rst}",
        ".. currentmodule:: colab_utils",
        "",
    ]
    for name in sorted(set(colab_utils.__all__) - {"__version__"}, key=str.lower):
        if isinstance(getattr(colab_utils, name), type):
            parts += [f".. autoclass:: colab_utils.{name}", "   :members:", ""]
        else:
            parts += [f".. autofunction:: colab_utils.{name}", ""]
    return "\n".join([*parts, "```", ""])


def _write_modules(source: Path) -> str:
    """Write a page for each room of the package; returns the page that lists them."""
    modules = [
        module.name for module in pkgutil.walk_packages(colab_utils.__path__, "colab_utils.")
    ]
    (source / "modules").mkdir()
    parts = ["# All modules", "", "```{toctree}", ":maxdepth: 1", ""]
    for floor, title in (*_FLOORS.items(), ("ground", "The ground: files, Drive, errors")):
        names = [name for name in modules if _find_floor(name) == floor]
        lines = [f"# {title}", "", "```{eval-rst}"]
        for name in names:
            lines += [name, "-" * len(name), "", f".. automodule:: {name}", "   :members:", ""]
        (source / "modules" / f"{floor}.md").write_text("\n".join([*lines, "```", ""]), "utf-8")
        parts.append(f"modules/{floor}")
    return "\n".join([*parts, "```", ""])


def _find_floor(module: str) -> str:
    floor = module.split(".")[1]
    if floor == "__main__":
        return ""
    return floor if floor in _FLOORS else "ground"


def _run_sphinx(source: Path, output: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html"]
    doctrees = source / ".doctrees"
    done = subprocess.run(
        [*command, "-d", str(doctrees), str(source), str(output)], stderr=subprocess.PIPE, text=True
    )
    if "No module named" in done.stderr:
        raise ColabUtilsError("Sphinx or myst-nb is missing. Run make site, which installs them.")
    if done.returncode:
        raise ColabUtilsError(f"Sphinx warns, and a warning is an error here:\n{done.stderr}")


def write_first_page(output: Path, slug: str, *, root: Path = ROOT) -> Path:
    """Write the first page beside the others; its three doors name the repository where one is set.

    Args:
        output: the folder of the site.
        slug: the repository, as ``owner/name``; the placeholder where there is none.
        root: the checkout.
    """
    first = root / "docs" / "site" / "first"
    for path in first.iterdir():
        shutil.copy(path, output)
    page = output / "index.html"
    text = page.read_text(encoding="utf-8")
    if slug != PLACEHOLDER:
        address = f"https://github.com/{slug}"
        colab = f"https://colab.research.google.com/github/{slug}/blob/colab/notebooks"
        doors = {
            "colab": f'<a href="{colab}/01_detect_bottleneck.ipynb">Open the first notebook</a>. '
            "It needs no GPU and asks for nothing.",
            "pip": f"pip install --no-deps git+{address}",
            "where": "On Colab, where what it needs is there.",
            "clone": f"git clone {address} course\ncd course\n",
        }
        for name, door in doors.items():
            text = _fill_door(text, name, door)
    page.write_text(text, encoding="utf-8")
    return page


def write_llms(output: Path, slug: str, *, root: Path = ROOT) -> Path:
    """Write ``llms.txt``, the page for programs that help somebody: what the package does, its
    first calls, its commands and its pages, in the words of README, docstrings and docs.

    Args:
        output: the folder of the site.
        slug: the repository, as ``owner/name``; the placeholder where there is none.
        root: the checkout.
    """
    readme = (root / "README.md").read_text(encoding="utf-8").replace(PLACEHOLDER, slug)
    title, _, summary = readme.split("\n\n")[:3]
    lines = [
        title,
        f"\n> {_join(summary)}\n",
        *re.findall("^pip install .+$", readme, re.MULTILINE),
    ]
    lines.append("\n## The first five calls\n")
    for name in _CALLS:
        meaning = (inspect.getdoc(getattr(colab_utils, name)) or "").split("\n\n")[0]
        lines.append(f"- `colab_utils.{name}`: {_join(meaning)}")
    lines.append("\n## Commands\n")
    pages = {name: (root / "docs" / name).read_text(encoding="utf-8") for name in _TEXTS}
    for section in re.split("^## ", pages["COMMANDS.md"], flags=re.MULTILINE)[1:]:
        # The name of a command, its usage, and what it does.
        name, _, meaning = section.split("\n\n")[:3]
        lines.append(f"- `python -m colab_utils {name}`: {_join(meaning)}")
    lines.append("\n## Pages\n")
    for name, text in pages.items():
        heading = text.partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{heading}]({name.removesuffix('.md')}.html)")
    points = re.findall(r"^- \*\*.+(?:\n  .+)*", readme, re.MULTILINE)
    lines += ["\n## What this does not speed up\n", *map(_join, points), ""]
    path = output / "llms.txt"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def _join(text: str) -> str:
    return " ".join(text.split())


def _fill_door(text: str, name: str, content: str) -> str:
    begin = f"<!-- {name} -->"
    end = f"<!-- /{name} -->"
    before, _, rest = text.partition(begin)
    _, _, after = rest.partition(end)
    return f"{before}{begin}{content}{end}{after}"


class _Addresses(HTMLParser):
    """Collect what a page links to, and the anchors that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.links: list[str] = []
        self.anchors: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in {"href", "src"} and value:
                self.links.append(value)
            elif name in {"id", "name"} and value:
                self.anchors.add(value)


def find_broken_links(folder: Path) -> list[str]:
    """Return the links of a folder of pages that lead to no file or anchor in it, as ``page:
    address``. Addresses on the network are not asked for; the placeholder of a repository is one
    that leads nowhere.

    Args:
        folder: of the site.
    """
    pages = {path.resolve(): _Addresses() for path in sorted(folder.rglob("*.html"))}
    for path, parsed in pages.items():
        parsed.feed(path.read_text(encoding="utf-8"))
    broken = []
    for path, parsed in pages.items():
        for link in parsed.links:
            if not _leads_somewhere(link, path, pages):
                broken.append(f"{path.relative_to(folder.resolve())}: {link[:200]}")
    return broken


def _leads_somewhere(link: str, page: Path, pages: dict[Path, _Addresses]) -> bool:
    parts = urlsplit(link)
    if parts.scheme or parts.netloc:
        return PLACEHOLDER not in link
    target = page if not parts.path else (page.parent / unquote(parts.path)).resolve()
    if target.is_dir():
        target /= "index.html"
    if not target.is_file():
        return False
    # "#" alone leads to the top of a page.
    if not parts.fragment or target not in pages:
        return True
    return unquote(parts.fragment) in pages[target].anchors


def main(arguments: Sequence[str] | None = None) -> int:
    """Build the site from a terminal; returns the exit status."""
    demo, output = parse_folders("build_site", __doc__, arguments, output="runs/site")

    def build() -> str:
        broken = build_site(demo, output)
        if broken:
            raise ColabUtilsError("\n".join([f"{len(broken)} links lead nowhere:", *broken]))
        return f"The site is in {output}. Open {output / 'index.html'}"

    return print_result(build)


if __name__ == "__main__":
    sys.exit(main())
