"""Finding what a command line names: ``module:name`` or ``file.py:name``."""

from __future__ import annotations

import difflib
import functools
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from typing import Any

from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._workload import Workload


def load_target(target: str, *, what: str = "FACTORY") -> Any:
    """The object that ``target`` names; its module is imported as ``python FILE`` or ``python -m`` would find it.

    Args:
        target: ``"package.module:name"`` or ``"path/file.py:name"``.
        what: How messages call the name.

    Raises:
        ArgumentError: There is no such module, file or name.
        AmpdebugError: The module raised while it was imported; its traceback went to stderr.
    """
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ArgumentError(f"{target!r} must be MODULE:{what} or FILE.py:{what}, such as train.py:make_net")
    module = _from_file(place) if place.endswith(".py") else _from_name(place)
    found = getattr(module, name, None)
    if found is None:
        own = [
            key
            for key, value in vars(module).items()
            if not key.startswith("_")
            and (
                isinstance(value, Workload) or (callable(value) and getattr(value, "__module__", "") == module.__name__)
            )
        ]
        close = difflib.get_close_matches(name, own, n=len(own) or 1)
        shown = [*close, *(key for key in own if key not in close)][:8]
        kind = "function" if what == "FACTORY" else "such name"
        raise ArgumentError(f"{place} has no {kind} {name!r}" + (f"; it has {', '.join(shown)}" if shown else ""))
    return found


def load_factory(target: str) -> Callable[..., Any]:
    """The function that ``target`` names; see ``load_target``."""
    factory = load_target(target)
    if not callable(factory):
        raise ArgumentError(f"{target} is a {type(factory).__name__}; it must be a function")
    made: Callable[..., Any] = factory
    return made


def load_workload(target: str) -> Workload:
    """The workload that ``target`` names, directly or as a function without arguments that returns one.

    Raises:
        ArgumentError: There is no such module, file or name, or it is something else.
        AmpdebugError: The user's own code raised; its traceback went to stderr.
    """
    found = load_made(target)
    if not isinstance(found, Workload):
        raise ArgumentError(f"{target} gave a {type(found).__name__}; it must be an ampdebug.Workload or return one")
    return found


@functools.lru_cache(maxsize=8)
def load_made(target: str) -> Any:
    """What ``target`` names; if that is a function, what it returns. The same object for the same name in a process.

    Raises:
        ArgumentError: There is no such module, file or name.
        AmpdebugError: The user's own code raised; its traceback went to stderr.
    """
    found = load_target(target, what="WORKLOAD")
    if isinstance(found, Workload) or not callable(found):
        return found
    return executed(found, f"{target}()")


def executed(run: Callable[[], Any], name: str, when: str = "") -> Any:
    """Runs the user's code.

    Raises:
        AmpdebugError: It raised something that is not ours; its traceback went to stderr.
    """
    try:
        return run()
    except AmpdebugError:
        raise
    except Exception as error:
        traceback.print_exc()
        first = (str(error).strip().splitlines() or [""])[0]
        raise AmpdebugError(f"{name} raised {type(error).__name__}{when}: {first}") from error


_AT_IMPORT = " while it was imported"


def _from_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise ArgumentError(f"{path!r} is not a file")
    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    place = os.path.join(folder, file)
    known = sys.modules.get(name)
    if known is not None:
        if os.path.realpath(getattr(known, "__file__", None) or "") == os.path.realpath(place):
            return known
        raise ArgumentError(
            f"{path!r} cannot be imported as {name!r}, which is the name of another module that is in use: rename it"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, place)
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    # The rewriting of O1 looks the network's module up by its name, and so does pickle.
    sys.modules[name] = module
    try:
        executed(partial(loader.exec_module, module), path, _AT_IMPORT)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _from_name(name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ArgumentError(
            f"there is no module {name!r}, looked for in {os.getcwd()!r} and where Python's packages are"
        )
    return executed(lambda: importlib.import_module(name), name, _AT_IMPORT)
