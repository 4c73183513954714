"""Lines in any notation, JSON lines and documents, tables, and lines read by their shape."""

from __future__ import annotations

import importlib.util
import io
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from ampdebug._records import Step
from ampdebug.logs import FORMATS, GENERIC, read_log
from ampdebug.logs._keys import is_evaluation, meaning
from ampdebug.logs._shape import DIGITS, Shape, has_shapes, knows_no_digit, shape_of
from ampdebug.logs._tabular import table_header
from ampdebug.logs._updates import Updates
from ampdebug.rules import History


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).parents[1] / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def read(text: str) -> History:
    return read_log(io.BytesIO(text.encode()))[0]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("Epoch [2/10], Step [100/600], Loss: 2.5", {"epoch": 2, "epoch_step": 100, "epoch_steps": 600, "loss": 2.5}),
        ("step 10 loss -nan(ind) scale 65536.0", {"step": 10, "loss": math.nan, "scale": 65536.0}),
        ("loss=inf | it 7 | found_inf=1.0", {"step": 7, "loss": math.inf, "overflow": True}),
        ("Step: 3 Loss: 1.0e+00 all_finite: True", {"step": 3, "loss": 1.0, "overflow": False}),
        ("step 10 loss 2,3123 scale 65536,0", {"step": 10, "loss": 2.3123, "scale": 65536.0}),
        ("step 12,000 loss 2.3", {"step": 12000, "loss": 2.3}),
        ("{'step': 4, 'loss': 0.5, 'grad_norm': nan}", {"step": 4, "loss": 0.5, "grad_norm": math.nan}),
        (
            "[10/1000] loss 2.3 | grad scale 65536 | norm 1.5",
            {"step": 10, "loss": 2.3, "scale": 65536.0, "grad_norm": 1.5},
        ),
        ("step 9 loss tensor(2.5, device='cuda:0', grad_fn=<MeanBackward0>)", {"step": 9, "loss": 2.5}),
        ("step 9 loss Tensor(shape=[], dtype=Float32, value= 2.5)", {"step": 9, "loss": 2.5}),
        ("step 9 loss np.float32(nan) lr 0.5", {"step": 9, "loss": math.nan, "lr": 0.5}),
        ("step 9 loss array(2.5, dtype=float32) lr 0.5", {"step": 9, "loss": 2.5, "lr": 0.5}),
        ("iter 5: train loss 2.0, val loss 2.2", {"step": 5, "loss": 2.0}),
        *(
            (f"step 60 loss {word} lr 0.5", {"step": 60, "loss": value, "lr": 0.5})
            for word, value in (
                *((word, math.nan) for word in ("nan", "NaN", "NAN", "-nan", "nan.0", "1.#QNAN", "-1.#IND00")),
                *((word, math.inf) for word in ("inf", "Infinity", "+inf", "1.#INF")),
            )
        ),
    ],
)
def test_any_notation(line: str, expected: dict[str, Any]) -> None:
    fields = GENERIC.read(line.encode())
    assert fields is not None
    assert set(fields) == set(expected)
    for name, value in expected.items():
        assert fields[name] == value or (fields[name] != fields[name] and value != value), name


@pytest.mark.parametrize(
    "line",
    [
        "Validation step 3: loss 2.3",
        "val_loss: 2.3, step: 10",
        "loss_weight: 1.0, step: 3",
        "loss_cls: 0.3, loss_bbox: 0.2, iter 4",
        "logit scale 4.6, step 3",
        "average loss over the last epoch: 2.3",
        "step 10",
        "Loss function: CrossEntropy, steps 1000",
    ],
)
def test_lines_that_say_no_training_loss(line: str) -> None:
    assert GENERIC.read(line.encode()) is None


def test_spellings() -> None:
    for key, name in (("train/loss", "loss"), ("Grad Norm", "grad_norm"), ("LossScale", "scale"), ("lr", "lr")):
        found = meaning(key)
        assert found is not None
        assert found[0] == name
    assert meaning("logit_scale") is None
    assert meaning("loss_cls") is None
    assert is_evaluation("eval/loss")
    assert not is_evaluation("value")


def test_a_step_that_begins_anew_in_each_epoch() -> None:
    history = read("".join(f"Epoch {e} Step {s} Loss 2.{s}\n" for e in (1, 2, 3) for s in range(1, 9)))
    assert [r.step.step for r in history.records] == list(range(1, 25))
    assert history.segment == 0


def test_a_step_over_the_whole_run_beside_an_epoch() -> None:
    history = read("".join(f"Epoch {s // 8} Step {s} Loss 2.{s}\n" for s in range(1, 25)))
    assert [r.step.step for r in history.records] == list(range(1, 25))


def test_lines_of_another_kind_are_passed_over() -> None:
    lines = [f"step {s} loss 2.0 lr 0.1\n" + (f"best step {s} total loss 9.0\n" if s > 3 else "") for s in range(1, 20)]
    history = read("".join(lines))
    assert {r.step.loss for r in history.records} == {2.0}


def test_json_lines_of_wandb() -> None:
    lines = [
        json.dumps({"train/loss": 2.0 if s < 5 else math.nan, "train/global_step": s, "_runtime": 1.0})
        for s in range(9)
    ]
    history = read("\n".join([*lines, json.dumps({"eval/loss": 3.0, "train/global_step": 8})]))
    assert [r.step.step for r in history.records] == list(range(9))
    assert sum(r.bad_loss for r in history.records) == 4


