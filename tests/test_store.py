"""The writer: what goes in comes out, whatever happens to the process, the disk or the directory."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ampdebug._blobs import crop_histograms, pack_columns, pack_counts, unpack_columns, unpack_counts
from ampdebug._errors import ArgumentError, FormatError, RunExistsError, StoreError
from ampdebug._records import DTYPE_CODES, DTYPES, KINDS, Birth, Cell, Event, Site, Step
from ampdebug._run import open_run
from ampdebug._stats import STATS_DTYPE, StatsTable
from ampdebug._store import RunWriter, run_file

ROOT = Path(__file__).resolve().parent.parent
FAST = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@dataclasses.dataclass
class Rows:
    """Stands in for a StatsTable where rows are made up."""

    rows: np.ndarray
    exponents: np.ndarray


def made_up(step: int, size: int) -> Rows:
    """Rows that follow from the step number, so that a reader in another process can check them."""
    source = np.random.default_rng(step)
    rows = np.zeros(size, STATS_DTYPE)
    for name in STATS_DTYPE.names:
        integer = STATS_DTYPE[name].kind == "i"
        rows[name] = source.integers(0, 1000, size) if integer else source.standard_normal(size)
    exponents = np.zeros((size, 256), np.uint32)
    exponents[:, 100:140] = source.integers(0, 100_000, (size, 40))
    return Rows(rows, exponents)


def plain(value: Any) -> Any:
    """As strict JSON has it: the documented form of ``extra``."""
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value


def same(left: Any, right: Any) -> bool:
    """Equal and of one type, NaN like NaN."""
    if isinstance(left, float) and isinstance(right, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    return type(left) is type(right) and left == right


# --- what goes in comes out -------------------------------------------------------------------------------------------

texts = st.text(max_size=12)
counts = st.integers(0, 2**62)
births = st.builds(
    Birth,
    phase=st.sampled_from(["forward", "backward"]),
    path=texts,
    cell_type=texts,
    kind=st.sampled_from(KINDS),
    call=counts,
    slot=texts,
    inputs_finite=st.none() | st.booleans(),
    own_code=st.booleans(),
    nan=counts,
    pos_inf=counts,
    neg_inf=counts,
    count=counts,
    dtype=st.sampled_from(DTYPES),
)
numbers = st.none() | st.floats()
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
flags = st.none() | st.booleans()
steps = st.builds(
    Step,
    step=st.integers(1, 2**62),
    epoch=st.none() | counts,
    epoch_step=st.none() | counts,
    loss=numbers,
    loss_scale=numbers,
    loss_scale_after=numbers,
    overflow=flags,
    nonfinite_gradients=flags,
    update_skipped=flags,
    accumulating=flags,
    learning_rate=numbers,
    grad_norm=numbers,
    grad_norm_scaled=numbers,
    parameters_without_gradient=st.none() | counts,
    seconds=numbers,
    monitor_seconds=numbers,
    sampled=st.booleans(),
    forward_birth=st.none() | births,
    backward_birth=st.none() | births,
    extra=st.dictionaries(texts, json_values, max_size=3),
)


@FAST
@given(st.lists(steps, min_size=1, max_size=5, unique_by=lambda step: step.step))
def test_steps_come_back_as_they_went_in(wanted: list[Step]) -> None:
    wanted.sort(key=lambda step: step.step)
    with tempfile.TemporaryDirectory() as folder:
        with RunWriter(folder) as writer:
            for step in wanted:
                writer.put_step(step)
        with open_run(folder) as run:
            found = list(run.steps())
    assert len(found) == len(wanted)
    for left, right in zip(found, wanted, strict=True):
        right.extra = plain(right.extra)
        assert same(left, right)


def test_every_field_of_step_is_generated_here() -> None:
    # A field that a record gains must be covered by the test above.
    assert {f.name for f in dataclasses.fields(Step)} == {
        *("step", "epoch", "epoch_step", "loss", "loss_scale", "loss_scale_after", "overflow", "nonfinite_gradients"),
        *("update_skipped", "accumulating", "learning_rate", "grad_norm", "grad_norm_scaled", "seconds"),
        *("parameters_without_gradient", "monitor_seconds", "sampled", "forward_birth", "backward_birth", "extra"),
    }


row_arrays = hnp.arrays(
    STATS_DTYPE,
    st.integers(0, 7),
    elements=st.tuples(*[st.integers(0, 2**63 - 1) | st.integers(0, 300)] * 10, *[st.floats()] * 4),
)


@st.composite
def tables(draw: st.DrawFn) -> Rows:
    rows = draw(row_arrays)
    exponents = np.zeros((len(rows), 256), np.uint32)
    cells = st.tuples(st.integers(0, 255), st.sampled_from([1, 254, 255, 256, 65534, 65535, 65536, 2**32 - 1]))
    for row in exponents:
        for bin_, count in draw(st.lists(cells, max_size=5)):
            row[bin_] = count
    return Rows(rows, exponents)


@FAST
@given(st.lists(tables(), min_size=1, max_size=4), st.data())
def test_tables_come_back_bit_by_bit(wanted: list[Rows], data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        writer = RunWriter(folder)
        ids = [writer.site_id(Site("output", f"cell{i}")) for i in range(9)]
        used = []
        for number, table in enumerate(wanted, 1):
            size = len(table.rows)
            sites = data.draw(hnp.arrays(np.int32, size, elements=st.sampled_from(ids)))
            dtypes = data.draw(hnp.arrays(np.uint8, size, elements=st.integers(0, len(DTYPES) - 1)))
            # Read while the writer is open: from the log.
            writer.put_step(Step(number, sampled=True), sites, dtypes, table)
            used.append((sites, dtypes))
        for done in (False, True):
            if done:
                writer.close()
            with open_run(folder) as run:
                for number, (table, (sites, dtypes)) in enumerate(zip(wanted, used, strict=True), 1):
                    found = run.tensors(number)
                    assert found.step == number
                    np.testing.assert_array_equal(found.site_ids, sites)
                    assert found.dtypes == tuple(DTYPES[code] for code in dtypes)
                    np.testing.assert_array_equal(found.exponents, table.exponents)
                    for name in STATS_DTYPE.names:
                        left, right = found.rows[name], table.rows[name]
                        np.testing.assert_array_equal(left, right)
                        assert np.array_equal(np.signbit(left[~np.isnan(left)]), np.signbit(right[~np.isnan(right)]))


@FAST
@given(
    st.integers(0, 40).flatmap(
        lambda n: st.lists(
            hnp.arrays(st.sampled_from([np.int64, np.uint8, np.uint32, np.float32, np.float64]), n),
            min_size=1,
            max_size=5,
        )
    )
)
def test_column_blobs_come_back(columns: list[np.ndarray]) -> None:
    found = unpack_columns(pack_columns(columns), len(columns), len(columns[0]))
    for left, right in zip(found, columns, strict=True):
        np.testing.assert_array_equal(left.astype(right.dtype), right)


@FAST
@given(
    hnp.arrays(
        np.uint32, st.tuples(st.integers(0, 4), st.just(256)), elements=st.sampled_from([0, 0, 1, 255, 65535, 9**9])
    )
)
def test_count_blobs_come_back(exponents: np.ndarray) -> None:
    first, length, values = crop_histograms(exponents)
    np.testing.assert_array_equal(unpack_counts(pack_counts(values), first, length), exponents)
    for row, start, size in zip(exponents, first, length, strict=True):
        filled = np.flatnonzero(row)
        assert (start, size) == ((filled[0], filled[-1] - filled[0] + 1) if len(filled) else (0, 0))


def test_a_real_stats_table(tmp_path: Path) -> None:
    table = StatsTable()
    arrays = [
        np.array([1.5, -2, np.nan], np.float16),
        np.array([], np.float32),
        np.array(np.inf),
        np.zeros((2, 3), np.float16),
    ]
    with RunWriter(tmp_path) as writer:
        sites = [writer.site_id(Site("output", f"c{i}"), array.shape) for i, array in enumerate(arrays)]
        codes = [DTYPE_CODES[array.dtype.name] for array in arrays]
        for array in arrays:
            table.add(array)
        writer.put_step(Step(1), np.array(sites, np.int32), np.array(codes, np.uint8), table)
    run = open_run(tmp_path)
    found = run.tensors(1)
    assert run.shapes == ((3,), (0,), (), (2, 3))
    assert found.dtypes == ("float16", "float32", "float64", "float16")
    assert found.rows["count"].tolist() == [3, 0, 1, 6]
    assert found.rows["nan"].tolist() == [1, 0, 0, 0]
    assert found.derive("absmax").tolist()[0] == 2.0
    assert found.derive("norm").tolist() == pytest.approx([2.5, 0.0, 0.0, 0.0], rel=1e-15)


def test_other_records_come_back(tmp_path: Path) -> None:
    cells = (
        Cell("", "Net", ("a", "b"), aliases=("x", "y")),
        Cell("a", "Dense", (), {"a.weight": "float32"}, "float16", {"MatMul": "float16"}, "operators"),
        Cell("b", "Ü\udcff\0", watched=False, note="not in cells="),
    )
    events = (Event(0, "lint", "A sentence.", {"value": [1, None, {"deep": True}]}), Event(3, "monitor-off", "Why."))
    with RunWriter(tmp_path, rank=3) as writer:
        writer.put_meta({"mode": "graph", "versions": {"numpy": "1.26"}, "n": np.int32(3), "nan": math.nan})
        writer.put_meta({"mode": "pynative", "seed": None})
        writer.put_cells(cells[:1])
        writer.put_cells(cells)
        for event in events:
            writer.put_event(event)
        writer.put_result("bisect", {"keep": ["a"]})
        writer.put_result("audit", {})
        assert writer.site_id(Site("input", "a"), (2, 3), "int32") == 0
        assert writer.site_id(Site("input", "a", 1)) == 1
        assert writer.site_id(Site("input", "a"), (9,)) == 0
        writer.put_step(Step(1))
    run = open_run(tmp_path)
    assert run.meta == {"mode": "pynative", "versions": {"numpy": "1.26"}, "n": 3, "nan": "nan", "seed": None}
    assert run.cells == (*cells[:2], dataclasses.replace(cells[2], cell_type="Ü\\udcff\0"))
    assert run.events == events
    assert run.results("bisect") == [{"keep": ["a"]}]
    assert run.results("nothing") == []
    assert run.sites == (Site("input", "a"), Site("input", "a", 1))
    assert run.shapes == ((2, 3), None)
    assert run.site_dtypes == ("int32", None)
    assert run.this_rank == 3


def test_nan_and_unknown_differ_for_any_sqlite_tool(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for number, loss in enumerate([0.5, math.nan, None, math.inf, -math.inf], 1):
            writer.put_step(Step(number, loss=loss, overflow=None if loss is None else number == 4))
        path = writer.path
    connection = sqlite3.connect(path)
    found = connection.execute("SELECT loss, typeof(loss), overflow FROM steps ORDER BY step").fetchall()
    layout = json.loads(connection.execute("SELECT value FROM format WHERE key = 'layout'").fetchone()[0])
    connection.close()
    assert found == [
        (0.5, "real", 0),
        ("nan", "text", 0),
        (None, "null", None),
        ("inf", "text", 1),
        ("-inf", "text", 0),
    ]
    assert layout["dtypes"] == list(DTYPES)


def test_blobs_can_be_decoded_from_the_layout_alone(tmp_path: Path) -> None:
    """A decoder of twenty lines that knows the documentation and the file, and none of our code."""
    import struct
    import zlib

    table = made_up(7, 5)
    with RunWriter(tmp_path) as writer:
        sites = np.array([writer.site_id(Site("output", str(i))) for i in range(5)], np.int32)
        writer.put_step(Step(7), sites, np.full(5, 1, np.uint8), table)
    connection = sqlite3.connect(run_file(tmp_path, 0))
    layout = json.loads(connection.execute("SELECT value FROM format WHERE key = 'layout'").fetchone()[0])
    n = connection.execute("SELECT tensor_rows FROM steps").fetchone()[0]
    data, blob = connection.execute("SELECT data, exponents FROM tensors").fetchone()
    connection.close()
    names = layout["tensors.data"]["columns"]
    raw = zlib.decompress(data)
    columns, at = {}, len(names)
    for name, code in zip(names, raw[: len(names)].decode(), strict=True):
        if code == "0":
            columns[name] = (0,) * n
        else:
            columns[name] = struct.unpack_from(f"<{n}{code}", raw, at)
            at += struct.calcsize(f"<{n}{code}")
    assert at == len(raw)
    for name in STATS_DTYPE.names:
        assert list(columns[name]) == table.rows[name].tolist()
    raw = zlib.decompress(blob)
    total = sum(columns["bins_length"])
    small = list(raw[:total])
    middle = list(struct.unpack_from(f"<{small.count(255)}H", raw, total))
    large = iter(struct.unpack_from(f"<{middle.count(65535)}I", raw, total + 2 * len(middle)))
    cascade = iter(next(large) if value == 65535 else value for value in middle)
    values = iter(next(cascade) if value == 255 else value for value in small)
    for row, first, length in zip(table.exponents, columns["bins_first"], columns["bins_length"], strict=True):
        assert [next(values) for _ in range(length)] == row[first : first + length].tolist()


# --- one writer, one directory ----------------------------------------------------------------------------------------


def test_a_second_run_is_refused_unless_appended(tmp_path: Path) -> None:
    out = tmp_path / "not" / "there"
    with RunWriter(out) as writer:
        first = writer.site_id(Site("output", "a"), (2,))
        writer.put_step(Step(1), np.array([first]), np.array([1], np.uint8), made_up(1, 1))
        writer.put_step(Step(5))
    with pytest.raises(
        RunExistsError, match=r"rank0\.sqlite already holds a run; .*delete the file, or pass append=True"
    ):
        RunWriter(out)
    RunWriter(out, rank=1).close()
    with RunWriter(out, append=True) as writer:
        assert writer.last_step == 5
        with pytest.raises(ArgumentError, match=r"step\.step=5 must be larger than 5, .*RunWriter\.last_step \+ 1"):
            writer.put_step(Step(5))
        assert writer.site_id(Site("output", "b")) == 1
        assert writer.site_id(Site("output", "a")) == first
        writer.put_step(Step(6), np.array([1, 0]), np.array([1, 1], np.uint8), made_up(6, 2))
        writer.put_step(Step(7))
    run = open_run(out)
    assert [step.step for step in run.steps()] == [1, 5, 6, 7]
    assert [(s.status, s.first_step) for s in run.segments] == [("finished", 1), ("finished", 6)]
    assert [s.ended is not None and s.ended >= s.started for s in run.segments] == [True, True]
    assert [site.path for site in run.sites] == ["a", "b"]
    assert [s.rows for s in run.summary()] == [2, 1]
    assert run.ranks == (0, 1)


def test_append_to_nothing_starts_a_run(tmp_path: Path) -> None:
    with RunWriter(tmp_path, append=True) as writer:
        writer.put_step(Step(1))
    assert open_run(tmp_path).step_count == 1


def test_append_to_a_foreign_or_different_file(tmp_path: Path) -> None:
    path = run_file(tmp_path, 0)
    path.write_bytes(b"not a database at all" * 400)
    with pytest.raises(FormatError, match=r"rank0\.sqlite is not a run"):
        RunWriter(tmp_path, append=True)
    path.unlink()
    RunWriter(tmp_path).close()
    connection = sqlite3.connect(path)
    connection.execute("ALTER TABLE steps ADD COLUMN momentum REAL")
    connection.close()
    with pytest.raises(FormatError, match=r"was written by another version of ampdebug.*record into another directory"):
        RunWriter(tmp_path, append=True)
    assert open_run(tmp_path).step_count == 0


def test_a_second_writer_is_refused(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for _ in range(3):
            with pytest.raises(StoreError, match=r"is being written by another monitor .* directory of its own"):
                RunWriter(tmp_path, append=True)
        other = run_child("RunWriter(sys.argv[1], append=True)", tmp_path)
        assert other.returncode == 1
        assert "is being written by another monitor" in other.stderr
        writer.put_step(Step(1))
    assert open_run(tmp_path).step_count == 1


def test_a_second_writer_is_refused_while_steps_are_written(tmp_path: Path) -> None:
    stop = threading.Event()

    def train() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            writer.put_step(Step(number))

    with RunWriter(tmp_path) as writer:
        thread = threading.Thread(target=train)
        thread.start()
        tries = 0
        while writer.last_step < 1000 or tries < 100:
            tries += 1
            with pytest.raises(StoreError, match="is being written by another"):
                RunWriter(tmp_path, append=True)
        stop.set()
        thread.join()
    assert open_run(tmp_path).step_count == writer.last_step


def test_threads_may_share_a_writer(tmp_path: Path) -> None:
    failures = []
    turn = threading.Lock()

    def work(kind: str) -> None:
        try:
            for _ in range(50):
                with turn:
                    writer.put_step(Step(writer.last_step + 1))
                writer.put_event(Event(0, kind, "x"))
                writer.site_id(Site("output", kind))
        except Exception as error:  # noqa: BLE001
            failures.append(error)

    with RunWriter(tmp_path) as writer:
        threads = [threading.Thread(target=work, args=(f"k{i}",)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    run = open_run(tmp_path)
    assert not failures
    assert (run.step_count, len(run.events), len(run.sites)) == (200, 200, 4)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_forked_process_can_not_write(tmp_path: Path) -> None:
    code = """
        writer = RunWriter(sys.argv[1])
        writer.put_step(Step(1))
        child = os.fork()
        if not child:
            try:
                writer.put_step(Step(2))
            except StoreError as error:
                writer.close()
                os._exit(0 if "forked process" in str(error) else 1)
            os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        writer.put_step(Step(3))
        writer.close()
    """
    assert run_child(code, tmp_path).stdout == "0\n"
    assert [step.step for step in open_run(tmp_path).steps()] == [1, 3]


# --- wrong arguments write nothing and end nothing --------------------------------------------------------------------


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"rank=-1 must be 0 or more"):
        RunWriter(tmp_path, rank=-1)
    with RunWriter(tmp_path) as writer:
        writer.site_id(Site("output", "a"))
        one, code, table = np.array([0]), np.array([1], np.uint8), made_up(1, 1)
        wrong: list[tuple[str, tuple[Any, ...]]] = [
            ("belong together", (Step(1), one, code, None)),
            ("table has 1 rows, site_ids shape \\(2,\\)", (Step(1), np.array([0, 0]), code, table)),
            ("table has 1 rows", (Step(1), one, np.array([], np.uint8), table)),
            ("only 0 to 0 are registered", (Step(1), np.array([1]), code, table)),
            ("site_ids run from -1", (Step(1), np.array([-1]), code, table)),
            ("dtypes holds the code 200", (Step(1), one, np.array([200], np.uint8), table)),
            ("step.step=0 must be larger than 0", (Step(0),)),
            ("Step.loss='high' does not fit its type float", (Step(1, loss="high"),)),  # type: ignore[arg-type]
            ("Step.epoch=1.5 does not fit", (Step(1, epoch=1.5),)),  # type: ignore[arg-type]
            ("Step.epoch=.* does not fit", (Step(1, epoch=2**63),)),
            ("Step.sampled=None does not fit", (Step(1, sampled=None),)),  # type: ignore[arg-type]
            ("Step.extra\\['net'\\]\\[0\\] is a object; .* convert it", (Step(1, extra={"net": [object()]}),)),
        ]
        loop: list[Any] = []
        loop.append(loop)
        wrong.append(("nested deeper than 100 levels", (Step(1, extra={"loop": loop}),)))
        for message, arguments in wrong:
            with pytest.raises(ArgumentError, match=message):
                writer.put_step(*arguments)
        with pytest.raises(ArgumentError, match="kind='outputs' is not known; choose one of input, output"):
            writer.site_id(Site("outputs", "a"))  # type: ignore[arg-type]
        with pytest.raises(ArgumentError, match=r"meta\['x'\] is a set"):
            writer.put_meta({"x": {1}})
        with pytest.raises(ArgumentError, match="status='done' is not known"):
            writer.close("done")  # type: ignore[arg-type]
        writer.put_step(Step(1, extra={"kept": np.float32(0.5)}), one, code, table)
    run = open_run(tmp_path)
    assert [step.extra for step in run.steps()] == [{"kept": 0.5}]
    assert (run.meta, len(run.sites)) == ({}, 1)


def test_ctrl_c_in_the_middle_takes_back_the_step_only(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        site = np.array([writer.site_id(Site("output", "a"))])
        writer.put_step(Step(1), site, np.array([1], np.uint8), made_up(1, 1))
        writer.site_id(Site("output", "b"))
        with contextlib.suppress(KeyboardInterrupt), writer._file.transaction() as connection:
            connection.execute("INSERT INTO steps (step, extra, sampled, time) VALUES (2, '{}', 0, 0)")
            raise KeyboardInterrupt
        writer.put_step(Step(3), np.array([1]), np.array([1], np.uint8), made_up(3, 1))
    run = open_run(tmp_path)
    assert [step.step for step in run.steps()] == [1, 3]
    assert [site.path for site in run.sites] == ["a", "b"]


def test_leaving_by_an_exception_marks_the_run_failed(tmp_path: Path) -> None:
    with contextlib.suppress(ZeroDivisionError), RunWriter(tmp_path) as writer:
        writer.put_step(Step(1))
        raise ZeroDivisionError
    assert [s.status for s in open_run(tmp_path).segments] == ["failed"]
    writer.close()
    with pytest.raises(StoreError, match="is closed: recording has ended"):
        writer.put_step(Step(2))


def test_a_closed_run_is_one_file(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.put_step(Step(1))
        assert len(list(tmp_path.iterdir())) == 3
    assert [file.name for file in tmp_path.iterdir()] == ["ampdebug-rank0.sqlite"]


def test_closing_beside_a_reader_works(tmp_path: Path) -> None:
    writer = RunWriter(tmp_path)
    writer.put_step(Step(1))
    run = open_run(tmp_path)
    begin = time.perf_counter()
    writer.close()
    assert time.perf_counter() - begin < 2
    assert run.step_count == 1
    assert open_run(tmp_path).segments[0].status == "finished"


# --- a killed process -------------------------------------------------------------------------------------------------

CHILD = """
import os, sys, signal, sqlite3
import numpy as np
from ampdebug._errors import StoreError
from ampdebug._records import Event, Site, Step
from ampdebug._stats import STATS_DTYPE
from ampdebug._store import RunWriter
"""


def child_code(code: str) -> str:
    import inspect

    parts = [inspect.getsource(made_up), textwrap.dedent(code)]
    return (
        CHILD
        + "class Rows:\n    def __init__(self, rows, exponents):\n        self.rows, self.exponents = rows, exponents\n"
        + "\n".join(parts)
    )


def run_child(code: str, *arguments: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", child_code(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, check=False)


TRAIN = """
    writer = RunWriter(sys.argv[1], append=True)
    size = int(sys.argv[2])
    sites = np.array([writer.site_id(Site("output", f"cell{i}")) for i in range(size)], np.int32)
    dtypes = np.full(size, 1, np.uint8)
    start = writer.last_step
    for number in range(start + 1, start + int(sys.argv[3]) + 1):
        writer.put_step(Step(number, loss=number / 8, sampled=True), sites, dtypes, made_up(number, size))
        os.write(1, f"{number}\\n".encode())
    writer.close()
