"""Sources of the running Python's standard library, which are parsed and not imported."""

import ast
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

SKIPPED_DIRS = {
    "test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "turtledemo",
}  # fmt: skip
LIBRARY_DIR = Path(sysconfig.get_paths()["stdlib"])


def library_sources() -> list[Path]:
    """Returns its modules without tests and demos, sorted by path."""
    paths = []
    for folder, subfolders, files in os.walk(LIBRARY_DIR):
        subfolders[:] = [name for name in subfolders if name not in SKIPPED_DIRS]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return sorted(paths)


def definitions(
    source: Path,
) -> Iterator[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
    """Yields (dotted name, node) of a module and its public functions, classes and methods.

    Yields nothing for a private module or a file that cannot be parsed.
    """
    parts = source.relative_to(LIBRARY_DIR).with_suffix("").parts
    module = ".".join(part for part in parts if part != "__init__")
    if _is_private(module):
        return
    try:
        tree = ast.parse(source.read_text(encoding="utf-8"))
    except (SyntaxError, UnicodeDecodeError):
        return
    # Breadth first: a module, then what it defines, then methods; not what functions define inside.
    nodes: list[tuple[str, ast.AST]] = [(module, tree)]
    while nodes:
        name, node = nodes.pop(0)
        assert isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        yield name, node
        if isinstance(node, ast.Module | ast.ClassDef):
            nodes.extend(
                (f"{name}.{child.name}", child)
                for child in node.body
                if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not _is_private(child.name)
            )


def _is_private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))
