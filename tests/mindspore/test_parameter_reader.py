"""Reading parameters again and again: every change is seen, however it comes about."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, ops

from ampdebug.hooks._parameters import ParameterReader, ParameterWatch

sys.path.insert(0, str(Path(__file__).parent))
from nets import set_mode


def parameter(value: Any, dtype: Any = ms.float32) -> Any:
    return Parameter(Tensor(np.asarray(value, np.float32), dtype), name="p")


def values(reader: ParameterReader, of: Any) -> Any:
    reader.wait()
    array = reader.see(of).array
    assert array is not None
    return np.array(array)


@pytest.fixture(params=["pynative", "graph"], autouse=True)
def mode(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    set_mode(request.param)
    yield
    set_mode("pynative")


def test_written_in_place_while_others_are_still_being_computed() -> None:
    reader, p = ParameterReader(), parameter(np.zeros((400, 400)))
    x = Tensor(np.full((400, 400), 1 / 400, np.float32))
    assert not values(reader, p).any()
    for number in range(1, 6):
        y = x
        for _ in range(6):
            y = ops.matmul(y, x)
        ops.assign(p, y * 0 + float(number))
        assert (values(reader, p) == number).all()


def test_a_view_is_kept_while_the_parameter_stays_where_it_is() -> None:
    reader, p = ParameterReader(), parameter([1.0, 2.0])
    assert reader.see(p) is reader.see(p)


def test_other_values_other_dtype_other_shape() -> None:
    reader, p = ParameterReader(), parameter([1.0, 2.0])
    assert values(reader, p).tolist() == [1.0, 2.0]
    p.set_data(Tensor(np.float32([3.0, 4.0])))
    assert values(reader, p).tolist() == [3.0, 4.0]
    p.set_dtype(ms.float16)
    assert reader.see(p).dtype == "float16"
    assert values(reader, p).tolist() == [3.0, 4.0]
    p.set_data(Tensor(np.float16([[5.0, 6.0, 7.0]])), slice_shape=True)
    assert reader.see(p).shape == (1, 3)
    assert values(reader, p).tolist() == [[5.0, 6.0, 7.0]]


def test_dtypes_that_numpy_does_not_know() -> None:
    reader, p = ParameterReader(), parameter([1.5, -2.0], ms.bfloat16)
    for _ in range(2):
        seen = reader.see(p)
        assert (seen.dtype, seen.array.dtype) == ("bfloat16", np.uint16)
        assert values(reader, p).tolist() == [0x3FC0, 0xC000]
    count = Parameter(Tensor([1, 2], ms.int32), name="n", requires_grad=False)
    assert reader.see(count).array is None


class Counting:
    """What of an optimizer is looked at."""

    def __init__(self, parameters: list[Any], counts: bool) -> None:
        self.parameters = parameters
        if counts:
            self.global_step = Parameter(Tensor([0], ms.int32), name="global_step", requires_grad=False)

    def update(self) -> None:
        ops.assign_add(self.parameters[0], Tensor(np.ones(2, np.float32)))
        if hasattr(self, "global_step"):
            ops.assign_add(self.global_step, Tensor([1], ms.int32))


@pytest.mark.parametrize("counts", [True, False])
def test_updates_between_the_recorded_steps(counts: bool) -> None:
    p = parameter([0.0, 0.0])
    optimizer = Counting([p], counts)
    watch = ParameterWatch([p], optimizer, {})
    for updates in (True, True, False, True, False, False, True):
        watch.before(None)
        if updates:
            optimizer.update()
        assert watch.after(None) is updates


def test_an_optimizer_that_counts_is_not_compared_with_any_more(monkeypatch: pytest.MonkeyPatch) -> None:
    p = parameter([0.0, 0.0])
    optimizer = Counting([p], True)
    watch = ParameterWatch([p], optimizer, {})
    watch.before(None)
    optimizer.update()
    assert watch.after(None) is True
    monkeypatch.setattr(ParameterReader, "see", None)
    watch.before(None)
    assert watch.after(None) is False
