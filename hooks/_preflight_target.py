"""Finding the network that a command line names: ``module:factory`` or ``file.py:factory``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any

from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug.hooks._preflight import Level, check

if TYPE_CHECKING:
    from ampdebug._diagnose import Diagnosis


def check_target(target: str, *, level: Level | None = None) -> Diagnosis:
    """Runs ``check`` on what a function makes.

    Args:
        target: ``"package.module:factory"`` or ``"path/file.py:factory"``. The function is called without arguments and
            returns ``(net, inputs)``, ``(net, inputs, loss_fn)`` or ``(net, inputs, loss_fn, optimizer)``.
        level: The AMP level to convert the network to.

    Raises:
        ArgumentError: There is no such module, file or function, or it gives something else.
        AmpdebugError: The user's own code raised; its traceback went to stderr.
    """
    factory = load_target(target)
    try:
        return check(factory, level=level)
    except AmpdebugError:
        raise
    except Exception as error:
        traceback.print_exc()
        raise AmpdebugError(
            f"{target} raised {type(error).__name__}: {str(error).strip().split(chr(10))[0]}"
        ) from error


def load_target(target: str) -> Any:
    """The function that ``target`` names; its module is imported as ``python FILE`` or ``python -m`` would find it."""
    place, _, name = target.rpartition(":")
    if not place or not name:
        raise ArgumentError(f"{target!r} must be MODULE:FACTORY or FILE.py:FACTORY, such as train.py:make_net")
    module = _from_file(place) if place.endswith(".py") else _from_name(place)
    factory = getattr(module, name, None)
    if not callable(factory):
        functions = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ArgumentError(
            f"{place} has no function {name!r}" + (f"; it has {', '.join(functions[:8])}" if functions else "")
        )
    return factory


def _from_file(path: str) -> Any:
    if not os.path.isfile(path):
        raise ArgumentError(f"{path!r} is not a file")
    folder, file = os.path.split(os.path.abspath(path))
    name = file.removesuffix(".py")
    sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, os.path.join(folder, file))
    assert spec is not None
    loader = spec.loader
    assert loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # the rewriting of O1 looks the network's module up by its name
    _executed(partial(loader.exec_module, module), path)
    return module


def _from_name(name: str) -> Any:
    sys.path.insert(0, os.getcwd())
    try:
        found = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        found = None
    if found is None:
        raise ArgumentError(
            f"there is no module {name!r}, looked for in {os.getcwd()!r} and where Python's packages are"
        )
    return _executed(lambda: importlib.import_module(name), name)


def _executed(run: Any, name: str) -> Any:
    try:
        return run()
    except Exception as error:
        traceback.print_exc()
        raise AmpdebugError(f"{name} raised {type(error).__name__} while it was imported: {error}") from error