@pytest.mark.parametrize("indent", [None, 2])
def test_a_json_document(indent: int | None) -> None:
    entries = [
        {"epoch": 0.1, "grad_norm": 1.5, "learning_rate": 1e-5, "loss": 3.0 - 0.1 * s, "step": s} for s in range(1, 12)
    ]
    entries.insert(5, {"epoch": 0.1, "eval_loss": 9.0, "step": 5})
    text = json.dumps({"best_metric": None, "log_history": entries} if indent else entries, indent=indent)
    history = read(text)
    assert [r.step.step for r in history.records] == list(range(1, 12))
    if indent:
        lines = text.split("\n")
        assert '"step": 3' in "".join(lines[history.records[2].line - 1 : history.records[2].line + 6])


def test_a_table() -> None:
    header = "epoch,lr-SGD,step,train_loss_step,val_loss,scaler\n"
    history = read(
        "# settings\n"
        + header
        + "".join(f"0,1e-3,{s},{3 - 0.1 * s:.3f},,65536.0\n" for s in range(1, 9))
        + "0,,8,,2.5,\n"
    )
    assert [r.step.step for r in history.records] == list(range(1, 9))
    assert history.records[0].step.loss == 2.9
    assert {r.scale for r in history.records} == {65536.0}
    assert history.records[0].line == 3


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators(separator: str) -> None:
    row = table_header(separator.join(("step", "loss", "overflow")).encode())
    assert row is not None
    assert row.read(separator.join(("3", "nan", "True")).encode())["overflow"] is True  # type: ignore[index]


def test_prose_is_no_header() -> None:
    for line in (
        b"the loss, after some steps, is small",
        b"step, loss",
        b"loss: 1, step: 2",
        b"a,b,c",
        b"epoch,val_loss",
    ):
        row = table_header(line)
        assert row is None or line == b"step, loss"


def test_keras_epochs_are_counted() -> None:
    bar = "{:4d}/100 [=====>....] - ETA: 10s - loss: {:.4f} - accuracy: 0.1\n"
    history = read("".join(f"Epoch {e}/3\n" + "".join(bar.format(s, 2.0) for s in (1, 50, 100)) for e in (1, 2, 3)))
    assert [r.step.step for r in history.records] == [1, 50, 100, 101, 150, 200, 201, 250, 300]
    assert history.segment == 0


# --- shapes -----------------------------------------------------------------------------------------------------------


def test_what_is_read_by_shape_is_what_is_read_in_full() -> None:
    simulate = load("simulate")
    table = table_header(b"epoch,lr-SGD,step,train_loss,loss_scale,grad_norm,val_loss")
    assert table is not None
    rows = [row for row in (*FORMATS, table, GENERIC) if has_shapes(row)]
    assert len(rows) == len(FORMATS) + 2
    compared: dict[str, int] = {}
    for style in simulate.STYLES.values():
        setup = simulate.Setup(3, steps=240, forward_breaks=200, scaler=lambda: simulate.Dynamic(2.0**16, 100))
        shapes: dict[tuple[str, bytes], Shape | None] = {}
        for text in "\n".join(style.write(list(simulate.train(setup)), 1, setup)).replace("\r", "\n").split("\n"):
            line = text.encode()
            for row in rows:
                if row.trigger not in line or (row is table) != (style.name == "csv"):
                    continue
                fields = row.read(line)
                key = (row.name, line.translate(DIGITS))
                shape = shapes.get(key)
                if shape is not None:
                    read = shape.fields(line) if shape.holds(line) else None
                    if read is not None:
                        compared[row.name] = compared.get(row.name, 0) + 1
                        read = {name: value for name, value in read.items() if name != "rank" or name in (fields or {})}
                        assert _printed(read) == _printed(fields or {})
                elif fields:
                    shapes[key] = shape_of(row, line)
    assert sum(compared.values()) > 5000
    assert {"generic", "json-lines", "table", "lightning", "progress-bar", "keras", "bert"} <= compared.keys()


def _printed(fields: dict[str, Any]) -> dict[str, str]:
    return {name: repr(value) for name, value in fields.items()}


def test_a_shape_does_not_read_what_would_be_read_otherwise() -> None:
    shape = shape_of(GENERIC, b"loss 2.5 [10/20] ")
    assert shape is not None
    assert shape.fields(b"loss 1.5 [17/20] ") == {"loss": 1.5, "step": 17}
    assert shape.fields(b"loss 1.5 [97/20] ") is None  # no counter
    shape = shape_of(GENERIC, b"step 12 found_inf 0 loss 2.5")
    assert shape is not None
    assert shape.fields(b"step 13 found_inf 7 loss 2.5") is None  # no flag


def test_a_skipped_update_is_nothing_to_pass_by() -> None:
    updates = Updates()
    updates.take(10, 5, Step(10))
    assert updates.go_on(12, 6)
    updates.pass_by(12, 6)
    assert updates.go_on(14, 7)
    assert not updates.go_on(14, 6)  # it stood still
    assert not updates.go_on(16, 7)  # fewer than before
    assert not updates.go_on(12, 9)  # an earlier step
    step = Step(14)
    updates.take(14, 6, step)
    assert step.update_skipped


def test_patterns_with_certain_digits() -> None:
    rows = {row.name: row for row in FORMATS}
    line = rows["espnet"].sample[0].encode()
    shape = shape_of(rows["espnet"], line)
    assert shape is not None
    assert shape.holds(line.replace(b"loss=92.2", b"loss=81.3"))
    assert not shape.holds(line.replace(b"optim0_lr0", b"optim1_lr0"))  # another key, although of the same shape
    assert knows_no_digit(rb"\d{1,15} [0-9]+ \.")
    assert not knows_no_digit(rb"level: O[0-3]")


def test_integers_beyond_any_float() -> None:
    history = read("".join(json.dumps({"step": s, "loss": 10**400, "loss_scale": -(10**400)}) + "\n" for s in range(9)))
    assert all(r.step.loss == math.inf for r in history.records)
