"""Cells that were set to float32 and run in 16 bits all the same: from the cells' own record, or from the source."""

from __future__ import annotations

import ast
import inspect
import re
import sys
from functools import lru_cache
from types import ModuleType
from typing import Any

from mindspore import nn

from ampdebug.hooks._cells import Place, asked_dtype

_TO_FLOAT = re.compile(r"'(fp16|fp32|bf16)': True")
_WIDE = ("float32", "fp32", "f32", "float_32")
_LEVELS = ("auto_mixed_precision", "custom_mixed_precision", "build_train_network", "Model")


def lost_pins(places: dict[str, Place]) -> dict[str, str]:
    """Cells that were pinned to float32 and are now asked to run in 16 bits.

    MindSpore keeps the calls of ``to_float`` only for cells whose class registers its arguments (``nn.Dense``,
    ``nn.Conv2d``). For all others (``nn.LayerNorm``, classes of the user's) the source is read: a ``to_float(float32)``
    in the ``__init__`` of the cell that holds it, or in the functions that make the network and apply a level to it.

    Returns:
        ``{path: how it is known}``, ``"record"`` or ``"source"``.
    """
    lost: dict[str, str] = {}
    for path, place in places.items():
        if not path or asked_dtype(place.inner) not in ("float16", "bfloat16"):
            continue
        record = getattr(place.inner, "_cell_init_args", None)
        if record is not None:
            # Each call leaves its flags at the end of this text (Cell.to_float of MindSpore 2.10).
            if "fp32" in _TO_FLOAT.findall(str(record)):
                lost[path] = "record"
            continue
        owner = places.get(path.rpartition(".")[0])
        name = path.rpartition(".")[2]
        by_owner = _pins_in_class(*_named(owner.inner)) if owner is not None else frozenset()
        by_maker = _pins_of_makers(*_named(places[""].inner))
        if {name, f"class {place.cell_type}"} & (by_owner | by_maker):
            lost[path] = "source"
    return lost


def _named(cell: Any) -> tuple[str, tuple[str, ...]]:
    """The module of a cell's class, and the names of that class and its bases."""
    kind = type(cell)
    return kind.__module__, tuple(c.__name__ for c in kind.__mro__)


def _tree(module_name: str) -> tuple[ast.Module, ModuleType] | None:
    module = sys.modules.get(module_name)
    if module is None or module_name.partition(".")[0] == "mindspore":
        return None
    try:
        return ast.parse(inspect.getsource(module)), module
    except (OSError, TypeError, SyntaxError, ValueError, RecursionError):
        return None  # no source to read: nothing can be said


@lru_cache(maxsize=256)
def _pins_in_class(module_name: str, names: tuple[str, ...]) -> frozenset[str]:
    """What the ``__init__`` of a class (or of the class that it stands for) pins to float32."""
    found = _tree(module_name)
    if found is None:
        return frozenset()
    pins: set[str] = set()
    for node in ast.walk(found[0]):
        if isinstance(node, ast.ClassDef) and node.name in names:
            for function in node.body:
                if isinstance(function, ast.FunctionDef) and function.name == "__init__":
                    pins.update(name for name, _ in _pins(function))
    return frozenset(pins)


@lru_cache(maxsize=256)
def _pins_of_makers(module_name: str, names: tuple[str, ...]) -> frozenset[str]:
    """What every function pins that makes this network and applies a level, and at least one of them before it."""
    found = _tree(module_name)
    if found is None:
        return frozenset()
    tree, module = found
    makers: list[tuple[bool, list[tuple[str, int]], list[int]]] = []
    for function in [n for n in ast.walk(tree) if isinstance(n, (ast.FunctionDef, ast.Module))]:
        nodes = _own_nodes(function)
        levels = [n.lineno for n in nodes if isinstance(n, ast.Call) and _applies_level(n, module)]
        if levels:
            used = {n.id for n in nodes if isinstance(n, ast.Name)}
            if names[0] in used or not any(_is_own_cell(module, name) for name in used):
                makers.append((names[0] in used, _pins(function), levels))
    # Where no function names the class (it is handed in), those that pin anything are the ones.
    known = [maker for maker in makers if maker[0]] or [maker for maker in makers if maker[1]]
    if not known:
        return frozenset()
    before = {name for _, pins, levels in known for name, line in pins if any(line <= level for level in levels)}
    common = set.intersection(*({name for name, _ in pins} for _, pins, _ in known))
    return frozenset(before & common)


def _is_own_cell(module: Any, name: str) -> bool:
    """A network class of this module: a function that names another one makes another network."""
    kind = getattr(module, name, None)
    return isinstance(kind, type) and issubclass(kind, nn.Cell) and kind.__module__ == module.__name__


def _pins(function: Any) -> list[tuple[str, int]]:
    """Attribute names (and ``class X``) that a function pins to float32, with the lines."""
    found: list[tuple[str, int]] = []
    for node in _own_nodes(function):
        name, line = _pin(node)
        if name:
            found.append((name, line))
        if isinstance(node, ast.If):
            found.extend((f"class {kind}", node.lineno) for kind in _pinned_classes(node))
    return found


def _own_nodes(function: Any) -> list[ast.AST]:
    """The nodes of a body without those of functions and classes defined in it."""
    found: list[ast.AST] = []
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            continue
        found.append(node)
        waiting.extend(ast.iter_child_nodes(node))
    return found


def _is_call_to_float(node: ast.AST, *, wide: bool) -> bool:
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute) or node.func.attr != "to_float":
        return False
    argument = node.args[0] if node.args else None
    name = argument.attr if isinstance(argument, ast.Attribute) else getattr(argument, "id", "")
    return (str(name).lower() in _WIDE) is wide


def _pin(node: ast.AST) -> tuple[str, int]:
    """The attribute that a statement pins to float32 and its line, ``("", 0)`` for any other node."""
    if isinstance(node, ast.Assign) and _is_call_to_float(node.value, wide=True):
        target = node.targets[0]
        return (target.attr if isinstance(target, ast.Attribute) else ""), node.lineno
    if isinstance(node, ast.Expr) and _is_call_to_float(node.value, wide=True):
        assert isinstance(node.value, ast.Call)
        assert isinstance(node.value.func, ast.Attribute)
        owner = node.value.func.value
        return (owner.attr if isinstance(owner, ast.Attribute) else ""), node.lineno
    return "", 0


def _pinned_classes(node: ast.If) -> list[str]:
    """The classes in ``if isinstance(cell, (nn.LayerNorm, RMSNorm)): cell.to_float(float32)``."""
    if not isinstance(node.test, ast.Call) or len(node.test.args) != 2:
        return []
    if getattr(node.test.func, "id", "") != "isinstance":
        return []
    if not any(_is_call_to_float(inner, wide=True) for statement in node.body for inner in ast.walk(statement)):
        return []
    classes = node.test.args[1]
    each = classes.elts if isinstance(classes, ast.Tuple) else [classes]
    return [c.attr if isinstance(c, ast.Attribute) else str(getattr(c, "id", "")) for c in each]


def _applies_level(node: ast.Call, module: ModuleType) -> bool:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    if isinstance(node.func, ast.Name):  # it may be known by another name here
        name = getattr(getattr(module, name, None), "__name__", name)
    return name in _LEVELS or _is_call_to_float(node, wide=False)
