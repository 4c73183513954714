"""The reader: right numbers over many steps, from any place, and clear errors for files that are not runs."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
import threading
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ampdebug._blobs import pack_columns, unpack_columns
from ampdebug._errors import ArgumentError, FormatError, StoreError
from ampdebug._records import DTYPES, Birth, Cell, Event, Site, Step
from ampdebug._run import Heatmap, Run, open_run
from ampdebug._stats import STATS_DTYPE, StatsTable
from ampdebug._store import RunWriter, run_file

ROOT = Path(__file__).resolve().parent.parent


@dataclass
class Recorded:
    """One row as the test knows it: the array itself."""

    step: int
    site: int
    dtype: str
    array: np.ndarray


def record(
    out: Path, steps: int, sites: int, *, sampled: Callable[[int], bool] = lambda step: True, **options: Any
) -> list[Recorded]:
    """Record made-up tensors of all kinds and return them."""
    source = np.random.default_rng(1)
    table = StatsTable()
    rows: list[Recorded] = []
    with RunWriter(out, **options) as writer:
        writer.put_meta({"mode": "pynative"})
        writer.put_cells([Cell("", "Net", ("a",)), Cell("a", "Dense")])
        writer.put_event(Event(0, "note", "A note."))
        ids = [writer.site_id(Site("output", f"cell{i}")) for i in range(sites)]
        for step in range(1, steps + 1):
            if not sampled(step):
                writer.put_step(Step(step, loss=1 / step))
                continue
            table.clear()
            # Some sites missing, the last one twice in some steps, out of order.
            here = [i for i in ids if source.random() < 0.8] + ids[-1:] * (step % 3 == 0)
            here = here or ids[:1]
            source.shuffle(here)
            dtypes = []
            for site in here:
                dtype = source.choice(["float16", "float32", "float64"])
                array = (source.standard_normal(8) * 2.0 ** source.integers(-30, 20)).astype(np.float32)
                array[source.random(8) < 0.2] = 0
                if source.random() < 0.05:
                    array[:2] = source.choice([np.nan, np.inf, -np.inf], 2)
                if source.random() < 0.05:
                    array[:] = np.nan
                if source.random() < 0.05:
                    array = array[:0]
                with np.errstate(over="ignore", under="ignore"):
                    array = array.astype(dtype)
                table.add(array)
                dtypes.append(DTYPES.index(dtype))
                rows.append(Recorded(step, site, dtype, array))
            writer.put_step(
                Step(step, loss=1 / step, sampled=True), np.array(here, np.int32), np.array(dtypes, np.uint8), table
            )
    return rows


def exponent(value: float) -> int:
    return math.frexp(value)[1] - 1


def check_summary(run: Run, rows: list[Recorded]) -> None:
    """Against the arrays themselves, by other means than the code under test."""
    summary = run.summary()
    assert not summary.problems
    sampled = sorted({row.step for row in rows})
    assert (summary.steps, summary.first_step, summary.last_step) == (len(sampled), sampled[0], sampled[-1])
    assert len(summary) == len(run.sites)
    for number, found in enumerate(summary):
        mine = [row for row in rows if row.site == number]
        wide = [row.array.astype(np.float64) for row in mine]
        every = np.concatenate([*wide, np.empty(0)])
        finite = every[np.isfinite(every)]
        assert (found.site_id, found.site) == (number, run.sites[number])
        assert found.rows == len(mine)
        assert found.steps == len({row.step for row in mine})
        assert (found.first_step, found.last_step) == (min(row.step for row in mine), max(row.step for row in mine))
        assert found.count == every.size
        assert found.zeros == np.count_nonzero(every == 0)
        assert (found.nan, found.pos_inf) == (np.isnan(every).sum(), (every == np.inf).sum())
        assert found.neg_inf == (every == -np.inf).sum()
        size = np.abs(finite)
        assert found.flushed == np.count_nonzero((size > 0) & (size <= 2.0**-25))
        assert found.subnormal == np.count_nonzero((size > 2.0**-25) & (size < 2.0**-14))
        assert found.exceeding == np.count_nonzero(size > 65504)
        assert (found.min, found.max, found.absmax) == (finite.min(), finite.max(), size.max())
        tops = [np.abs(array[np.isfinite(array)]).max(initial=-1) for array in wide]
        assert found.absmax_step == mine[int(np.argmax(tops))].step
        exponents = [exponent(value) for value in size[size > 0]]
        assert (found.lowest_exponent, found.highest_exponent) == (min(exponents), max(exponents))
        bad = [row.step for row, array in zip(mine, wide, strict=True) if not np.isfinite(array).all()]
        assert found.first_nonfinite_step == (bad[0] if bad else None)
        shares = [np.mean((np.abs(a) > 0) & (np.abs(a) <= 2.0**-25)) if a.size else 0.0 for a in wide]
        assert found.max_flushed_fraction == pytest.approx(max(shares))
        assert found.max_flushed_step == (mine[int(np.argmax(shares))].step if max(shares) else None)
        assert set(found.dtypes) == {row.dtype for row in mine}
        assert 0 < found.mantissa_bits <= 23


def check_heatmap(found: Heatmap, rows: list[Recorded], sites: int) -> None:
    assert found.lowest.shape == (sites, len(found.first_steps))
    for column, (first, last) in enumerate(zip(found.first_steps, found.last_steps, strict=True)):
        for site in range(sites):
            arrays = [row.array.astype(np.float64) for row in rows if row.site == site and first <= row.step <= last]
            every = np.concatenate([*arrays, np.empty(0)])
            exponents = [exponent(value) for value in np.abs(every[np.isfinite(every) & (every != 0)])]
            assert found.seen[site, column] == bool(arrays)
            assert found.lowest[site, column] == min(exponents, default=Heatmap.EMPTY)
            assert found.highest[site, column] == max(exponents, default=Heatmap.EMPTY)
            assert found.nonfinite[site, column] == (not np.isfinite(every).all())


# --- right numbers ----------------------------------------------------------------------------------------------------


# 32 steps make an aggregate: none, exactly one, some and a tail.
@pytest.mark.parametrize("steps", [1, 31, 32, 33, 100])
def test_summary_against_the_arrays(tmp_path: Path, steps: int) -> None:
    rows = record(tmp_path, steps, 3, sampled=lambda step: step % 7 != 2)
    with open_run(tmp_path) as run:
        if len({row.site for row in rows}) == 3:
            check_summary(run, rows)
        else:
            assert run.summary().steps == 1


def test_summary_without_and_with_damaged_aggregates(tmp_path: Path) -> None:
    rows = record(tmp_path, 100, 3)
    path = run_file(tmp_path, 0)
    for sql in (
        "UPDATE aggregates SET data = x'00' WHERE first_step = 33",
        "UPDATE aggregates SET last_step = 'x' WHERE first_step = 1",
        "UPDATE aggregates SET sites = 2 WHERE first_step = 65",
        "INSERT INTO aggregates SELECT 98, last_step, steps - 1, sites, data FROM aggregates WHERE first_step = 97",
        "DELETE FROM aggregates WHERE first_step = 98",
        "UPDATE aggregates SET last_step = 99 WHERE first_step = 97",
        "DELETE FROM aggregates WHERE first_step = 97",
    ):
        alter(path, sql)
        with open_run(tmp_path) as run:
            check_summary(run, rows)


def test_summary_of_a_run_that_goes_on(tmp_path: Path) -> None:
    rows = record(tmp_path, 40, 3)
    with RunWriter(tmp_path, append=True) as writer, open_run(tmp_path) as run:
        table = StatsTable()
        late = writer.site_id(Site("gradient", "late"))
        for step in range(41, 101):
            table.clear()
            array = np.array([step, -0.25], np.float32)
            for site in (0, late):
                table.add(array)
                rows.append(Recorded(step, site, "float32", array))
            code = DTYPES.index("float32")
            writer.put_step(Step(step), np.array([0, late]), np.array([code, code], np.uint8), table)
            if step in (41, 72, 73, 100):
                check_summary(run, rows)
                assert run.tensors(step).site_ids.tolist() == [0, late]


def test_summary_says_how_far_it_is(tmp_path: Path) -> None:
    record(tmp_path, 100, 2)
    calls: list[tuple[int, int]] = []
    with open_run(tmp_path) as run:
        run.summary(lambda done, total: calls.append((done, total)))
    assert calls[-1] == (100, 100)
    assert [done for done, _ in calls] == sorted({done for done, _ in calls})
    assert len(calls) > 2


def test_summary_of_sites_without_statistics(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        writer.site_id(Site("input", "a"), (3,), "int32")
        writer.put_step(Step(1))
    summary = open_run(tmp_path).summary()
    assert (summary.steps, summary.first_step, summary.last_step) == (0, None, None)
    assert (summary[0].rows, summary[0].first_step, summary[0].dtypes) == (0, None, ())
    assert math.isnan(summary[0].absmax)
    assert json.dumps(summary[0].to_dict())
    assert len(summary[0:5]) == 1


def test_heatmap_from_steps(tmp_path: Path) -> None:
    rows = record(tmp_path, 70, 4, sampled=lambda step: step % 5 != 0)
    with open_run(tmp_path) as run:
        for columns in (1, 10, 56, 200):
            found = run.heatmap(max_steps=columns)
            assert len(found.first_steps) <= columns
            check_heatmap(found, rows, 4)
        assert len(run.heatmap(200).first_steps) == 56
        with pytest.raises(ArgumentError, match="max_steps=0 must be 1 or more"):
            run.heatmap(0)


def test_heatmap_from_aggregates(tmp_path: Path) -> None:
    rows = record(tmp_path, 2100, 2)
    with open_run(tmp_path) as run:
        found = run.heatmap(max_steps=50)
        assert 20 < len(found.first_steps) <= 50
        check_heatmap(found, rows, 2)


def test_series_against_the_arrays(tmp_path: Path) -> None:
    rows = record(tmp_path, 40, 3)
    with open_run(tmp_path) as run:
        for site in range(3):
            mine = [row for row in rows if row.site == site and 5 <= row.step <= 30]
            for field, reference in {
                "count": lambda a: a.size,
                "max": lambda a: a[np.isfinite(a)].max(initial=-np.inf),
                "absmax": lambda a: np.abs(a[np.isfinite(a)]).max(initial=-1),
                "nonfinite": lambda a: np.count_nonzero(~np.isfinite(a)),
                "finite": lambda a: np.count_nonzero(np.isfinite(a)),
                "norm": lambda a: np.sqrt((a[np.isfinite(a)] ** 2).sum()),
                "nonfinite_fraction": lambda a: np.count_nonzero(~np.isfinite(a)) / max(a.size, 1),
            }.items():
                steps, values = run.series(site, field, 5, 30)
                assert steps.tolist() == [row.step for row in mine]
                wanted = np.array([reference(row.array.astype(np.float64)) for row in mine])
                nothing = np.array([not np.isfinite(row.array).any() for row in mine]) & (field in ("max", "absmax"))
                assert np.isnan(values[nothing]).all()
                np.testing.assert_allclose(values[~nothing], wanted[~nothing], rtol=1e-12)
        with pytest.raises(ArgumentError, match=r"site=3 does not exist; .* has sites 0 to 2"):
            run.series(3, "max")
        with pytest.raises(ArgumentError, match="field='maximum' is not known; choose one of count, zeros"):
            run.series(0, "maximum")


def test_steps_by_range(tmp_path: Path) -> None:
    record(tmp_path, 600, 1, sampled=lambda step: step % 100 == 0)
    with open_run(tmp_path) as run:
        assert [step.step for step in run.steps()] == list(range(1, 601))
        assert [step.step for step in run.steps(256, 513)] == list(range(256, 514))
        assert [step.step for step in run.steps(last=3)] == [1, 2, 3]
        assert list(run.steps(700)) == []
        assert run.sampled_steps().tolist() == [100, 200, 300, 400, 500, 600]
        assert [found.step for found in run.iter_tensors(101, 400)] == [200, 300, 400]
        assert (run.step_count, run.sampled_count, run.first_step, run.last_step) == (600, 6, 1, 600)
        assert run.count_steps(5, 9) == 5
        assert run.step(7).loss == 1 / 7
        times = [when for when, _ in run.timed_steps()]
        assert times == sorted(times)
        assert times[0] > 1.6e9
        with pytest.raises(ArgumentError, match=r"step=601 is not recorded; .* has 600 steps from 1 to 600"):
            run.step(601)
        with pytest.raises(ArgumentError, match="step=601 is not recorded"):
            run.tensors(601)
        with pytest.raises(ArgumentError, match=r"step=7 has no statistics, .* Run\.sampled_steps\(\)"):
            run.tensors(7)
        with pytest.raises(ArgumentError, match="on_damage='ignore' is not known"):
            list(run.steps(on_damage="ignore"))  # type: ignore[arg-type]


def test_iterating_holds_few_steps_at_a_time(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(1, 4001):
            writer.put_step(Step(step, loss=1 / step, extra={"note": f"step {step}"}))
    with open_run(tmp_path) as run:
        tracemalloc.start()
        try:
            assert sum(1 for _ in run.steps()) == 4000
            assert tracemalloc.get_traced_memory()[1] < 700_000
        finally:
            tracemalloc.stop()


def test_ranks_and_paths(tmp_path: Path) -> None:
    for rank in (2, 0, 11):
        record(tmp_path, rank + 1, 1, rank=rank)
    (tmp_path / "ampdebug-rank1.sqlite.txt").touch()
    with open_run(tmp_path) as run:
        assert (run.this_rank, run.ranks) == (0, (0, 2, 11))
        assert [run.rank(rank).step_count for rank in run.ranks] == [1, 3, 12]
        with pytest.raises(ArgumentError, match=r"rank=1 has no file in .*; there are \[0, 2, 11\]"):
            run.rank(1)
        assert repr(run) == f"<Run {run_file(tmp_path, 0)}: 1 steps>"
    moved = tmp_path / "any name.db"
    shutil.copy(run_file(tmp_path, 2), moved)
    with open_run(moved) as run:
        assert (run.this_rank, run.step_count) == (2, 3)
        assert run.rank(2).step_count == 3
    with pytest.raises(StoreError, match="was closed"):
        list(run.steps())
    assert repr(run) == f"<Run {moved}: closed>"
    run_file(tmp_path, 0).unlink()
    assert open_run(str(tmp_path)).this_rank == 2


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="nowhere does not exist; give the directory of a run"):
        open_run(tmp_path / "nowhere")
    with pytest.raises(StoreError, match=r"holds no run: there is no file ampdebug-rank0\.sqlite in it"):
        open_run(tmp_path)


# --- from any place, at any time --------------------------------------------------------------------------------------


def test_reading_while_training_writes(tmp_path: Path) -> None:
    table = StatsTable()
    table.add(np.ones(3, np.float16))
    ids, codes = np.array([0]), np.array([1], np.uint8)
    stop = threading.Event()

    def train() -> None:
        step = 0
        while not stop.is_set():
            step += 1
            writer.put_step(Step(step, sampled=True), ids, codes, table)

    with RunWriter(tmp_path) as writer:
        writer.site_id(Site("output", "a"))
        thread = threading.Thread(target=train)
        thread.start()
        try:
            with open_run(tmp_path) as run:
                seen = [0]
                while seen[-1] < 300:
                    summary = run.summary()
                    assert summary.steps >= seen[-1]
                    assert (summary.last_step or 0) == summary.steps
                    seen.append(summary.steps)
                    assert sum(1 for _ in run.iter_tensors()) >= summary.steps
        finally:
            stop.set()
            thread.join()
    assert len(seen) > 2


def test_an_open_iteration_does_not_hold_the_log(tmp_path: Path) -> None:
    with RunWriter(tmp_path) as writer:
        for step in range(1, 1001):
            writer.put_step(Step(step))
        with open_run(tmp_path) as run:
            waiting = iter(run.steps())
            next(waiting)
            # With an open read this could not move everything into the file.
            writer._file._connection.execute("COMMIT")
            busy, log, moved = writer._file._connection.execute("PRAGMA wal_checkpoint(FULL)").fetchone()
            writer._file._connection.execute("BEGIN IMMEDIATE")
            assert (busy, log) == (0, moved)
            assert sum(1 for _ in waiting) == 999


def killed_run(out: Path) -> None:
    """A run whose writer was killed: its log is left beside it."""
    code = """
        import os, signal, sys
        import numpy as np
        from ampdebug._records import Site, Step
        from ampdebug._stats import StatsTable
        from ampdebug._store import RunWriter
        writer = RunWriter(sys.argv[1])
        writer.site_id(Site("output", "a"))
        table = StatsTable()
        table.add(np.ones(3, np.float16))
        for step in range(1, 41):
            writer.put_step(Step(step, sampled=True), np.array([0]), np.array([1], np.uint8), table)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    child = subprocess.run([sys.executable, "-c", textwrap.dedent(code), str(out)], cwd=ROOT, check=False)
    assert child.returncode == -signal.SIGKILL
    assert (out / "ampdebug-rank0.sqlite-wal").stat().st_size > 0


