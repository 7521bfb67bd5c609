"""The layers of the package, held by the import statements themselves.

Allowed: core.types, core.errors <- core.* <- kernels <- adapter <- plugin, and core.*
<- simulator; tools may import every layer but plugin. Only adapter, tools and plugin
may import sglang, and `core` only the standard library, torch, numpy and numba.
"""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "python" / "sglang_tetris"
FILES = sorted(PACKAGE.rglob("*.py"))

# layer -> the layers it may import, besides itself.
ALLOWED = {
    "core": set(),
    "kernels": {"core"},
    "adapter": {"core", "kernels"},
    "plugin": {"core", "kernels", "adapter"},
    "simulator": {"core"},
    "tools": {"core", "kernels", "adapter", "simulator"},
    # The package's own __init__ offers `configure`, lazily or not.
    "": {"core", "adapter"},
}
CORE_OUTSIDE = {"torch", "numpy", "numba"} | set(sys.stdlib_module_names)
CORE_BASE = {"errors", "types"}


def module_of(file: Path) -> tuple[str, ...]:
    """Return a file's dotted name below the package, as a tuple."""
    parts = file.relative_to(PACKAGE).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports_of(file: Path) -> Iterator[tuple[int, tuple[str, ...]]]:
    """Yield (line, dotted name) of every import, wherever it stands in the file."""
    package = ("sglang_tetris", *file.relative_to(PACKAGE).parts[:-1])
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, tuple(alias.name.split("."))
        elif isinstance(node, ast.ImportFrom):
            base = tuple(node.module.split(".")) if node.module else ()
            if node.level:
                base = package[: len(package) - node.level + 1] + base
            for alias in node.names:
                yield node.lineno, (*base, alias.name)


def layer_of(name: tuple[str, ...]) -> str:
    return name[0] if name and name[0] in ALLOWED else ""


def faults_in(file: Path) -> Iterator[str]:
    """Yield one line per import of `file` that breaks a rule."""
    module = module_of(file)
    layer = layer_of(module)
    for line, name in imports_of(file):
        where = f"{file.relative_to(PACKAGE)}:{line} imports {'.'.join(name)}"
        if name[0] == "sglang" and layer in ("core", "kernels", "simulator", ""):
            yield f"{where}: only adapter, plugin and tools know sglang"
        elif name[0] != "sglang_tetris":
            if layer == "core" and name[0] not in CORE_OUTSIDE:
                yield f"{where}: core needs torch, numpy and numba only"
        else:
            target = layer_of(name[1:])
            if target != layer and target and target not in ALLOWED[layer]:
                yield f"{where}: {layer or 'the package'} may not import {target}"
            base = layer == "core" and module[-1] in CORE_BASE
            if base and target == "core" and name[2] not in CORE_BASE:
                yield f"{where}: core.{module[-1]} stands below the rest of core"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(PACKAGE)))
def test_imports_follow_the_layers(file):
    assert list(faults_in(file)) == []


def test_no_two_modules_import_each_other():
    names = {module_of(file) for file in FILES}
    edges: dict[tuple[str, ...], set[tuple[str, ...]]] = {}
    for file in FILES:
        found = edges.setdefault(module_of(file), set())
        for _line, name in imports_of(file):
            if name[0] == "sglang_tetris":
                # `from package import module` names the module one level deeper.
                found |= {n for n in (name[1:], name[1:-1]) if n and n in names}
    pairs = {
        tuple(sorted((a, b)))
        for a, targets in edges.items()
        for b in targets
        # A package's __init__ re-exports its modules; they may not use it in turn.
        if a != b and a in edges.get(b, set())
    }
    assert pairs == set()


def test_no_catch_all_modules():
    assert [f.name for f in FILES if f.stem in ("utils", "common", "helpers")] == []


def test_the_rules_see_a_violation(tmp_path, monkeypatch):
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    (tmp_path / "core").mkdir()
    bad = tmp_path / "core" / "types.py"
    bad.write_text(
        "def f():\n    import sglang\n"
        "from sglang_tetris.adapter import worker\n"
        "from . import allocator\nimport requests\n"
    )
    assert len(list(faults_in(bad))) == 4
