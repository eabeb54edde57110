"""Every error of the package in one table, ``docs/errors.md``: `make errors`.

The messages, and what they say to do, are read from the code. Why each happens stands in ``list_errors.txt``, after an
introduction: areas of the user's work (``# area | what to do where a message does not say it``), and below each its
errors (``modules | some words of the message | why``, and perhaps ``| what to do``). An error without a why and a why
without an error are refused.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

__all__ = ["Site", "find_sites", "find_unraised", "list_all", "make_page"]

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, PAGE, WHYS = ROOT / "colab_utils", ROOT / "docs" / "errors.md", Path(__file__).with_suffix(".txt")
_WORDS = {"strerror": "REASON", "self": "THESE", "st_size": "SIZE", "parent": "FOLDER"}


@dataclass(frozen=True)
class Site:
    """A place in the code that makes an error, and what it says."""

    module: str
    """File, relative to the package."""
    lines: range
    """Its first line to its last."""
    message: str
    """What it says, with PLACEHOLDERS for what is known only when it happens; one place may say different things."""


def find_sites(folder: Path = PACKAGE, files: str = "*.py") -> list[Site]:
    """Every place that makes an error of the package, or calls what makes one."""
    return list(_Code(folder, files).list_sites())


def list_all() -> list[Site]:
    """Those of the package and of the notebooks' first cell."""
    return [*find_sites(), *find_sites(WHYS.parent, "setup_cell.txt")]


def _name(node: ast.AST | None) -> str:
    return getattr(node, "id", "") or getattr(node, "attr", "")


@cache  # asked for again for each name in a message
def _walk_scope(scope: ast.AST) -> tuple[ast.AST, ...]:
    """The nodes of a function, or of a module, without those of the functions in it."""
    return tuple(_walk_below(scope))


def _walk_below(node: ast.AST) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, ast.FunctionDef):
            yield child
            yield from _walk_below(child)


