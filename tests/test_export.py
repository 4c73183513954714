"""Export: every number arrives, in files that other tools read."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampdebug._errors import ArgumentError, StoreError
from ampdebug._export import STEP_COLUMNS, TENSOR_COLUMNS, export
from ampdebug._records import DTYPE_CODES, Birth, Cell, Event, Site, Step
from ampdebug._run import Run, open_run
from ampdebug._stats import STATS_DTYPE, StatsTable, summarize
from ampdebug._store import RunWriter

ARRAYS = {
    1: [np.array([1.5, -70000, np.nan, 0], np.float32), np.array([], np.float32)],
    2: [np.array([np.inf], np.float16), np.array([1e-7, 3.0], np.float32)],
    4: [np.zeros(3, np.float16), np.array([2.0**127, 1e-300], np.float64)],
}
SITES = [Site("output", 'a,"b"\n', 1, "0.x", "Dense"), Site("gradient", "=w")]
BIRTH = Birth("forward", "a", "Dense", "output", 0, "", None, False, 1, 0, 0, 4, "float32")


@pytest.fixture
def run(tmp_path: Path) -> Run:
    table = StatsTable()
    with RunWriter(tmp_path / "run") as writer:
        writer.put_meta({"mode": "graph", "bad": math.inf})
        writer.put_cells([Cell("", "Net", ("a",)), Cell("a", "Dense", parameters={"w": "float32"})])
        ids = np.array([writer.site_id(site, (4,)) for site in SITES], np.int32)
        for step in range(1, 5):
            scalars = Step(step, loss=[0.1, math.nan, None, -math.inf][step - 1], overflow=step == 2 or None)
            if step == 2:
                scalars.forward_birth, scalars.extra = BIRTH, {"aux": math.nan, "n": [1]}
            if step not in ARRAYS:
                writer.put_step(scalars)
                continue
            table.clear()
            for array in ARRAYS[step]:
                table.add(array)
            codes = np.array([DTYPE_CODES[array.dtype.name] for array in ARRAYS[step]], np.uint8)
            writer.put_step(scalars, ids, codes, table)
        writer.put_event(Event(2, "note", "A note.", {"x": math.nan}))
    return open_run(tmp_path / "run")


def number(text: str) -> float:
    return float(text)


def same(left: float, right: float) -> bool:
    return left == right or (math.isnan(left) and math.isnan(right))


def check_tensor_rows(rows: list[dict[str, Any]], *, exponents: bool) -> None:
    wanted = [(step, i, array) for step, arrays in ARRAYS.items() for i, array in enumerate(arrays)]
    assert [(int(row["step"]), int(row["site"])) for row in rows] == [(step, i) for step, i, _ in wanted]
    for row, (_, i, array) in zip(rows, wanted, strict=True):
        site, stats = SITES[i], summarize(array)
        assert (row["kind"], row["path"], int(row["call"]), row["slot"]) == (site.kind, site.path, site.call, site.slot)
        assert (row["cell_type"], row["dtype"]) == (site.cell_type, array.dtype.name)
        for name in (*STATS_DTYPE.names, "absmax", "norm"):
            assert same(number(row[name]), getattr(stats, name)) or number(row[name]) == pytest.approx(
                getattr(stats, name), rel=1e-15
            ), name
        used = [i - 127 for i, count in enumerate(stats.exponents) if count]
        if exponents:
            assert row["exponents"] == {str(i): stats.exponents[i + 127] for i in used}
        else:
            assert (row["lowest_exponent"], row["highest_exponent"]) == (
                (str(min(used)), str(max(used))) if used else ("", "")
            )


def test_csv_of_tensors(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "tensors.csv"
    assert export(run, "csv", target) == 6
    with target.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        rows = list(reader)
    assert tuple(reader.fieldnames or ()) == TENSOR_COLUMNS
    assert not any(None in row for row in rows)
    check_tensor_rows(rows, exponents=False)
    assert [file.name for file in tmp_path.iterdir() if file.name != "run"] == ["tensors.csv"]


def test_csv_of_steps(run: Run) -> None:
    target = io.StringIO()
    assert export(run, "csv", target, table="steps") == 4
    rows = list(csv.DictReader(io.StringIO(target.getvalue())))
    assert tuple(rows[0]) == STEP_COLUMNS
    assert [row["step"] for row in rows] == ["1", "2", "3", "4"]
    assert [row["loss"] for row in rows] == ["0.1", "nan", "", "-inf"]
    assert [row["overflow"] for row in rows] == ["", "true", "", ""]
    assert [row["sampled"] for row in rows] == ["false"] * 4
    assert json.loads(rows[1]["forward_birth"])["path"] == "a"
    assert json.loads(rows[1]["extra"]) == {"aux": "nan", "n": [1]}
    assert rows[0]["forward_birth"] == ""
    assert all(float(row["time"]) > 1.6e9 for row in rows)


def test_csv_into_a_directory(run: Run, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    assert export(run, "csv", str(out)) == 10
    assert sorted(file.name for file in out.iterdir()) == ["steps.csv", "tensors.csv"]


def test_jsonl(run: Run, tmp_path: Path) -> None:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    target = tmp_path / "run.jsonl"
    count = export(run, "jsonl", target)
    lines = [json.loads(line, parse_constant=refuse) for line in target.read_text("utf-8").splitlines()]
    assert len(lines) == count
    kinds = [line.pop("type") for line in lines]
    assert kinds == [
        *("run", "segment", "cell", "cell", "site", "site"),
        *("step", "tensor", "tensor", "step", "tensor", "tensor", "step", "step", "tensor", "tensor", "event"),
    ]
    assert lines[0] == {"file": "ampdebug-rank0.sqlite", "rank": 0, "meta": {"mode": "graph", "bad": "inf"}}
    assert lines[3]["parameters"] == {"w": "float32"}
    assert lines[4]["shape"] == [4]
    assert [line["loss"] for line, kind in zip(lines, kinds, strict=True) if kind == "step"] == [
        0.1,
        "nan",
        None,
        "-inf",
    ]
    assert lines[9]["forward_birth"]["inputs_finite"] is None
    assert lines[-1] == {"step": 2, "kind": "note", "message": "A note.", "data": {"x": "nan"}}
    check_tensor_rows([line for line, kind in zip(lines, kinds, strict=True) if kind == "tensor"], exponents=True)


def test_a_range_of_steps(run: Run) -> None:
    target = io.StringIO()
    assert export(run, "csv", target, first=2, last=3) == 2
    assert export(run, "csv", target, table="steps", first=2, last=3) == 2
    assert export(run, "jsonl", target, first=4) == 10


def test_progress(run: Run) -> None:
    calls: list[tuple[int, int]] = []
    export(run, "csv", io.StringIO(), table="steps", progress=lambda *call: calls.append(call))
    assert calls == [(4, 4)]


def test_wrong_arguments(run: Run, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="format='xml' is not known; choose one of csv, jsonl"):
        export(run, "xml", io.StringIO())  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="table='cells' is not known; choose one of tensors, steps"):
        export(run, "csv", io.StringIO(), table="cells")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="table='steps' is for csv only"):
        export(run, "jsonl", io.StringIO(), table="steps")
    with pytest.raises(ArgumentError, match="is a directory; give a file name"):
        export(run, "jsonl", tmp_path)
    with pytest.raises(StoreError, match=r"cannot write .*out\.csv: .*No such file"):
        export(run, "csv", tmp_path / "nowhere" / "out.csv")


def test_an_aborted_export_leaves_nothing(run: Run, tmp_path: Path) -> None:
    target = tmp_path / "old.csv"
    target.write_text("old")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export(run, "csv", target, progress=stop)
    assert target.read_text() == "old"
    assert sorted(file.name for file in tmp_path.iterdir()) == ["old.csv", "run"]


def test_damaged_steps_are_left_out_and_named(run: Run, tmp_path: Path) -> None:
    import sqlite3

    connection = sqlite3.connect(run.path)
    connection.execute("UPDATE tensors SET data = x'00' WHERE step = 2")
    connection.commit()
    connection.close()
    target = io.StringIO()
    assert export(run, "csv", target) == 4
    assert len(run.problems) == 1
    assert "the statistics of step 2" in run.problems[0]