"""


def check_contents(path: Path, size: int, at_least: int) -> int:
    """Every step up to the last one is there and whole; returns the last."""
    with open_run(path) as run:
        found = [step.step for step in run.steps()]
        assert found == list(range(1, len(found) + 1))
        assert len(found) >= at_least
        for number in found:
            assert run.step(number).loss == number / 8
            wanted, tensors = made_up(number, size), run.tensors(number)
            np.testing.assert_array_equal(tensors.rows, wanted.rows)
            np.testing.assert_array_equal(tensors.exponents, wanted.exponents)
        summary = run.summary()
        assert summary.steps == len(found)
        assert not summary.problems
    return len(found)


def test_every_completed_step_survives_kill_at_random_moments(tmp_path: Path) -> None:
    source = random.Random(5)
    size, last = 40, 0
    for _ in range(8):
        command = [sys.executable, "-c", child_code(TRAIN), str(tmp_path), str(size), "100000"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, cwd=ROOT) as child:
            assert child.stdout is not None
            child.stdout.readline()  # the first step is written
            time.sleep(source.uniform(0, 0.15))
            child.send_signal(signal.SIGKILL)
            rest = child.stdout.read().split()
        assert child.returncode == -signal.SIGKILL
        last = check_contents(tmp_path, size, max([last + 1, *map(int, rest)]))
    assert last > 50
    with open_run(tmp_path) as run:
        assert [s.status for s in run.segments] == ["interrupted"] * 7 + ["running"]


@pytest.mark.parametrize("statement", range(1, 9))
def test_kill_within_put_step(tmp_path: Path, statement: int) -> None:
    """The process kills itself as SQLite begins its n-th statement of step 32 (which also writes an aggregate)."""
    code = """
        writer = RunWriter(sys.argv[1])
        sites = np.array([writer.site_id(Site("output", f"cell{i}")) for i in range(5)], np.int32)
        seen = []
        def statement(sql):
            seen.append(sql)
            if len(seen) == int(sys.argv[2]):
                os.kill(os.getpid(), signal.SIGKILL)
        for number in range(1, 34):
            if number == 32:
                writer.site_id(Site("output", "late"))
                writer._file._connection.set_trace_callback(statement)
            writer.put_step(Step(number, loss=number / 8), sites, np.full(5, 1, np.uint8), made_up(number, 5))
        print(seen)
    """
    child = run_child(code, tmp_path, statement)
    assert child.returncode == -signal.SIGKILL, child.stdout + child.stderr
    # Statements: COMMIT (the late site), BEGIN, INSERT step, tensors, aggregate, COMMIT, BEGIN, ...
    assert check_contents(tmp_path, 5, 31) == (31 if statement <= 6 else 32)


# --- a full disk, a vanished directory --------------------------------------------------------------------------------

FULL = """
    {prepare}
    writer = RunWriter(sys.argv[1])
    sites = np.array([writer.site_id(Site("output", f"cell{{i}}")) for i in range(40)], np.int32)
    number = 0
    try:
        while number < 100000:
            step = Step(number + 1, loss=(number + 1) / 8)
            writer.put_step(step, sites, np.full(40, 1, np.uint8), made_up(number + 1, 40))
            number += 1
    except StoreError as error:
        print(number)
        print(error)
    try:
        writer.put_event(Event(1, "a", "b"))
    except StoreError as error:
        print(error)
    writer.close()
    print("closed")
