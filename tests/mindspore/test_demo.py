"""`make demo` and the README: what they promise is what they do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import ampdebug

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
GOLDEN = (ROOT / "tests" / "golden" / "readme_report.txt").read_text(encoding="utf-8").rstrip("\n")
SOFTMAX = "attention.softmax (HandWrittenSoftmax)"

pytest.importorskip("sklearn", reason="the demo needs scikit-learn: pip install 'ampdebug[demo]'")


def run(script: str, folder: Path, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / script), *arguments],
        cwd=folder,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "Warning" not in done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder and the output of a shorter demo: the softmax overflows in step 102 here."""
    folder = tmp_path_factory.mktemp("demo")
    return folder, run("digits_o2.py", folder, "--steps", "150")


def test_the_output_tells_the_story(demo: tuple[Path, str]) -> None:
    _, output = demo
    at_o2, rest = output.split("\n2. The same training at O0")
    at_o0 = rest.split("\n3. Which operators must stay in float32")[0]
    assert "<- the first loss that is not finite" in at_o2
    assert "update skipped" in at_o2
    table = at_o2[at_o2.index("cell or parameter") :].splitlines()
    assert table[2].startswith(SOFTMAX)
    assert "Healthy: none of " in at_o0
    assert "nan" not in at_o0
    assert "-m tensorboard.main --logdir runs/digits\n" in output
    assert re.search(r"right on 9\d\.\d% of the pictures", at_o0)


def test_the_bisection_names_the_lines_and_the_patch_fixes_them(demo: tuple[Path, str]) -> None:
    folder, output = demo
    search, fixed = output.split("\n3. Which operators must stay in float32")[1].split("\n4. Level O2 again")
    source = (ROOT / "examples/digits_o2.py").read_text(encoding="utf-8").splitlines()
    for operator, line in (("Exp", "weights = ops.exp(scores)"), ("/", "return weights / weights.sum(-1")):
        number = next(n for n, text in enumerate(source, 1) if text.strip().startswith(line))
        assert re.search(rf"\n\d+ +{operator} +attention.softmax +digits_o2.py:{number} +{re.escape(line)}", search)
    assert "The patch, verified: " in search
    assert "in graph mode, O2 alone nan" in search
    assert "+        weights = _float32(lambda: ops.exp(scores.astype(ms.float32)))" in search
    assert re.search(r"right on 9\d\.\d% of the pictures", fixed)
    with ampdebug.open_run(folder / "runs/digits/O2-patched") as run:
        steps = list(run.steps())
        assert len(steps) == 150
        assert all(np.isfinite(step.loss) and step.forward_birth is None for step in steps)
        assert steps[-1].loss_scale >= 2.0**15
    with ampdebug.open_run(folder / "runs/digits/O2") as run:
        assert [len(result["culprits"]) for result in run.results("bisect")] == [2]


def test_the_records_agree(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    with ampdebug.open_run(folder / "runs/digits/O2") as run:
        steps = list(run.steps())
        assert run.meta["amp_level"] == "O2"
        bad = [step for step in steps if not np.isfinite(step.loss)]
        assert bad
        for step in bad:
            assert step.forward_birth is not None
            assert (step.forward_birth.path, step.forward_birth.dtype) == ("attention.softmax", "float16")
            assert step.forward_birth.inputs_finite is True
            assert step.update_skipped is True
            assert step.loss_scale_after == max(1.0, step.loss_scale / 2)
    with ampdebug.open_run(folder / "runs/digits/O0") as run:
        steps = list(run.steps())
        assert len(steps) == 150
        assert all(step.forward_birth is None and step.backward_birth is None for step in steps)
    for level in ("O0", "O2", "O2-patched"):
        assert list((folder / "runs/digits" / level / "tensorboard").glob("events.out.tfevents.*"))


def test_it_can_be_run_again_and_elsewhere(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    before = (folder / "runs/digits/O2/ampdebug-rank0.sqlite").read_bytes()
    assert "--logdir runs/digits-2\n" in run("digits_o2.py", folder, "--steps", "2", "--pynative")
    assert (folder / "runs/digits-2/O0/ampdebug-rank0.sqlite").is_file()
    assert (folder / "runs/digits/O2/ampdebug-rank0.sqlite").read_bytes() == before
    assert "--logdir elsewhere/x\n" in run("digits_o2.py", folder, "--steps", "1", "--out", "elsewhere/x")


@pytest.mark.parametrize("script", ["model_train.py", "train_cell.py"])
def test_the_small_examples(script: str, tmp_path: Path) -> None:
    output = run(script, tmp_path)
    assert "Healthy: none of " in output
    assert "loss scale  " in output
    (out,) = (tmp_path / "runs").iterdir()
    with ampdebug.open_run(out) as recorded:
        assert recorded.step_count == (56 if script == "model_train.py" else 60)


def test_the_readme_shows_the_golden_report() -> None:
    assert f"```\n{GOLDEN}\n```" in README


def shape(report: str) -> tuple[list[str], list[str], list[str]]:
    """Of a report: its columns, what the first line of the table is about, and the labels of the summary."""
    table, summary = report[report.index("cell or parameter") :].split("\n\n")
    lines = table.splitlines()
    labels = [line.split("  ")[0] for line in summary.splitlines() if not line.startswith(" ")]
    return re.split(r"  +", lines[0].strip()), re.split(r"  +", lines[2])[:3], labels


def test_the_golden_report_is_what_the_demo_shows(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    with ampdebug.open_run(folder / "runs/digits/O2") as recorded:
        now = str(ampdebug.build_report(recorded))
    assert shape(now) == shape(GOLDEN)
    # word for word but for the numbers, in the one line that matters most
    forward = [re.sub(r"\d+", "N", text[text.index("\nforward ") :].split("(and in")[0]) for text in (now, GOLDEN)]
    assert forward[0] == forward[1]
    assert f"N NaN in {SOFTMAX}, output, inputs finite" in forward[0]


def test_every_link_and_command_in_the_readme_is_there() -> None:
    for target in re.findall(r"\]\((?!http)([^)#]+)", README):
        assert (ROOT / target).exists(), target
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for name in re.findall(r"^make (\w+)", README, re.MULTILINE):
        assert f"\n{name}:" in makefile
    for name in re.findall(r"ampdebug\.(\w+)\(", README):
        assert name in ampdebug.__all__


def test_the_reader_in_the_format_docs_reads_a_run(demo: tuple[Path, str]) -> None:
    folder, _ = demo
    text = (ROOT / "docs" / "run-format.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder / "runs/digits/O2",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    with ampdebug.open_run(folder / "runs/digits/O2") as recorded:
        assert done.stdout == f"{recorded.tensors(1).rows['max'].tolist()}\n"
