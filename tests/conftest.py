"""What all tests share: golden files, the cases beside the checkout, and modules that run in their own process."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampdebug import Cell, Event, Run, Site, Step, open_run
from ampdebug._records import DTYPE_CODES
from ampdebug._stats import StatsTable
from ampdebug._store import RunWriter

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = Path(__file__).resolve().parent / "golden"

# tests/mindspore would be found as a namespace package of that name if tests/ were on the path; a real one has an
# origin.
_spec = importlib.util.find_spec("mindspore")
HAVE_MINDSPORE = _spec is not None and _spec.origin is not None

REPORTS = pytest.StashKey[Any]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--overwrite", action="store_true", help="write the golden files anew from what the code says now")
    parser.addoption("--child-reports", help="(internal) the file a child process of own_process writes its reports to")


# --- tests/mindspore --------------------------------------------------------------------------------------------------


class _NeedsMindSpore(pytest.Module):
    """Stands for a test module that cannot be imported here, so that the run says it was left out."""

    def collect(self) -> Iterator[pytest.Item]:
        pytest.skip(
            "needs MindSpore, which is not installed here (pip install 'mindspore>=2.10')", allow_module_level=True
        )


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    # A conftest.py in tests/mindspore is loaded all the same: it must not import mindspore at its top.
    if not HAVE_MINDSPORE and module_path.parent.name == "mindspore":
        return _NeedsMindSpore.from_parent(parent, path=module_path)
    return None


# --- own_process ------------------------------------------------------------------------------------------------------
#
# MindSpore keeps global state: the execution mode, compiled graphs, a precision stack that leaks after an exception,
# and after some errors the process dies later (a segmentation fault). A module says
#
#     pytestmark = pytest.mark.own_process
#
# and its selected tests run together in one child process; each still has its own result here. Where the child dies,
# the test it was in fails and says so, and the ones after it go on in a new child.


def pytest_configure(config: pytest.Config) -> None:
    target = config.getoption("--child-reports")
    if target:
        config.pluginmanager.register(_ReportWriter(config, Path(target)))


class _ReportWriter:
    """In the child: every report as a line of JSON, as soon as it is made, so that a crash loses none."""

    def __init__(self, config: pytest.Config, target: Path) -> None:
        self._config = config
        self._target = target

    def _write(self, data: dict[str, Any]) -> None:
        with self._target.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(data) + "\n")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._write({"started": nodeid})

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._write(self._config.hook.pytest_report_to_serializable(config=self._config, report=report))


def _child_reports(config: pytest.Config, items: list[pytest.Item]) -> tuple[list[pytest.TestReport], str | None, str]:
    """Runs the items in a child process. Returns its reports, the test it died in if it died, and what it printed."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "reports.jsonl"
        target.touch()
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", f"--child-reports={target}"]
        if config.getoption("--overwrite"):
            command.append("--overwrite")
        if config.option.capture == "no":
            command.append("-s")
        command += [f"--rootdir={config.rootpath}", f"--config-file={config.inipath}"]
        if config.pluginmanager.hasplugin("_cov"):
            command.append("--no-cov")  # coverage measures children by itself (patch = ["subprocess"])
        # Not in the checkout: MindSpore litters the current folder, and takes an environment inside it for the user's
        # own code, which O1 then rewrites and fails on.
        place = Path(folder) / "work"
        place.mkdir()
        paths = os.pathsep.join([str(config.rootpath), *filter(None, [os.environ.get("PYTHONPATH")])])
        child = subprocess.run(
            [*command, *(str(config.rootpath / item.nodeid) for item in items)],
            cwd=place,
            env={**os.environ, "PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            stdout=None if config.option.capture == "no" else subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
        reports: list[pytest.TestReport] = []
        running: str | None = None
        for line in target.read_text(encoding="utf-8").splitlines():
            data = json.loads(line)
            if "started" in data:
                running = data["started"]
                continue
            report = config.hook.pytest_report_from_serializable(config=config, data=data)
            if isinstance(report.longrepr, list):
                report.longrepr = tuple(report.longrepr)  # a skip's (file, line, reason): JSON has no tuples
            reports.append(report)
            if report.when == "teardown":
                running = None
    said = child.stdout or ""
    if running is None and child.returncode not in (0, 1):
        # It stopped outside a test (collection, or at exit): the first test without a report takes the blame.
        done = {report.nodeid for report in reports}
        running = next((item.nodeid for item in items if item.nodeid not in done), None)
    if running is not None:
        said = f"the child process ended with exit code {child.returncode} in this test; it printed:\n{said[-8000:]}"
    return reports, running, said


def _run_module(config: pytest.Config, items: list[pytest.Item]) -> dict[str, list[pytest.TestReport]]:
    results: dict[str, list[pytest.TestReport]] = {}
    left = list(items)
    while left:
        reports, died_in, said = _child_reports(config, left)
        for report in reports:
            results.setdefault(report.nodeid, []).append(report)
        if died_in is not None:
            item = next(item for item in left if item.nodeid == died_in)
            results[died_in] = [
                pytest.TestReport(
                    nodeid=died_in, location=item.location, keywords={}, outcome="failed", longrepr=said, when="call"
                )
            ]
        rest = [item for item in left if item.nodeid not in results]
        if len(rest) == len(left):  # no progress; a test without any report must not pass for run
            for item in rest:
                results[item.nodeid] = [
                    pytest.TestReport(
                        nodeid=item.nodeid,
                        location=item.location,
                        keywords={},
                        outcome="failed",
                        longrepr=f"the child process did not run this test; it printed:\n{said[-8000:]}",
                        when="call",
                    )
                ]
            break
        left = rest
    return results


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    config = item.config
    if item.get_closest_marker("own_process") is None or config.getoption("--child-reports"):
        return None
    reports = item.session.stash.setdefault(REPORTS, {})
    if item.nodeid not in reports:
        siblings = [
            other
            for other in item.session.items
            if other.path == item.path and other.get_closest_marker("own_process") and other.nodeid not in reports
        ]
        reports.update(_run_module(config, siblings))
    # What an ordinary test before this module left set up (its folder, as this module shares it) ends here: nothing of
    # this module is set up in this process.
    item.session._setupstate.teardown_exact(nextitem)
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in reports[item.nodeid]:
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


# --- fixtures ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def shared_cases() -> Path:
    """The recorded cases beside the checkout: ``01-…/log.txt``, ``16-…/net.py``, each with ``expected.json``."""
    path = Path(os.environ.get("AMPDEBUG_CASES", ROOT.parent / "shared" / "cases"))
    if not path.is_dir():
        pytest.skip(f"the cases are not beside this checkout: {path} is no folder (AMPDEBUG_CASES=DIR names another)")
    return path


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Run]]:
    """``record([(step, [(site, array), …]), …], cells=…, events=…, meta=…)`` writes a run and opens it.

    It lies in ``run`` in the current folder, which is a temporary one, so that a printed path is the same everywhere.
    """
    monkeypatch.chdir(tmp_path)
    opened: list[Run] = []

    def make(
        steps: Sequence[tuple[Step, Sequence[tuple[Site, np.ndarray]]]],
        *,
        cells: Sequence[Cell] = (),
        events: Sequence[Event] = (),
        meta: dict[str, Any] | None = None,
        rank: int = 0,
    ) -> Run:
        with RunWriter("run", rank=rank) as writer:
            known = {"amp_level": "O2", "mode": "PYNATIVE_MODE", "device": "CPU", "mindspore": "2.10.0"}
            writer.put_meta(known if meta is None else meta)
            writer.put_cells(cells)
            for step, measured in steps:
                _put_step(writer, step, measured)
            for event in events:
                writer.put_event(event)
        opened.append(open_run(f"run/ampdebug-rank{rank}.sqlite"))
        return opened[-1]

    yield make
    for run in opened:
        run.close()


def _put_step(writer: RunWriter, step: Step, measured: Sequence[tuple[Site, np.ndarray]]) -> None:
    if not measured:
        writer.put_step(step)
        return
    table = StatsTable(kernel="numpy")
    for _, array in measured:
        table.add(array)
    ids = np.array([writer.site_id(site, array.shape) for site, array in measured], np.int32)
    dtypes = np.array([DTYPE_CODES[str(array.dtype)] for _, array in measured], np.uint8)
    writer.put_step(dataclasses.replace(step, sampled=True), ids, dtypes, table)


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``golden("name.txt", text)``: the text is what tests/golden/name.txt holds; ``pytest --overwrite`` writes it."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--overwrite"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text + "\n", encoding="utf-8")
        assert path.is_file(), f"{path} is missing: look at what the code says now, then pytest --overwrite"
        assert text + "\n" == path.read_text(encoding="utf-8"), f"differs from {path}; if meant: pytest --overwrite"

    return check
