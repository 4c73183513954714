"""The public interface is ``ampdebug.__all__``; nothing leaks in or drops out unseen."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
import types

import pytest

import ampdebug

MEASURING = {"AMPMonitor", "audit", "bisect", "check", "replay", "watch"}  # the names that need MindSpore

_spec = importlib.util.find_spec("mindspore")
HAVE_MINDSPORE = _spec is not None and _spec.origin is not None


def test_all_is_what_is_there() -> None:
    there = [
        name
        for name in dir(ampdebug)
        if not name.startswith("_") and not isinstance(vars(ampdebug).get(name), types.ModuleType)
    ]
    assert sorted([*there, "__version__"]) == ampdebug.__all__


def test_all_is_sorted_and_has_no_repeats() -> None:
    assert sorted(set(ampdebug.__all__)) == ampdebug.__all__


@pytest.mark.parametrize("name", sorted(set(ampdebug.__all__) - MEASURING))
def test_every_name_loads_and_is_documented(name: str) -> None:
    value = getattr(ampdebug, name)
    assert name == "__version__" or (value.__doc__ or "").strip(), f"ampdebug.{name} has no docstring"


@pytest.mark.own_process
@pytest.mark.skipif(not HAVE_MINDSPORE, reason="needs MindSpore, which is not installed here")
@pytest.mark.parametrize("name", sorted(MEASURING))
def test_every_measuring_name_loads_and_is_documented(name: str) -> None:
    assert (getattr(ampdebug, name).__doc__ or "").strip(), f"ampdebug.{name} has no docstring"


def test_every_lazy_name_is_public() -> None:
    assert set(ampdebug._LAZY) <= set(ampdebug.__all__)  # type: ignore[attr-defined]  # hidden from type checkers


def test_a_misspelt_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'ampdebug' has no attribute 'open_runs'"):
        ampdebug.open_runs  # type: ignore[attr-defined]  # noqa: B018


def test_the_version_is_that_of_the_installed_distribution() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+", ampdebug.__version__)
    try:
        installed = importlib.metadata.version("ampdebug")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("ampdebug is not installed, only imported from the checkout")
    assert ampdebug.__version__ == installed
