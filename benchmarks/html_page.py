"""How large the HTML page of a recorded run is, what it costs to write, and how soon a browser shows it.

    python benchmarks/html_page.py            # 1,000 cells x 1,000 recorded steps
    python benchmarks/html_page.py --full     # 1,000 cells x 10,000 recorded steps
    python benchmarks/html_page.py --run DIR  # a run that is there already

The run is the one of benchmarks/store.py. Writing goes on in a process of its own, whose peak memory is reported.
Opening is measured in a Chromium of the system without a window (see tests/test_html_browser.py), by its own clock:
from the start of the navigation until the script is done, and until a frame after that is drawn; medians of five.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import store  # benchmarks/store.py, which lies beside this file

from ampdebug._run import open_run

REPEATS = 5
# Two frames: the first callback comes before the frame is drawn, the second after.
_DRAWN = "() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"


def write(run: Path, page: Path) -> dict[str, Any]:
    """The page, in this process."""
    from ampdebug.report.html import write_html

    before = store.peak_memory()
    begin, cpu = time.perf_counter(), time.process_time()
    with open_run(run) as opened:
        write_html(opened, page)
    return {
        "writing, s": time.perf_counter() - begin,
        "writing, s of CPU": time.process_time() - cpu,
        "peak memory, MB": store.peak_memory(),
        "of these before it began, MB": before,
        "size, MB": page.stat().st_size / 1e6,
    }


def open_in_browser(page: Path, width: int) -> dict[str, Any]:
    """Times of a fresh browser page each time, in ms."""
    from playwright.sync_api import sync_playwright

    path = os.environ.get("AMPDEBUG_CHROMIUM") or shutil.which("chromium-headless-shell") or shutil.which("chromium")
    if path is None:
        raise SystemExit(
            "needs a Chromium (Debian: apt-get install chromium-headless-shell), or AMPDEBUG_CHROMIUM=FILE"
        )
    ready, drawn, click = [], [], []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for _ in range(REPEATS):
            tab = browser.new_page(viewport={"width": width, "height": 900})
            tab.goto(page.as_uri())
            ready.append(tab.evaluate("performance.getEntriesByType('navigation')[0].domContentLoadedEventStart"))
            drawn.append(tab.evaluate(_DRAWN))
            begin = tab.evaluate("performance.now()")
            tab.evaluate("document.querySelector('#cells-table tbody tr').click()")
            click.append(tab.evaluate("performance.now()") - begin)
            tab.close()
        browser.close()
    return {
        f"script done at width {width}, ms": statistics.median(ready),
        f"drawn at width {width}, at most, ms": statistics.median(drawn),
        f"first details at width {width}, ms": statistics.median(click),
    }


def in_own_process(*arguments: str) -> dict[str, Any]:
    """One measurement, in a process of its own."""
    command = [sys.executable, __file__, *arguments]
    result: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--full", action="store_true", help="10,000 steps in place of 1,000")
    parser.add_argument("--steps", type=int, help="another number of steps")
    parser.add_argument("--rows", type=int, default=store.ROWS, help="rows a step (default: %(default)s)")
    parser.add_argument("--run", type=Path, help="a run that is there already")
    parser.add_argument("--keep", type=Path, metavar="FILE", help="keep the page there")
    parser.add_argument("--write", nargs=2, type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        print(json.dumps(write(*options.write)))
        return
    steps = options.steps or (10_000 if options.full else 1_000)
    with tempfile.TemporaryDirectory(prefix="ampdebug-html-") as folder:
        run = options.run
        if run is None:
            run = Path(folder) / "run"
            store.in_own_process("write", run, steps, options.rows)
            print(f"{store.CELLS:,} cells, {options.rows:,} rows a step, {steps:,} recorded steps:")
        page = (options.keep or Path(folder) / "page.html").resolve()
        measured = in_own_process("--write", str(run), str(page))
        for width in (1280, 390):
            measured |= open_in_browser(page, width)
        for what, value in measured.items():
            print(f"  {what:38} {value:10.2f}", flush=True)


if __name__ == "__main__":
    main()
