"""Counts how dense Python code is: nodes of its syntax tree, code lines, and statements that hide
another one.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_NO_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
    tokenize.ENCODING,
}
_NOT_COUNTED = (
    ast.expr_context,
    ast.operator,
    ast.cmpop,
    ast.boolop,
    ast.unaryop,
)


@dataclass(frozen=True)
class Density:
    """What a reader meets in one tree of files."""

    nodes: int
    """Nodes of the syntax tree, without docstrings and operators; an f-string counts as its
    expressions.
    """
    code_lines: int
    """Lines that hold code: no blank line, no comment, no docstring."""
    format_skips: int
    """Places that the formatter leaves alone."""
    packed: tuple[str, ...]
    """Statements that hide another one, as ``path:line``."""

    @property
    def nodes_a_line(self) -> float:
        """Nodes of an average code line."""
        return self.nodes / max(1, self.code_lines)


def measure_density(root: Path) -> Density:
    """Measure every Python file below ``root``."""
    nodes = 0
    code_lines = 0
    format_skips = 0
    packed = []
    for path in sorted(root.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        tree = ast.parse(source)
        lines = find_code_lines(source, tree)
        nodes += count_nodes(tree)
        code_lines += len(lines)
        format_skips += source.count("# fmt: " + "skip")
        packed += [f"{path}:{number}" for number in sorted(find_packed_lines(tree))]
    return Density(nodes, code_lines, format_skips, tuple(packed))


def find_docstrings(tree: ast.AST) -> Iterator[ast.Expr]:
    """Yield every statement that is a text and nothing else."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            if isinstance(node.value.value, str):
                yield node


def find_code_lines(source: str, tree: ast.AST) -> set[int]:
    """Return the numbers of the lines that hold code."""
    docstring_lines: set[int] = set()
    for node in find_docstrings(tree):
        docstring_lines.update(range(node.lineno, node.end_lineno + 1))
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            lines.update(range(token.start[0], token.end[0] + 1))
    return lines - docstring_lines


def count_nodes(tree: ast.AST) -> int:
    """Return the size of the code, which no formatting changes."""
    left_out: set[int] = set()
    for node in find_docstrings(tree):
        left_out.update((id(node), id(node.value)))
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            left_out.update(id(part) for part in node.values if isinstance(part, ast.Constant))
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            left_out.update(id(part) for part in ast.walk(node.format_spec))
    counted = [node for node in ast.walk(tree) if not isinstance(node, _NOT_COUNTED)]
    return sum(id(node) not in left_out for node in counted)


def find_packed_lines(tree: ast.AST) -> Iterator[int]:
    """Yield the line of each statement that does the work of two."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and _is_packed_assignment(node):
            yield node.lineno
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.IfExp | ast.BoolOp):
            yield node.lineno


def _is_packed_assignment(node: ast.Assign) -> bool:
    """Tell whether it is ``a = b = value``, ``a, b = x, y`` (but no swap) or ``a, b = (... for
    ...)``.
    """
    target = node.targets[0]
    if len(node.targets) > 1:
        return True
    if not isinstance(target, ast.Tuple):
        return False
    if isinstance(node.value, ast.GeneratorExp | ast.ListComp):
        return True
    if not isinstance(node.value, ast.Tuple) or len(target.elts) != len(node.value.elts):
        return False
    is_swap = sorted(map(ast.unparse, target.elts)) == sorted(map(ast.unparse, node.value.elts))
    return not is_swap