def test_after_a_kill(tmp_path: Path) -> None:
    killed_run(tmp_path)
    with open_run(tmp_path) as run:
        assert run.summary().steps == 40
        assert run.segments[0].status == "running"


READ_AS_NOBODY = """
import os, sys, tempfile
sys.path.insert(0, sys.argv[2])
import ampdebug._run
from ampdebug._errors import AmpdebugError
tempfile.tempdir = sys.argv[3]
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    with open(os.path.join(sys.argv[1], "probe"), "w"):
        sys.exit("the directory is not read-only")
except PermissionError:
    pass
try:
    with ampdebug._run.open_run(sys.argv[1]) as run:
        print(run.summary().steps, run.last_step, sum(1 for _ in run.iter_tensors()), len(os.listdir(sys.argv[3])))
    print(len(os.listdir(sys.argv[3])))
except AmpdebugError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform == "win32" or os.geteuid() != 0, reason="becoming another user needs root")
@pytest.mark.parametrize("state", ["closed", "killed", "killed, no shm", "training", "unreadable"])
def test_from_a_read_only_directory(tmp_path: Path, state: str) -> None:
    # tmp_path lies in a directory that only its owner may enter.
    import tempfile

    with tempfile.TemporaryDirectory() as place:
        Path(place).chmod(0o755)
        out, spare = Path(place) / "run", Path(place) / "spare"
        spare.mkdir()
        spare.chmod(0o777)
        writer = None
        if state in ("closed", "training", "unreadable"):
            writer = RunWriter(out)
            writer.site_id(Site("output", "a"))
            table = StatsTable()
            table.add(np.ones(3, np.float16))
            for step in range(1, 41):
                writer.put_step(Step(step, sampled=True), np.array([0]), np.array([1], np.uint8), table)
            if state != "training":
                writer.close()
        else:
            killed_run(out)
            if state == "killed, no shm":
                (out / "ampdebug-rank0.sqlite-shm").unlink()
        out.chmod(0o555)
        for file in out.iterdir():
            file.chmod(0o444 if state != "unreadable" else 0)
        before = sorted((file.name, file.stat().st_mtime_ns) for file in out.iterdir())
        child = subprocess.run(
            [sys.executable, "-c", READ_AS_NOBODY, str(out), str(ROOT), str(spare)],
            capture_output=True,
            text=True,
            check=False,
            cwd=place,
        )
        assert child.returncode == 0, child.stderr
        if state == "unreadable":
            assert child.stdout.startswith("StoreError cannot read ")
        else:
            first, second = child.stdout.splitlines()
            assert first.split()[:3] == ["40", "40", "40"]
            assert second == "0"
        assert sorted((file.name, file.stat().st_mtime_ns) for file in out.iterdir()) == before
        if writer is not None:
            writer.close()


# --- files that are not what they should be ---------------------------------------------------------------------------


def alter(path: Path, *sqls: str, **values: Any) -> None:
    connection = sqlite3.connect(path, isolation_level=None)
    for sql in sqls:
        connection.execute(sql, values)
    connection.close()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    out = tmp_path_factory.mktemp("good")
    record(out, 70, 3)
    with RunWriter(out, append=True) as writer:
        birth = Birth("forward", "a", "Dense", "output", 0, "", True, False, 1, 0, 0, 3, "float16")
        writer.put_step(Step(71, forward_birth=birth, extra={"x": [1]}))
        writer.put_result("bisect", {"a": 1})
    return run_file(out, 0).read_bytes()


@pytest.fixture
def path(good: bytes, tmp_path: Path) -> Path:
    file = run_file(tmp_path, 0)
    file.write_bytes(good)
    return file


def use_everything(run: Run) -> None:
    """Read all there is."""
    _ = run.meta, run.cells, run.sites, run.shapes, run.site_dtypes, run.events, run.segments, run.results("bisect")
    _ = run.ranks, run.step_count, run.first_step, run.last_step, repr(run)
    list(run.steps(on_damage="skip"))
    for found in run.iter_tensors(on_damage="skip"):
        _ = found.exponents, found.dtypes, found.derive("norm"), found.lowest_exponent()
    run.summary()
    run.heatmap()


def test_the_good_file_is_good(path: Path) -> None:
    with open_run(path) as run:
        use_everything(run)
        assert run.problems == []
        assert run.step(71).forward_birth is not None


def test_foreign_files(tmp_path: Path) -> None:
    file = tmp_path / "ampdebug-rank0.sqlite"
    file.write_bytes(b"")
    with pytest.raises(FormatError, match=r"rank0\.sqlite is empty: .* no run is in it"):
        open_run(tmp_path)
    file.write_bytes(np.random.default_rng(0).bytes(50_000))
    with pytest.raises(FormatError, match=r"rank0\.sqlite is not a run of ampdebug: it is not an SQLite database"):
        open_run(tmp_path)
    file.write_bytes(b"SQLite format 3\0")
    with pytest.raises(FormatError, match=r"rank0\.sqlite "):
        open_run(file)
    file.unlink()
    alter(file, "CREATE TABLE steps (step INTEGER)")
    with pytest.raises(FormatError, match=r"rank0\.sqlite is an SQLite database, but not a run of ampdebug"):
        open_run(file)


@pytest.mark.parametrize("part", [0.02, 0.1, 0.5, 0.9, 0.999])
def test_truncated(path: Path, part: float) -> None:
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * part)])
    with pytest.raises(FormatError, match=rf"rank0\.sqlite is truncated: \d+ bytes are left of {len(data)}"):
        open_run(path)


def test_newer_format(path: Path) -> None:
    alter(path, "PRAGMA user_version = 2")
    with pytest.raises(FormatError, match=r"has run format 2; this ampdebug reads up to 1: .* upgrade to read it"):
        open_run(path)


@pytest.mark.parametrize(
    ("sql", "message"),
    [
        ("DROP TABLE events", "has no table 'events'"),
        ("ALTER TABLE steps DROP COLUMN loss", r"table 'steps' lacks the column\(s\) loss"),
        ("DELETE FROM format", "table 'format' is not readable"),
        ("UPDATE format SET value = '[]' WHERE key = 'layout'", "table 'format' is not readable"),
        ("UPDATE format SET value = replace(value, '\"rms\"', '\"r\"')", "layout lacks rms"),
        (f"UPDATE format SET value = '{'[' * 100_000}' WHERE key = 'layout'", "table 'format' is not readable"),
        ("ALTER TABLE meta RENAME TO m; CREATE VIEW meta AS SELECT * FROM m", "has no table 'meta'"),
        ("CREATE VIEW v AS SELECT 1", "no run holds views or triggers, this one does: v"),
        ("CREATE TRIGGER t AFTER INSERT ON steps BEGIN SELECT 1; END", "holds views or triggers.*: t"),
        ("DROP TABLE meta; CREATE VIRTUAL TABLE meta USING fts5(key, value)", "has no table 'meta'"),
        (
            "DROP TABLE meta; CREATE TABLE meta (key TEXT, value TEXT AS (hex(zeroblob(100000000))))",
            r"table 'meta' lacks the column\(s\) value",
        ),
    ],
)
def test_damaged_tables(path: Path, sql: str, message: str) -> None:
    connection = sqlite3.connect(path)
    try:
        connection.executescript(sql)
    except sqlite3.OperationalError as error:
        pytest.skip(f"this SQLite can't make the case: {error}")
    finally:
        connection.close()
    with pytest.raises(FormatError, match=rf"rank0\.sqlite .*{message}"):
        open_run(path)


@pytest.mark.parametrize(
    ("sql", "read", "message"),
    [
        ("UPDATE meta SET value = '{'", "meta", "table 'meta', key 'mode'"),
        ("UPDATE cells SET children = '{}'", "cells", "table 'cells', row 0: column children"),
        ("UPDATE cells SET watched = 7", "cells", "column watched: 7 where bool belongs"),
        ("UPDATE sites SET kind = 'outputs'", "sites", "column kind: 'outputs'"),
        ("UPDATE sites SET shape = '[1.5]'", "shapes", "is not a shape"),
        ("UPDATE sites SET site = 9 WHERE site = 1", "sites", "sites are not numbered in sequence"),
        ("UPDATE sites SET path = x'ff'", "sites", "column path"),
        ("UPDATE events SET data = '[1]'", "events", "column data"),
        ("UPDATE segments SET status = x'00'", "segments", "table 'segments'"),
    ],
)
def test_damaged_records(path: Path, sql: str, read: str, message: str) -> None:
    alter(path, sql)
    with open_run(path) as run, pytest.raises(FormatError, match=rf"rank0\.sqlite .*{message}"):
        getattr(run, read)


BOMB = zlib.compress(bytes(200_000_000), 9)


def blob(**columns: Any) -> bytes:
    """A data blob of two rows with some columns replaced."""
    names = ("site", "dtype", "bins_first", "bins_length", *STATS_DTYPE.names)
    return pack_columns([np.array(columns.get(name, [0, 1])) for name in names])


DAMAGES: dict[str, tuple[str, dict[str, Any], str]] = {
    "row gone": ("DELETE FROM tensors WHERE step = 40", {}, "has no row in table 'tensors'"),
    "data is text": ("UPDATE tensors SET data = 'x' WHERE step = 40", {}, "values of the wrong type"),
    "data is random": ("UPDATE tensors SET data = randomblob(500) WHERE step = 40", {}, "does not decompress"),
    "data cut": ("UPDATE tensors SET data = substr(data, 1, length(data) - 9) WHERE step = 40", {}, "bytes|cut short"),
    "checksum cut": ("UPDATE tensors SET data = substr(data, 1, length(data) - 1) WHERE step = 40", {}, "cut short"),
    "checksum wrong": (
        "UPDATE tensors SET data = CAST(substr(data, 1, length(data) - 4) || x'00000000' AS BLOB) WHERE step = 40",
        {},
        "does not decompress",
    ),
    "data empty": ("UPDATE tensors SET data = x'' WHERE step = 40", {}, "0 of 18 column codes"),
    "data bomb": ("UPDATE tensors SET data = :blob WHERE step = 40", {"blob": BOMB}, "unknown column code"),
    "data long": (
        "UPDATE tensors SET data = :blob WHERE step = 40",
        {"blob": zlib.compress(b"0" * 18 + bytes(200_000_000), 9)},
        "more than 0 bytes",
    ),
    "rows many": ("UPDATE steps SET tensor_rows = 1000000000000 WHERE step = 40", {}, "declares 1000000000000 rows"),
    "rows more": ("UPDATE steps SET tensor_rows = 1000000 WHERE step = 40", {}, "its 1000000 rows take"),
    "rows negative": ("UPDATE steps SET tensor_rows = -1 WHERE step = 40", {}, "declares -1 rows"),
    "rows text": ("UPDATE steps SET tensor_rows = 'x' WHERE step = 40", {}, "values of the wrong type"),
    "counts bomb": ("UPDATE tensors SET exponents = :blob WHERE step = 40", {"blob": BOMB}, "bytes where its"),
    "counts empty": ("UPDATE tensors SET exponents = x'' WHERE step = 40", {}, "histogram counts"),
    "counts random": ("UPDATE tensors SET exponents = randomblob(99) WHERE step = 40", {}, "does not decompress"),
}
TWO_ROWS = {
    "site": ({"site": [0, 3]}, "names site 3; only 0 to 2 exist"),
    "site negative": ({"site": [0, -1]}, "names site"),
    "site fraction": ({"site": [0.0, np.nan]}, "holds fractions where site must be integers"),
    "dtype": ({"dtype": [0, 63]}, "names dtype code 63"),
    "bins": ({"bins_first": [0, 255], "bins_length": [0, 2]}, "bins outside 0 to 255"),
    "bins huge": ({"bins_first": [0, 2**63 - 1], "bins_length": [0, 2**63 - 1]}, "bins outside 0 to 255"),
}
DAMAGES |= {
    f"column {name}": ("UPDATE tensors SET data = :blob WHERE step = 40", {"blob": blob(**columns)}, message)
    for name, (columns, message) in TWO_ROWS.items()
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_step_leaves_the_others_readable(path: Path, damage: str) -> None:
    sql, values, message = DAMAGES[damage]
    alter(path, sql, **values)
    if damage.startswith("column"):
        alter(path, "UPDATE steps SET tensor_rows = 2 WHERE step = 40")
    # Its aggregate would hide it from the summary.
    alter(path, "DELETE FROM aggregates WHERE first_step <= 40 AND last_step >= 40")
    full = rf"rank0\.sqlite is damaged: the statistics of step 40: .*({message})"
    counts = damage.startswith("counts")
    tracemalloc.start()
    try:
        with open_run(path) as run:
            with pytest.raises(FormatError, match=full):
                run.tensors(40)
            with pytest.raises(FormatError, match=full):
                list(run.iter_tensors())
            assert run.problems == []
            others = [step for step in range(1, 71) if step != 40]
            assert [found.step for found in run.iter_tensors(on_damage="skip")] == others
            assert len(run.problems) == 1
            assert [step.step for step in run.steps()] == list(range(1, 72))
            run.problems.clear()
            summary = run.summary()
            assert summary.steps == 69 + counts
            assert bool(summary.problems) != counts
            assert run.heatmap().first_steps.tolist() == sorted([*others, *([40] * counts)])
        assert tracemalloc.get_traced_memory()[1] < 20_000_000
    finally:
        tracemalloc.stop()


def test_a_damaged_step_record(path: Path) -> None:
    alter(
        path, "UPDATE steps SET loss = 'high' WHERE step = 40", "UPDATE steps SET forward_birth = '{}' WHERE step = 71"
    )
    with open_run(path) as run:
        with pytest.raises(
            FormatError, match=r"rank0\.sqlite is damaged: step 40: column loss: 'high' is not a number"
        ):
            list(run.steps())
        assert [step.step for step in run.steps(on_damage="skip")] == [n for n in range(1, 71) if n != 40]
        assert "step 71: column forward_birth" in run.problems[1]
        assert len(list(run.iter_tensors())) == 70


def test_damaged_text_is_shown_escaped(path: Path) -> None:
    alter(path, "UPDATE cells SET note = CAST(x'61ff' AS TEXT)")
    with open_run(path) as run:
        assert run.cells[0].note == "a\\xff"


def test_large_declared_rows_of_zeros_stay_small(path: Path) -> None:
    """A blob of a few bytes may honestly declare a million rows of zeros: allowed, but never their histograms."""
    alter(path, "UPDATE tensors SET data = :blob WHERE step = 40", blob=zlib.compress(b"0" * 18))
    alter(path, "UPDATE steps SET tensor_rows = 1048576 WHERE step = 40")
    with open_run(path) as run, pytest.raises(FormatError, match="step 40"):
        run.tensors(40)


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.floats(0, 1, exclude_max=True), st.integers(0, 255)), min_size=1, max_size=20))
def test_damaged_bytes_give_our_errors_only(good: bytes, tmp_path: Path, changes: list[tuple[float, int]]) -> None:
    data = bytearray(good)
    for place, value in changes:
        data[int(place * len(data))] = value
    file = run_file(tmp_path, 0)
    file.write_bytes(data)
    message = str(file)
    try:
        with open_run(file) as run:
            use_everything(run)
    except StoreError as error:
        message = str(error)
    assert str(file) in message


@settings(max_examples=80, deadline=None)
@given(st.binary(max_size=200), st.integers(0, 5), st.integers(-2, 2**40))
def test_any_bytes_as_a_blob(data: bytes, columns: int, rows: int) -> None:
    from ampdebug._blobs import BlobError

    for form in (data, zlib.compress(data)):
        try:
            found = unpack_columns(form, columns, rows)
        except BlobError:
            continue
        assert [len(column) for column in found] == [rows] * columns


@pytest.mark.parametrize("path", [5, None, b"runs", ["runs"]])
def test_what_is_no_path_is_refused(path: Any) -> None:
    with pytest.raises(ArgumentError, match=r"path=.*: must be a path"):
        open_run(path)
    with pytest.raises(ArgumentError, match=r"out=.*: must be a path"):
        RunWriter(path)
