"""The compiled code: what only it can get wrong, and what happens where it can't be had."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ampdebug import _bits
from ampdebug._bits import BF16, F16, F32
from ampdebug._stats import StatsTable, measure_update, nonfinite_counts

ROOT = Path(__file__).parents[1]

# Uses the statistics once and prints which code computed them, why, and a number.
REPORT = (
    "import numpy as np, ampdebug._stats as s\n"
    "print(s.kernel_name(), s.kernel_reason(), s.summarize(np.full(1000, 3, np.float16)).rms, sep='|')\n"
)


def report(code: str = REPORT, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    name, reason, rms = done.stdout.split("|")
    assert float(rms) == 3.0
    return name, reason


@pytest.fixture(scope="module")
def kernels() -> Any:
    pytest.importorskip("numba")
    from ampdebug import _kernels

    return _kernels


def measured(module: Any, flat: Any, kind: int) -> tuple[Any, Any]:
    rows, exponents = np.full((1, 14), 7, np.int64), np.full((1, 256), 7, np.uint32)
    module.MEASURE[kind](flat, kind, rows, exponents, 0, np.zeros(module.SCRATCH_SIZE, np.uint32))
    return rows[0, :12], exponents[0]  # min and max as bits, without mean and rms


def test_every_half_pattern_widens_as_numpy_widens_it(kernels: Any) -> None:
    source = np.arange(65536, dtype=np.uint16)
    for kind, want in (
        (F16, source.view(np.float16).astype(np.float32)),
        (BF16, (source.astype(np.uint32) << 16).view(np.float32)),
    ):
        target = np.zeros(65536, np.uint32)
        kernels._widen(source, kind, target)
        got = target.view(np.float32)
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))


@pytest.mark.parametrize("span", [1, 2, 29, 30, 31, 32, 33, 200])
@pytest.mark.parametrize("lowest", [0, 1, 2, 100, 220, 221, 222, 223, 224, 225, 253])
def test_exponents_at_the_edges_of_the_window(kernels: Any, lowest: int, span: int) -> None:
    # Blocks whose exponents run from `lowest` over `span` binades, then ones that force the window to move down and up.
    rng = np.random.default_rng(span)

    def block(first: int, binades: int, size: int) -> Any:
        exponents = rng.integers(first, min(first + binades, 255), size, dtype=np.uint32)
        exponents[:2] = first, min(first + binades, 255) - 1
        bits = exponents << np.uint32(23) | rng.integers(1, 2**23, size, dtype=np.uint32)
        bits[2::5] = 0
        return bits | rng.integers(0, 2, size, dtype=np.uint32) << np.uint32(31)

    size = kernels.BLOCK
    parts = [
        (lowest, span, size),
        (max(lowest - 3, 0), span, size),
        (lowest, span, size),
        (min(lowest + 2, 254), 1, size),
    ]
    parts += [(lowest, span, 777)]
    flat = np.concatenate([block(*part) for part in parts])
    for length in (flat.size, flat.size - 1, size + 255, size + 256, size + 257, size + 259):
        (ints, exponents), (want_ints, want_exponents) = (measured(m, flat[:length], F32) for m in (kernels, _bits))
        np.testing.assert_array_equal(exponents, want_exponents)
        np.testing.assert_array_equal(ints, want_ints)


def test_scratch_is_left_clean_for_the_next_array(kernels: Any) -> None:
    rng = np.random.default_rng(0)
    scratch = np.zeros(kernels.SCRATCH_SIZE, np.uint32)
    rows, exponents = np.zeros((2, 14), np.int64), np.zeros((2, 256), np.uint32)
    narrow = rng.standard_normal(9000).astype(np.float32).view(np.uint32)
    wide = (rng.standard_normal(9000) * np.exp2(rng.uniform(-120, 120, 9000))).astype(np.float32).view(np.uint32)
    kernels.MEASURE[F32](narrow, F32, rows, exponents, 0, scratch)
    for other in (wide, narrow[:300], wide[:300], narrow):
        kernels.MEASURE[F32](other, F32, rows, exponents, 1, scratch)
    np.testing.assert_array_equal(exponents[1], exponents[0])
    np.testing.assert_array_equal(rows[1], rows[0])


def test_the_self_check_notices_wrong_numbers(kernels: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    kernels.check()
    right = kernels.MEASURE[F32]

    def wrong(flat: Any, kind: int, rows: Any, exponents: Any, row: int, scratch: Any) -> None:
        right(flat, kind, rows, exponents, row, scratch)
        rows[row, _bits.ZEROS] += 1

    monkeypatch.setattr(kernels, "MEASURE", (*kernels.MEASURE[:2], wrong, kernels.MEASURE[3]))
    with pytest.raises(RuntimeError, match="differ from numpy's"):
        kernels.check()


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_no_memory_layout_compiles_anything_anew(kernels: Any, dtype: str) -> None:
    # A new type of array would be right as well, but stop the training for seconds.
    table = StatsTable(kernel="numba")

    def signatures() -> int:
        return sum(len(function.signatures) for function in kernels._compiled_functions)

    compiled = signatures()
    base = np.ones((6, 5, 4), dtype)
    read_only = base.copy()
    read_only.flags.writeable = False
    unaligned = np.frombuffer(b"x" + base.tobytes(), np.uint8)[1:].view(dtype)
    flat = base.reshape(-1)
    for array in (base, base.T, base[::2], flat[::-1], flat[::3], read_only, unaligned, np.array(1, dtype), flat[:0]):
        row = table.add(array)
        assert table.rows["mean"][row] == 1.0 or array.size == 0
        nonfinite_counts(array)
        if dtype != "float64":
            measure_update(array, array, "float16")
    assert signatures() == compiled


def test_the_compiled_code_runs_without_the_gil(kernels: Any) -> None:
    assert all(function.targetoptions["nogil"] for function in kernels._compiled_functions)


@pytest.mark.slow
def test_a_cache_that_cannot_be_written_costs_time_only(kernels: Any, tmp_path: Path) -> None:
    pytest.importorskip("resource")
    # stdout is a pipe, which the limit on file sizes does not touch.
    full_disk = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))\n"
    name, _ = report(full_disk + REPORT, NUMBA_CACHE_DIR=str(tmp_path))
    assert name == "numba"
    assert not [f for f in tmp_path.rglob("*.nbc") if f.stat().st_size]


@pytest.mark.slow
def test_no_place_for_a_cache_costs_time_only(kernels: Any) -> None:
    # Root may write everywhere, whatever the permissions; this is what numba tries a folder with.
    no_place = (
        "import tempfile\n"
        "def refuse(*args, **options): raise PermissionError('read-only')\n"
        "tempfile.TemporaryFile = refuse\n"
        "import numba\n"
        "try: numba.njit(cache=True)(report := lambda: 1)\n"
        "except RuntimeError as error: assert 'cannot cache' in str(error)\n"
        "else: raise AssertionError('numba found a place')\n"
    )
    name, _ = report(no_place + REPORT)
    assert name == "numba"


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("raise ImportError('llvmlite was built for another numpy')", "llvmlite was built for another numpy"),
        ("raise OSError('libLLVM.so: cannot open shared object file')", "libLLVM.so: cannot open"),
        ("import llvmlite_gone", "numba can't be imported: No module named 'llvmlite_gone'"),
        ("__version__ = '0'\ndef njit(**o): return lambda f: (lambda *a: None)", "No module named 'numba.core'"),
        (
            "import sys, types\n__version__ = '0'\ndef njit(**o): return lambda f: (lambda *a: None)\n"
            "core, extending = types.ModuleType('core'), types.ModuleType('extending')\n"
            "core.cgutils, extending.intrinsic = None, lambda f: f\n"
            "sys.modules.update({'numba.core': core, 'numba.extending': extending})",
            "numba does not work here",
        ),
    ],
)
def test_a_broken_numba_means_numpy_and_a_reason(tmp_path: Path, source: str, sentence: str) -> None:
    (tmp_path / "numba.py").write_text(source + "\n")
    name, reason = report(PYTHONPATH=str(tmp_path))
    assert name == "numpy"
    assert sentence in reason
