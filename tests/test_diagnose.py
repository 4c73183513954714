"""Diagnosing whole logs: the collected cases, generated runs, and what the report says."""

from __future__ import annotations

import ast
import gzip
import importlib.util
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ampdebug._diagnose import Diagnosis, diagnose
from ampdebug._errors import ArgumentError, FormatError
from ampdebug._trace import Trace
from ampdebug.rules import Evidence, Finding, fold
from ampdebug.rules._timeline import sparkline

ROOT = Path(__file__).resolve().parents[1]
CASES = Path(__file__).resolve().parents[2] / "shared" / "cases"
LOGS = sorted(CASES.glob("*/log.txt"))
# The rules over operators have tests and a manual page of their own.
RULE_FILES = [p for p in (ROOT / "ampdebug" / "rules").glob("*.py") if not p.name.lstrip("_").startswith("operator")]


def load(name: str) -> ModuleType:
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


simulate = load("simulate")


# --- the cases -------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not LOGS, reason="the collected cases (../shared/cases) are not beside this checkout")
@pytest.mark.parametrize("log", LOGS, ids=lambda path: path.parent.name)
def test_case(log: Path) -> None:
    expected = json.loads((log.parent / "expected.json").read_text())
    found = diagnose(log)
    slug = expected["expected_diagnosis"]["slug"]
    if slug == "ok":
        assert found.ok
        assert found.findings == ()
    else:
        assert [f.slug for f in found.findings][:1] == [slug]
    said = (str(found) + json.dumps(found.to_dict(), ensure_ascii=False)).lower()
    assert [text for text in expected["must_not_say"] if text.lower() in said] == []


@pytest.mark.skipif(not LOGS, reason="the collected cases (../shared/cases) are not beside this checkout")
def test_evidence_of_the_cases() -> None:
    by_name = {log.parent.name[:2]: diagnose(log).findings for log in LOGS}
    first = {number: findings[0] for number, findings in by_name.items() if findings}
    assert first["01"].first_step == 2100
    assert "from step 2200 on every loss is NaN" in first["01"].sentence
    assert "checkpoint(s) were saved after it" in first["01"].consequences[0]
    assert first["03"].first_step == 97
    assert "1.179" in first["03"].sentence
    assert first["04"].where == "step 23 of the epoch"
    assert "epoch of 40 steps, 6 times" in first["04"].sentence
    assert first["07"].where == "loss_classifier"
    assert first["09"].first_step == 3385
    assert "79 of" in first["13"].sentence
    assert "0.12" in first["14"].sentence


# --- generated runs (benchmarks/diagnose_campaign.py runs many more) -------------------------------------------------


@pytest.mark.parametrize("seed", range(25))
def test_healthy_run_has_no_finding(seed: int) -> None:
    run = simulate.healthy(seed)
    found = diagnose(io.BytesIO(run.text))
    assert [(f.slug, f.sentence) for f in found.findings if f.severity != "note"] == []


def test_faulty_runs_are_understood() -> None:
    seeds = range(2 * len(simulate.FAULTS))
    runs = [simulate.faulty(seed) for seed in seeds]
    assert {run.fault for run in runs} == set(simulate.FAULTS)
    missed = []
    for run in runs:
        findings = diagnose(io.BytesIO(run.text)).findings
        if not findings or findings[0].slug not in run.expected:
            missed.append((run.seed, run.fault, run.style, [f.slug for f in findings]))
    assert len(missed) <= 1, missed


def test_the_generator_makes_each_format_readable() -> None:
    for seed, style in enumerate(simulate.STYLES):
        run = simulate.healthy(seed)
        assert run.style == style
        found = diagnose(io.BytesIO(run.text))
        assert any("logged" in sentence for sentence in found.looked_at), style


def test_the_generator_needs_its_faults() -> None:
    """A run of the same settings without the fault is healthy: the finding comes from the fault."""
    for seed in range(len(simulate.FAULTS)):
        run = simulate.faulty(seed)
        setup = run.setup
        for name in (
            "forward_breaks",
            "backward_breaks",
            "gradient_burst",
            "bad_batch",
            "diverge",
            "zero_loss",
            "restart_at",
            "stuck_scaler",
        ):
            setattr(setup, name, None)
        if run.fault in ("never-updated", "window-too-short", "norm-scaled", "ranks"):
            continue  # there the fault is the setting itself
        lines = simulate.STYLES[run.style].write(list(simulate.train(setup)), run.interval, setup)
        found = diagnose(io.BytesIO("\n".join(lines).encode()))
        assert found.ok, (seed, run.fault, run.style, str(found))


# --- the object ------------------------------------------------------------------------------------------------------


def nan_log() -> bytes:
    lines = [f"epoch: 1 step: {i}, loss is {'nan' if i > 40 else 3.0 - i / 100}" for i in range(1, 61)]
    return "\n".join(lines).encode()


def test_report_and_json_say_the_same() -> None:
    found = diagnose(io.BytesIO(nan_log()))
    finding = found.findings[0]
    text = str(found)
    assert finding.slug in text
    assert "line 41" in text
    assert "Do: Go back to a checkpoint before step 41" in text
    assert "Cannot be said from this source" in text
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert data["verdict"] == "findings"
    assert set(data["findings"][0]) >= {
        "slug",
        "sentence",
        "severity",
        "confidence",
        "first_step",
        "last_step",
        "where",
        "evidence",
        "action",
    }
    assert data["findings"][0]["evidence"][0] == {"step": 40, "line": 40, "text": "epoch: 1 step: 40, loss is 2.6"}


