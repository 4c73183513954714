"""Operator sites: names that stay, and what a seen call tells."""

from __future__ import annotations

from pathlib import Path

import pytest

from ampdebug._sites import OperatorCall, OperatorSite, is_cast, is_movement

MOVEMENTS = ["Reshape", "Tensor.reshape", "Tensor.__getitem__", "mint.expand_dims", "ExpandDims"]


@pytest.mark.parametrize("name", [*MOVEMENTS, "View", "SelectExtView", "TransposeExtView", "FlattenExt"])
def test_movements_by_every_name(name: str) -> None:
    assert is_movement(name)
    assert not is_cast(name)


@pytest.mark.parametrize("name", ["Cast", "Tensor.astype", "Tensor.half"])
def test_casts_by_every_name(name: str) -> None:
    assert is_cast(name)
    assert not is_movement(name)


@pytest.mark.parametrize("name", ["Exp", "Tensor.sum", "mint.add", "Concat", "ReduceMean", "Tensor.__add__", "Select"])
def test_what_computes_is_neither(name: str) -> None:
    assert not is_movement(name)
    assert not is_cast(name)


def call(operator: str, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> OperatorCall:
    return OperatorCall(OperatorSite("a.b", operator, "net.py:3", 0), operator, "", "Net", inputs, outputs)


def test_the_compute_dtype_is_that_of_the_first_floating_output() -> None:
    assert call("MatMul", ("float32", "float32"), ("float16",)).compute_dtype == "float16"
    assert call("BatchNorm", ("float16", "float32"), ("float16", "float32")).compute_dtype == "float16"
    assert call("TopK", ("bfloat16",), ("bfloat16", "int32")).compute_dtype == "bfloat16"
    assert call("Argmax", ("float16",), ("int32",)).compute_dtype is None
    assert call("Cast", ("float32",), ("float16",)).compute_dtype is None
    assert call("Reshape", ("float16",), ("float16",)).compute_dtype is None


def test_the_source_line_is_read_from_the_file(tmp_path: Path) -> None:
    file = tmp_path / "net.py"
    file.write_text("a\nb\n    x = ops.exp(x)\n")
    seen = OperatorCall(OperatorSite("", "Exp", "net.py:3", 0), "Exp", str(file), "", (), ())
    assert seen.source() == "x = ops.exp(x)"
    gone = OperatorCall(OperatorSite("", "Exp", "gone.py:3", 0), "Exp", str(tmp_path / "gone.py"), "", (), ())
    assert gone.source() == ""
    assert OperatorCall(None, "Exp", "", "", (), ()).path is None


def test_keys_tell_sites_apart() -> None:
    sites = {OperatorSite(path, operator, "n.py:1", index) for path in "ab" for operator in "cd" for index in (0, 1)}
    assert len({site.key for site in sites}) == 8
