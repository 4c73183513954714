"""The borders between folders are borders between imports.

Only ``ampdebug.hooks`` imports MindSpore, so that a run is read on a machine without it and starts fast; only one
module each makes tables and event files. Ruff says the same while you type; here it is checked with no exception lists.
"""

from __future__ import annotations

import ast
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ampdebug"


def imported_names(source: str, file: str = "<source>") -> Iterator[str]:
    """Every module that the source imports by statement or by a literal ``import_module`` / ``__import__``."""
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in ("import_module", "__import__") and node.args and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value)


def importers(top: str, files: list[Path]) -> list[str]:
    return sorted(
        str(file.relative_to(ROOT))
        for file in files
        if any(name.split(".")[0] == top for name in imported_names(file.read_text(encoding="utf-8"), str(file)))
    )


def files_under(*folders: Path) -> list[Path]:
    """Python files, not those below the symlink ampdebug/hooks, which some Pythons follow."""
    found = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [file for file in found if PACKAGE / "hooks" not in file.parents]


PURE = files_under(PACKAGE)


def test_the_check_sees_every_way_to_import() -> None:
    source = """
        import os, mindspore.nn as nn
        def f():
            from tabulate import tabulate
            importlib.import_module("tensorboardX")
            __import__("hooks")
        from . import mindspore_like
    """
    names = {name.split(".")[0] for name in imported_names(textwrap.dedent(source))}
    assert names == {"os", "mindspore", "tabulate", "tensorboardX", "hooks"}


def test_the_check_looks_at_the_package() -> None:
    names = {str(file.relative_to(PACKAGE)) for file in PURE}
    assert {"__init__.py", "_cli.py", "_records.py", "report/table.py"} <= names
    assert not [name for name in names if name.startswith("hooks")]


def test_ampdebug_never_imports_mindspore() -> None:
    assert importers("mindspore", PURE) == []


def test_only_table_imports_tabulate() -> None:
    assert importers("tabulate", files_under(PACKAGE, ROOT / "hooks")) == ["ampdebug/report/table.py"]


def test_only_event_file_imports_tensorboardx() -> None:
    assert importers("tensorboardX", files_under(PACKAGE, ROOT / "hooks")) == ["ampdebug/report/event_file.py"]


def test_nobody_imports_hooks_by_its_folder_name() -> None:
    folders = [ROOT / name for name in ("hooks", "tests", "examples", "benchmarks")]
    assert importers("hooks", files_under(PACKAGE, *folders)) == []


# What a user of the reading half does, in a process where importing MindSpore is an error.
BLOCK = """
import importlib.abc, sys

class Block(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "mindspore":
            raise AssertionError("MindSpore was imported")

sys.meta_path.insert(0, Block())
"""


def run_blocked(code: str, *, pure_only: bool) -> subprocess.CompletedProcess[str]:
    modules = [
        "ampdebug" + "".join(f".{part}" for part in file.relative_to(PACKAGE).with_suffix("").parts)
        for file in PURE
        if file.name not in ("__main__.py", "__init__.py")
    ]
    imports = "".join(f"import {name}\n" for name in modules) if pure_only else ""
    return subprocess.run(
        [sys.executable, "-c", BLOCK + imports + code],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )


def test_every_module_outside_hooks_loads_where_mindspore_must_not() -> None:
    code = "assert ampdebug._cli.main and 'mindspore' not in sys.modules\nprint('loaded', ampdebug.__name__)"
    result = run_blocked(code, pure_only=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout == "loaded ampdebug\n"


@pytest.mark.parametrize("name", ["AMPMonitor", "watch"])
def test_the_same_check_fails_where_mindspore_is_imported(name: str) -> None:
    """The twin: without it, the test above could pass because the block does nothing."""
    result = run_blocked(f"import ampdebug\nampdebug.{name}", pure_only=False)
    assert result.returncode == 1
    assert "AssertionError: MindSpore was imported" in result.stderr


def test_measuring_without_mindspore_says_what_to_install() -> None:
    hidden = BLOCK.replace('AssertionError("MindSpore was imported")', 'ModuleNotFoundError(name, name="mindspore")')
    code = "import ampdebug\ntry:\n    ampdebug.watch\nexcept ModuleNotFoundError as error:\n    print(error)"
    result = subprocess.run(
        [sys.executable, "-c", hidden + code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "ampdebug.watch measures a MindSpore training run and needs MindSpore" in result.stdout
    assert "pip install 'mindspore>=2.10'" in result.stdout
    assert "ampdebug.open_run, ampdebug report" in result.stdout
