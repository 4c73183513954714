"""The doctor's judgements on facts made by hand, and its child processes where there is no MindSpore to answer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

import ampdebug
from ampdebug import ArgumentError, DoctorReport
from ampdebug._cli import main
from ampdebug._doctor import _kernels, ask
from ampdebug._doctor_rules import (
    VARIABLES,
    Line,
    judge_environment,
    judge_kernels,
    judge_settings,
    judge_versions,
    parse_version,
)

ROOT = Path(__file__).resolve().parent.parent
GOOD = {
    "mindspore": "2.10.0", "numpy": "1.26.4", "protobuf": "7.36.2", "tensorboardX": "2.6.5", "tabulate": "0.10.0",
    "numba": None,
}  # fmt: skip
REQUIRES = ["numpy>=1.25.0", "protobuf>=7.34.1", "asttokens>=2.0.4"]


def warned(lines: Any) -> dict[str, Line]:
    found = {line.subject: line for line in lines if line.status == "warn"}
    for line in found.values():
        assert line.why, f"{line.subject} warns and does not say why"
        assert line.action, f"{line.subject} warns and does not say what to do"
    return found


@pytest.mark.parametrize(("text", "expected"), [("2.10.0", (2, 10, 0)), ("1.26.4rc1", (1, 26, 4)), ("dev", ())])
def test_versions_are_compared_as_numbers(text: str, expected: tuple[int, ...]) -> None:
    assert parse_version(text) == expected
    assert parse_version("2.10") > parse_version("2.9.1")


def test_a_good_machine_has_no_warning() -> None:
    assert warned(judge_versions(GOOD, (3, 11), REQUIRES)) == {}


@pytest.mark.parametrize(
    ("change", "python", "subject", "found"),
    [
        ({"numpy": "2.1.0"}, (3, 11), "numpy", "2.1.0"),
        ({"numpy": "1.25.2"}, (3, 11), "numpy", "1.25.2"),
        ({"mindspore": "2.9.0"}, (3, 11), "mindspore", "2.9.0"),
        ({"mindspore": "2.11.1"}, (3, 11), "mindspore", "2.11.1"),
        ({"mindspore": None}, (3, 11), "mindspore", "not installed"),
        ({"protobuf": "6.0"}, (3, 11), "protobuf", "6.0"),
        ({"protobuf": None}, (3, 11), "protobuf", "not installed"),
        ({"tensorboardX": "2.5"}, (3, 11), "tensorboardX", "2.5"),
        ({"tabulate": None}, (3, 11), "tabulate", "not installed"),
        ({}, (3, 13), "python", "3.13"),
        ({}, (3, 9), "python", "3.9"),
    ],
)
def test_each_version_that_does_not_fit(
    change: dict[str, str | None], python: tuple[int, int], subject: str, found: str
) -> None:
    lines = warned(judge_versions({**GOOD, **change}, python, REQUIRES))
    assert list(lines) == [subject]
    assert lines[subject].found == found


def test_numpy_2_is_fine_without_mindspore() -> None:
    assert list(warned(judge_versions({**GOOD, "mindspore": None, "numpy": "2.2"}, (3, 11)))) == ["mindspore"]


@pytest.mark.parametrize(
    ("name", "bad", "fine"),
    [
        ("MS_ASCEND_CHECK_OVERFLOW_MODE", "SATURATION_MODE", "INFNAN_MODE"),
        ("INF_NAN_MODE_ENABLE", "0", "1"),
        ("MS_JIT", "0", "1"),
        ("MS_COMPILER_CACHE_ENABLE", "1", "0"),
        ("HCCL_DETERMINISTIC", "false", "strict"),
        ("GLOG_v", "3", "2"),
        ("MS_SIMULATION_LEVEL", "1", ""),
        ("TE_PARALLEL_COMPILER", "8", "1"),
        ("PROTOCOL_BUFFERS_PYTHON_IMPLEMENTATION", "python", "upb"),
    ],
)
def test_environment_variables(name: str, bad: str, fine: str) -> None:
    assert list(warned(judge_environment({name: bad, "HOME": "/"}))) == [name]
    (line,) = judge_environment({name: fine})
    assert (line.subject, line.status) == (name, "ok")


def test_no_variable_and_two_that_contradict() -> None:
    (line,) = judge_environment({"PATH": "x"})
    assert line.found == f"none of {len(VARIABLES)} variables that change numbers is set"
    assert "overflow modes" in warned(
        judge_environment({"MS_ASCEND_CHECK_OVERFLOW_MODE": "INFNAN_MODE", "INF_NAN_MODE_ENABLE": "0"})
    )


def settings(**change: Any) -> dict[str, Any]:
    return {"device": "CPU", "mode": "PYNATIVE_MODE", "deterministic": "OFF", "seed": 1, "here": True, **change}


def test_settings() -> None:
    assert warned(judge_settings(settings())) == {}
    assert set(warned(judge_settings(settings(device="Ascend")))) == {"HF32", "deterministic"}
    assert set(warned(judge_settings(settings(device="Ascend", deterministic="ON")))) == {"HF32"}
    assert set(warned(judge_settings(settings(seed=None)))) == {"seed"}
    assert warned(judge_settings(settings(seed=None, here=False))) == {}


def kernel(dtype: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"kernel": "matmul", "dtype": dtype, "size": 512, "seconds": seconds, "float32_seconds": 0.01, "error": 1e-4,
            "right": True, **more}  # fmt: skip


def test_kernels() -> None:
    lines = list(
        judge_kernels(
            [
                kernel("float32", 0.01),
                kernel("float16", 0.004),
                kernel("float16", 0.02, kernel="conv"),
                kernel("bfloat16", 0.001, error=0.5, right=False),
                kernel("bfloat16", 0.001, error=None, right=False, kernel="conv"),
                {"kernel": "gather", "dtype": "bfloat16", "failed": "the process ended with exit code -11"},
            ]
        )
    )
    assert [(line.subject, line.status) for line in lines] == [
        ("float32 matmul", "ok"),
        ("float16 matmul", "ok"),
        ("float16 conv", "warn"),
        ("bfloat16 matmul", "warn"),
        ("bfloat16 conv", "warn"),
        ("bfloat16 gather", "warn"),
    ]
    assert "0.4 times float32's time" in lines[1].found
    assert "memory is all there is to win" in lines[2].why
    assert "off by 0.5" in lines[3].found
    assert "not finite" in lines[4].found
    assert "exit code -11" in lines[5].found
    warned(lines)


def test_the_report() -> None:
    report = DoctorReport((Line("numpy", "ok", "1.26.4"), Line("MS_JIT", "warn", "0", "it matters", "unset it")))
    assert not report.ok
    assert str(report).splitlines() == [
        "1 warning.",
        "ok    numpy   1.26.4",
        "warn  MS_JIT  0",
        "              Why: it matters.",
        "              Do: unset it.",
    ]
    assert report.to_dict()["lines"][1] == {
        "subject": "MS_JIT", "status": "warn", "found": "0", "why": "it matters", "do": "unset it"
    }  # fmt: skip
    assert str(DoctorReport((Line("numpy", "ok", "1.26.4"),))).startswith("Everything fits.")


@pytest.mark.parametrize("timeout", [0, -1.0, float("nan")])
def test_a_wrong_timeout(timeout: float) -> None:
    with pytest.raises(ArgumentError, match="timeout="):
        ampdebug.doctor(timeout=timeout)


# --- child processes: a MindSpore that is not one stands in for it ----------------------------------------------------


def stand_in(folder: Path, body: str) -> dict[str, str]:
    """An environment whose ``mindspore`` runs ``body`` when it is imported."""
    (folder / "mindspore").mkdir()
    (folder / "mindspore" / "__init__.py").write_text(textwrap.dedent(body))
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


@pytest.mark.parametrize(
    ("body", "ended"),
    [
        ("raise ImportError('libmindspore.so is missing')", "ImportError: libmindspore.so is missing"),
        ("import os; print('half a line', flush=True); os.kill(os.getpid(), 9)", "exit code -9"),
        ("import time; time.sleep(60)", "no answer in 1 s"),
    ],
)
def test_a_mindspore_that_fails_crashes_or_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, ended: str
) -> None:
    for name, value in stand_in(tmp_path, body).items():
        monkeypatch.setenv(name, value)
    answers, how = ask(["settings"], 1.0 if "sleep" in body else 30.0)
    assert answers == []
    assert ended in how


def test_each_kernel_has_a_process_of_its_own_when_they_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = tmp_path / "log"
    body = f"""
        import os, sys
        with open({str(log)!r}, "a") as stream:
            stream.write(" ".join(sys.orig_argv[3:]) + "\\n")
        os.kill(os.getpid(), 9)
    """
    for name, value in stand_in(tmp_path, body).items():
        monkeypatch.setenv(name, value)
    results = list(_kernels(30.0))
    assert [(r["dtype"], r["kernel"]) for r in results] == [
        (dtype, kernel) for dtype in ("float32", "float16", "bfloat16") for kernel in ("matmul", "conv")
    ]
    assert all(r["failed"] == "the process ended with exit code -9" for r in results)
    assert log.read_text().splitlines() == [
        line
        for dtype in ("float32", "float16", "bfloat16")
        for line in (f"{dtype}:matmul:0 {dtype}:conv:0", f"{dtype}:conv:0")
    ]


def test_it_works_where_mindspore_is_not_installed(tmp_path: Path) -> None:
    """In a process in which no distribution of that name is found, and importing it is an error."""
    script = """
        import importlib.metadata, sys
        sys.modules["mindspore"] = None
        version = importlib.metadata.version
        def without(name):
            if name == "mindspore":
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)
        importlib.metadata.version = without
        from ampdebug._cli import main
        sys.exit(main(["doctor", "--json"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], cwd=tmp_path, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    lines = {line["subject"]: line for line in json.loads(done.stdout)["lines"]}
    assert lines["mindspore"]["found"] == "not installed"
    assert "reading runs, logs and checkpoints works" in lines["mindspore"]["why"]
    assert "device" not in lines


def test_the_command_line_says_what_is_wrong_with_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--timeout", "-3"]) == 2
    assert "timeout=-3.0: must be a positive number" in capsys.readouterr().err