def test_ok_says_what_it_looked_at() -> None:
    found = diagnose(io.BytesIO(nan_log().split(b"\nepoch: 1 step: 41")[0]))
    assert found.ok
    assert found.to_dict()["verdict"] == "ok"
    assert "nothing is wrong" in str(found)
    assert "40 logged steps, 1 to 40." in str(found)
    assert "Never printed, so unknown" in str(found)


def test_a_note_leaves_the_verdict_ok() -> None:
    trace = Trace()
    for step in range(60):
        trace.step(loss=20.0 if step == 30 else 2.0)
    found = trace.diagnose()
    assert [f.severity for f in found.findings] == ["note"]
    assert found.ok


def test_html_escapes_what_the_log_says() -> None:
    line = "epoch: 1 step: {}, loss is {}, <script>alert(1)</script>"
    found = diagnose(io.BytesIO("\n".join(line.format(i, "nan" if i > 9 else 2.0) for i in range(1, 30)).encode()))
    page = found._repr_html_()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert found.findings[0].slug in page


def test_control_characters_of_the_log_do_not_reach_the_terminal() -> None:
    line = "epoch: 1 step: {}, loss is {} \x1b]0;title\x07 \x9b31m\u202e"
    found = diagnose(io.BytesIO("\n".join(line.format(i, "nan" if i > 9 else 2.0) for i in range(1, 30)).encode()))
    assert all(c.isprintable() or c == "\n" for c in str(found))


def test_findings_are_folded_under_their_cause() -> None:
    def finding(slug: str, severity: str = "error", explains: tuple[str, ...] = ()) -> Finding:
        return Finding(
            slug, f"{slug} happened.", severity, "high", "", 1, 2, "", (Evidence("x"),), "", explains=explains
        )  # type: ignore[arg-type]

    folded = fold(
        (
            finding("cause", explains=("effect", "detail")),
            finding("effect"),
            finding("other"),
            finding("detail", "note"),
        )
    )
    assert [f.slug for f in folded] == ["cause", "other"]
    assert folded[0].consequences == ("effect: effect happened.",)


def test_sparkline() -> None:
    assert sparkline([0.0, 7.0, None, math.nan, 3.6]) == "▁█ ×▅"
    assert sparkline([2.0, 2.0]) == "▁▁"
    assert sparkline([]) == ""


# --- sources ---------------------------------------------------------------------------------------------------------


def test_paths_and_compressed_files(tmp_path: Path) -> None:
    plain, packed = tmp_path / "a.log", tmp_path / "a.log.gz"
    plain.write_bytes(nan_log())
    packed.write_bytes(gzip.compress(nan_log()))
    one, two = diagnose(plain), diagnose(str(packed))
    assert one.findings == two.findings
    assert one.source == str(plain)


def test_standard_input_and_exit_of_a_process() -> None:
    code = "from ampdebug._diagnose import diagnose; print(diagnose('-').findings[0].slug)"
    out = subprocess.run([sys.executable, "-c", code], input=nan_log(), capture_output=True, check=True)
    assert out.stdout.strip() == b"nan-permanent-params-corrupted"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "holds no line of a training step"),
        (b"saving checkpoint to out/a.ckpt\nlayout unknown: 1 2.3\n", "holds no line of a training step"),
        (b"hello\nworld\n", r"2 lines were read.*pattern="),
    ],
)
def test_nothing_to_judge_is_an_error_with_a_way_out(content: bytes, message: str) -> None:
    with pytest.raises(FormatError, match=message):
        diagnose(io.BytesIO(content))


def test_wrong_sources(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read the log"):
        diagnose(tmp_path / "missing.log")
    with pytest.raises(FormatError, match="holds neither a recorded run"):
        diagnose(tmp_path)
    with pytest.raises(ArgumentError, match="give a path, '-', an open file, a Trace or a run"):
        diagnose(3)


def test_it_starts_quickly_and_without_numpy_or_a_framework() -> None:
    code = (
        "import sys\nfrom ampdebug._diagnose import diagnose\nimport io\ndiagnose(io.BytesIO(b'epoch: 1 step: 1, loss "
        "is 2.0'))\nbad = {'numpy', 'mindspore', 'sqlite3'} & set(sys.modules)\nassert not bad, bad"
    )
    # Coverage, where it measures child processes, loads what this test looks for.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COV")}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)


def slugs_in_code() -> set[str]:
    """First argument of each Finding, Verdict and comparison note; a name stands for the strings assigned to it."""
    found: set[str] = set()
    for path in RULE_FILES:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", "") in ("Finding", "Verdict", "_note")
                and node.args
            ):
                found |= {
                    n.value for n in ast.walk(node.args[0]) if isinstance(n, ast.Constant) and isinstance(n.value, str)
                }
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("slug", "(slug, what)"):
                first = node.value.elts[0] if isinstance(node.value, ast.Tuple) else node.value
                found |= {n.value for n in ast.walk(first) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    return found


def test_every_slug_is_documented() -> None:
    found = slugs_in_code()
    assert len(found) > 40
    assert "scale-oscillates-window-too-short" in found
    manual = (ROOT / "docs" / "diagnose.md").read_text(encoding="utf-8")
    assert sorted(slug for slug in found if f"`{slug}`" not in manual) == []


def test_what_a_finding_explains_exists() -> None:
    known = slugs_in_code()
    for path in RULE_FILES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]).endswith("_EXPLAINS"):
                names = {n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)}
                assert names <= known, (path.name, names - known)


def test_a_diagnosis_is_frozen() -> None:
    found = diagnose(io.BytesIO(nan_log()))
    assert isinstance(found, Diagnosis)
    with pytest.raises(AttributeError):
        found.source = "x"  # type: ignore[misc]
