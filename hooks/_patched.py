"""Running changed source without touching the files: functions that exist get the code that the new text compiles to.

Importing changed copies of a user's modules would run their top level again (a training script trains again) and give
every class a second time. So nothing is imported: the new text is compiled, and each function of the file, wherever it
hangs (a method, a decorated one, one inside a test), has its code object exchanged while the context lasts. What the
new text adds at the top level, and nothing else of it, is executed into the module's globals and taken out again.
"""

from __future__ import annotations

import ast
import gc
import linecache
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType
from typing import Any

from ampdebug._errors import AmpdebugError

# Code compiled from new texts. Functions made while it ran outlive the context, and belong to no text after it.
_ours: dict[int, CodeType] = {}


@contextmanager
def patched_sources(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[dict[str, dict[str, Any]]]:
    """Lets functions run changed source while the context lasts.

    Args:
        before: ``{full path: the text that was imported}``.
        after: ``{full path: its new text}``, with the same functions and classes in it and more at the top level.

    Yields:
        ``{path: what the new text added at the top level}``.

    Raises:
        AmpdebugError: A file was changed since it was imported, or no function of it exists in this process.
    """
    with ExitStack() as undo:
        yield {path: _patch(path, before[path], text, undo) for path, text in after.items()}


def _patch(path: str, before: str, after: str, undo: ExitStack) -> dict[str, Any]:
    name = os.path.basename(path)
    old, new = _functions(compile(before, path, "exec")), _functions(compile(after, path, "exec"))
    changed = {key for key, code in old.items() if key in new and not _same(code, new[key])}
    by_place: dict[tuple[int, str], list[tuple[Any, ...]]] = {}
    for key, code in old.items():
        by_place.setdefault((code.co_firstlineno, code.co_name), []).append(key)
    live = [
        function
        for function in gc.get_objects()
        if type(function) is FunctionType  # isinstance would ask weak proxies for what they no longer stand for
        and os.path.abspath(function.__code__.co_filename) == path
        and id(function.__code__) not in _ours
    ]
    _ours.update({id(code): code for code in new.values()})
    exchanged: list[tuple[FunctionType, CodeType]] = []
    reached = False
    for function in live:
        code = function.__code__
        keys = by_place.get((code.co_firstlineno, code.co_name), [])
        equal = [key for key in keys if old[key].co_code == code.co_code]
        if not equal:
            if not changed.isdisjoint(keys):
                raise AmpdebugError(f"{name} has changed since it was imported: see {code.co_name}")
            continue  # compiled in another way, as pytest does with its tests, and not touched by the patch
        key = equal[0]
        if key not in new:
            raise AmpdebugError(f"the new text of {name} lacks {code.co_name}")
        if new[key].co_freevars != code.co_freevars:
            raise AmpdebugError(f"{code.co_name} in {name} would need other variables of the function around it")
        reached = reached or key in changed
        exchanged.append((function, new[key]))
    if not reached:
        raise AmpdebugError(f"{name} has changed since it was imported, or what the patch changes in it is not in use")
    added: dict[str, Any] = {}
    for space in {id(function.__globals__): function.__globals__ for function in live}.values():
        added = _execute_added(path, before, after, space, undo)
    for function, code in exchanged:
        undo.callback(setattr, function, "__code__", function.__code__)
        function.__code__ = code
    # MindSpore's compiler reads the text of what it compiles through linecache. Without a time the entry stays.
    undo.callback(linecache.cache.pop, path, None)
    linecache.cache[path] = (len(after), None, after.splitlines(keepends=True), path)
    return added


def _functions(code: CodeType) -> dict[tuple[Any, ...], CodeType]:
    """All code objects in a module by where they stand: names from the outside, with a number for equal ones."""
    found: dict[tuple[Any, ...], CodeType] = {}

    def walk(outer: CodeType, place: tuple[Any, ...]) -> None:
        counts: dict[str, int] = {}
        for constant in outer.co_consts:
            if isinstance(constant, CodeType):
                # Lambdas and the functions that the patch puts into others belong to the code around them.
                number = counts[constant.co_name] = counts.get(constant.co_name, -1) + 1
                here = (*place, (constant.co_name, number))
                found[here] = constant
                walk(constant, here)

    walk(code, ())
    return found


def _same(one: CodeType, other: CodeType) -> bool:
    """Two pieces of code do the same, on whatever lines they stand."""
    parts = ("co_code", "co_names", "co_varnames", "co_freevars", "co_cellvars")
    if any(getattr(one, part) != getattr(other, part) for part in parts):
        return False
    if len(one.co_consts) != len(other.co_consts):
        return False
    return all(
        _same(a, b) if isinstance(a, CodeType) and isinstance(b, CodeType) else type(a) is type(b) and a == b
        for a, b in zip(one.co_consts, other.co_consts, strict=True)
    )


def _execute_added(path: str, before: str, after: str, space: dict[str, Any], undo: ExitStack) -> dict[str, Any]:
    """Runs the statements at the top level that only the new text has."""
    known = {ast.dump(node) for node in ast.parse(before).body}
    had = {_defined(node) for node in ast.parse(before).body} - {None}
    fresh = [node for node in ast.parse(after).body if ast.dump(node) not in known and _defined(node) not in had]
    names = dict(space)
    code = compile(ast.Module(fresh, []), path, "exec")
    _ours.update({id(inner): inner for inner in _functions(code).values()})
    exec(code, space)  # noqa: S102 - the user's own source plus our helpers
    added = {name: value for name, value in space.items() if name not in names}
    for name in added:
        undo.callback(space.pop, name, None)
    return added


def _defined(node: ast.stmt) -> str | None:
    return node.name if isinstance(node, (ast.FunctionDef, ast.ClassDef)) else None