class _Code:
    """The package's code, and what its names stand for in a message."""

    def __init__(self, folder: Path, files: str) -> None:
        paths = sorted(folder.rglob(files))
        self.trees = {str(path.relative_to(folder)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
        nodes = [(module, node) for module, tree in self.trees.items() for node in ast.walk(tree)]
        classes = [node for _, node in nodes if isinstance(node, ast.ClassDef)]
        functions = [(module, node) for module, node in nodes if isinstance(node, ast.FunctionDef)]
        assigned = [(node.targets[0], node.value) for _, node in nodes if isinstance(node, ast.Assign)]
        sides = [(getattr(to, "elts", [to]), getattr(value, "elts", [value])) for to, value in assigned]
        self.parents = {child: node for _, node in nodes for child in ast.iter_child_nodes(node)}
        pairs = [pair for names, values in sides for pair in zip(names, values, strict=False)]
        self.constants = {_name(to): value.value for to, value in pairs if isinstance(value, ast.Constant)}
        self.constants.pop("SOURCE", None)  # of the notebooks' first cell: `make badges` changes it
        self.kinds = {"ColabUtilsError", "SetupError"}
        while new := {one.name for one in classes if self.kinds & {*map(_name, one.bases)}} - self.kinds:
            self.kinds |= new
        makers = [(module, node) for module, node in functions if _name(node.returns) in self.kinds]
        self.makers = {(module * node.name.startswith("_"), node.name): node for module, node in makers}
        self.texts = {node.name: node for _, node in functions if node.name.startswith("explain_")}
        said = [node for _, node in functions if node.name == "__str__"]  # str(stall) is what its class Stall says
        self.texts |= {self.parents[node].name.lower(): node for node in said}

    def list_sites(self) -> Iterator[Site]:
        """The places that make an error; what a function makes and returns is made by who calls it."""
        for module, tree in self.trees.items():
            for scope in ast.walk(tree):
                if isinstance(scope, ast.Module | ast.FunctionDef) and scope not in self.makers.values():
                    for call in _walk_scope(scope):
                        for message in self._read_call(module, call, scope) if isinstance(call, ast.Call) else ():
                            yield Site(module, range(call.lineno, (call.end_lineno or 0) + 1), message)

    def _read_call(self, module: str, call: ast.Call, scope: ast.AST) -> list[str]:
        """The messages of a call that makes an error; none of another one."""
        name = _name(call.func)
        if maker := self.makers.get((module * name.startswith("_"), name)):
            names = [one.arg for one in maker.args.args if one.arg != "self"]
            known = dict(zip(names, self._fill(call.args, scope, {}), strict=True))
            made = next(node.value for node in _walk_scope(maker) if isinstance(node, ast.Return))
            return self._read(made.args[0], maker, known)
        values = self._find_values(call.func, scope) if isinstance(call.func, ast.Name) else []
        kinds = {name, *(_name(node) for value in values if isinstance(value, ast.IfExp) for node in ast.walk(value))}
        return self._fill(call.args[:1], scope, {})[0] if self.kinds & kinds else []

    def _find_values(self, used: ast.Name, scope: ast.AST) -> list[ast.expr]:
        """What a name may stand for where it is used: the last assignment that every way passes, and those after it."""
        values: list[ast.expr] = []
        for node in _walk_scope(scope):
            targets = getattr(node, "targets", [getattr(node, "target", None)])
            if used.id in map(_name, targets) and getattr(node, "value", None) and node.lineno <= used.lineno:
                around = self.parents[node]
                values = [*(() if around is scope or used.lineno <= around.end_lineno else values), node.value]
        return values

    def _fill(self, nodes: Sequence[ast.expr], scope: ast.AST, known: Mapping[str, list[str]]) -> list[list[str]]:
        return [self._read(node, scope, known) or [_make_placeholder(node)] for node in nodes]

    def _read(self, node: ast.expr, scope: ast.AST, known: Mapping[str, list[str]]) -> list[str]:
        """All texts that an expression may be, with PLACEHOLDERS; none for what is no text."""
        ways = list[Any]()
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.Name(id=name) if name in known:
                return known[name]
            case ast.Name(id=name) if name.isupper() and isinstance(self.constants.get(name), str):
                return [self.constants[name]]
            case ast.FormattedValue(value=value):
                return self._fill([value], scope, known)[0]
            case ast.JoinedStr(values=parts):
                return ["".join(texts) for texts in product(*self._fill(parts, scope, known))]
            case ast.BinOp(op=ast.Add(), left=one, right=other) | ast.IfExp(body=one, orelse=other):
                ways = [one, other] if any(self._read(part, scope, known) for part in (one, other)) else []
                if ways and isinstance(node, ast.BinOp):
                    return ["".join(texts) for texts in product(*self._fill(ways, scope, known))]
            case ast.BoolOp(values=[_, ast.JoinedStr() as one]) | ast.Attribute(value=ast.JoinedStr() as one):
                ways = [one]
            case ast.Call(func=ast.Attribute() as one):  # text.replace(...)
                ways = [one] if self._read(one, scope, known) else []
            case ast.Subscript(value=ast.Tuple(elts=ways)):
                pass
            case ast.Name(id=name) if not name.isupper():
                values = self._find_values(node, scope)
                ways = values if any(self._read(value, scope, known) for value in values) else []
            case ast.Call(func=ast.Name(id=name), args=[one, *_]):
                scope = self.texts.get(_name(one) if name == "str" else name, ast.Module())
                ways = [part.value for part in _walk_scope(scope) if isinstance(part, ast.Return)]
        return [text for texts in self._fill(ways, scope, known) for text in texts if text]


def _make_placeholder(node: ast.AST) -> str:
    """A word for what is known only when the error happens: that of the last name in the expression."""
    match node:
        case ast.Call(func=ast.Name(id="format_bytes")):
            return "SIZE"
        case ast.Attribute(value=ast.Call(func=ast.Name(id="type"))):
            return "TYPE"
        case ast.Attribute(attr="size") | ast.Call(func=ast.Name(id="len")):
            return "NUMBER"
        case ast.Attribute(attr=name) | ast.Name(id=name) | ast.Constant(value=str(name)):
            return _WORDS.get(name, re.sub(" [sS]$", "", name.strip("_").replace("_", " ")).upper())
        case ast.Call(func=ast.Attribute(attr=name)) if name.startswith("find_"):
            return name.removeprefix("find_").upper()
        case ast.Call(func=ast.Attribute(attr="join" | "get"), args=[one, *_]) | ast.GeneratorExp(elt=one):
            return _make_placeholder(one)
        case ast.Subscript(slice=ast.Constant(value=str()) as one) | ast.Call(func=ast.Attribute(value=one)):
            return _make_placeholder(one)
        case ast.Call(args=[*_, one]) | ast.Subscript(value=one) | ast.BinOp(left=one):
            return _make_placeholder(one)
        case ast.BoolOp(values=[one, *_]) | ast.IfExp(body=one):
            return _make_placeholder(one)
    return "NUMBER"


def make_page(sites: Sequence[Site], whys: str) -> str:
    """The page, from the code and from the text of ``list_errors.txt``.

    Raises:
        ValueError: an error without a why, or without what to do; a why without an error.
    """
    introduction, *areas = whys.split("\n# ")
    page, faults, left = f"# Errors\n\n{introduction}", list[str](), list(sites)
    for area in areas:
        head, *lines = filter(None, area.splitlines())
        name, _, usual = head.partition(" | ")
        page += f"\n## {name}\n\n| the message | why it happens | what to do |\n|---|---|---|\n"
        for modules, words, why, *told in (line.split(" | ") for line in lines):
            found = [one for one in left if one.module in modules.split(", ") and words in one.message]
            faults += [] if found else [f"no error of {modules} says: {words}"]
            left = [one for one in left if one not in found]
            rows = dict[str, dict[str, None]]()
            for said, cure in (_split(one.message) for one in found):
                rows.setdefault("".join(told) or cure or usual, {})[_quote(said)] = None
            faults += [f"not said what to do: {one.module}: {one.message}" for one in found if "" in rows]
            page += "".join(f"| {'<br>'.join(said)} | {why} | {cure} |\n" for cure, said in rows.items())
    faults += [f"no why for {one.module}:{one.lines[0]}: {one.message}" for one in left]
    if faults:
        raise ValueError("\n".join(f"tools/list_errors.txt: {fault}" for fault in faults))
    return page


def _split(message: str) -> tuple[str, str]:
    """What was expected and found; what to do, as a sentence, or nothing."""
    for end in (r"\. (?=[A-Z`])", "[:;] "):
        match = re.match(rf"((?:.*?\bfound\b:? |(?!.*\bfound\b)).*?){end}(.+)", message)
        if match and not match[1].isupper() and not match[2].isupper():
            return match[1], (match[2][0].upper() + match[2][1:].rstrip(".?") + ".").replace(".).", ".)").replace(
                "|", r"\|"
            )
    return message.rstrip("."), ""


def _quote(text: str) -> str:
    mark = "``" if "`" in text else "`"
    return f"{mark}{text}{mark}".replace("|", r"\|")


def find_unraised(sites: Sequence[Site], folder: Path) -> list[Site]:
    """The sites that no test reached; ``folder`` has a file for each line that one reached (tests/conftest.py)."""
    names = {path.name for path in folder.iterdir()}
    return [one for one in sites if not names & {f"{one.module.replace('/', '+')}:{line}" for line in one.lines}]


def main() -> None:
    """Write the page, or answer a question about it."""
    parser = argparse.ArgumentParser(description="Every error of the package in one table: docs/errors.md")
    parser.add_argument("--check", action="store_true", help="fail if the page is not what the code gives")
    parser.add_argument("--raised", metavar="DIR", type=Path, help="fail if the tests did not raise each error")
    options = parser.parse_args()
    if options.raised:
        left = [f"{one.module}:{one.lines[0]}: {one.message}" for one in find_unraised(find_sites(), options.raised)]
        sys.exit(
            "\n".join([f"error: expected a test for each error of the package, found {len(left)} without", *left])
            if left
            else 0
        )
    try:
        page = make_page(list_all(), WHYS.read_text(encoding="utf-8"))
    except ValueError as error:
        sys.exit(f"error: {error}")
    if not options.check:
        PAGE.write_text(page, encoding="utf-8")
    elif not PAGE.is_file() or PAGE.read_text(encoding="utf-8") != page:
        sys.exit("error: expected docs/errors.md as the code gives it, found another: run make errors")


if __name__ == "__main__":
    main()