"""


def check_full(child: subprocess.CompletedProcess[str], path: Path) -> None:
    number, first, second, closed = child.stdout.splitlines()
    assert "ampdebug-rank0.sqlite: " in first
    assert first.endswith("recording ends, what was written before stays readable")
    assert "is closed: recording ended by an error" in second
    assert (closed, child.returncode, child.stderr) == ("closed", 0, "")
    assert int(number) > 5
    assert check_contents(path, 40, int(number)) == int(number)


def test_a_full_disk_by_file_size_limit(tmp_path: Path) -> None:
    prepare = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (600_000, 600_000))"
    check_full(run_child(FULL.format(prepare=prepare), tmp_path), tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux") or os.geteuid() != 0, reason="mounting needs root on Linux")
def test_a_full_disk(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], capture_output=True, text=True, check=False
    )
    if mount.returncode:
        pytest.skip(f"can't mount a small disk here: {mount.stderr.strip()}")
    try:
        child = run_child(FULL.format(prepare=""), disk)
        assert "full" in child.stdout
        check_full(child, disk)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


@pytest.mark.parametrize("again", [False, True])
def test_a_vanished_directory(tmp_path: Path, again: bool) -> None:
    out = tmp_path / "run"
    writer = RunWriter(out)
    writer.put_step(Step(1))
    moved = tmp_path / "moved"
    shutil.copytree(out, moved)
    shutil.rmtree(out)
    if again:
        RunWriter(out).close()
    with pytest.raises(StoreError, match="recording ends, what was written before stays readable"):
        writer.put_step(Step(2))
    with pytest.raises(StoreError, match="is closed: recording ended by an error"):
        writer.site_id(Site("output", "a"))
    writer.close()
    assert out.exists() is again
    assert open_run(moved).step_count == 1


def test_places_that_can_not_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StoreError, match=r"cannot create .*file"):
        RunWriter(tmp_path / "file" / "run")
    (tmp_path / "run" / "ampdebug-rank0.sqlite").mkdir(parents=True)
    with pytest.raises(StoreError, match="cannot record into"):
        RunWriter(tmp_path / "run")


# --- cost -------------------------------------------------------------------------------------------------------------


def test_memory_does_not_grow_with_steps(tmp_path: Path) -> None:
    size = 50
    with RunWriter(tmp_path) as writer:
        sites = np.array([writer.site_id(Site("output", f"cell{i}")) for i in range(size)], np.int32)
        table, dtypes = made_up(1, size), np.full(size, 1, np.uint8)
        for number in range(1, 100):
            writer.put_step(Step(number), sites, dtypes, table)
        tracemalloc.start()
        try:
            before = tracemalloc.get_traced_memory()[0]
            for number in range(100, 1100):
                writer.put_step(Step(number), sites, dtypes, table)
            grown = tracemalloc.get_traced_memory()[0] - before
        finally:
            tracemalloc.stop()
    assert grown < 50_000
