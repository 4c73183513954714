"""The doctor on this machine, with MindSpore."""

from __future__ import annotations

import mindspore as ms
import pytest

import ampdebug
from ampdebug._doctor import ask
from ampdebug.hooks import _machine

pytestmark = pytest.mark.own_process


@pytest.mark.parametrize("kernel", ["matmul", "conv"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_kernels_are_timed_and_their_results_right(kernel: str, dtype: str) -> None:
    result = _machine.measure(kernel, dtype, 64)
    assert result["right"]
    assert 0 < result["seconds"] < 5
    assert 0 < result["float32_seconds"] < 5
    assert result["error"] < 1e-2


def test_a_wrong_result_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    right = _machine.ops.matmul
    monkeypatch.setattr(_machine.ops, "matmul", lambda x, y: right(x, y) * 2)
    assert not _machine.measure("matmul", "float32", 64)["right"]


def test_a_child_that_meets_a_missing_kernel_says_so_and_ends() -> None:
    answers, ended = ask(["settings", "float32:matmul:64", "bfloat16:matmul:64", "float32:conv:64"], 120)
    assert answers[0]["settings"]["mindspore"] == ms.__version__
    done = {(answer["dtype"], answer["kernel"]): answer for answer in answers if "kernel" in answer}
    assert done["float32", "matmul"]["right"]
    if "failed" in done["bfloat16", "matmul"]:  # as on every CPU so far
        assert ("float32", "conv") not in done
        assert "----" not in done["bfloat16", "matmul"]["failed"]
    assert ended == "the process ended with exit code 0"


def test_the_settings_are_those_of_this_process() -> None:
    before = ms.get_context("mode")
    ms.set_seed(7)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        lines = {line.subject: line for line in ampdebug.doctor(measure=False).lines}
    finally:
        ms.set_context(mode=before)
    assert lines["mode"].found == "GRAPH_MODE in this process"
    assert lines["seed"].found == "7"
    assert lines["numpy"].status == "ok"
