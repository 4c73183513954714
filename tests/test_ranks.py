"""Directories of per-rank logs: whose file is which, what is said once, and what differs between ranks."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

import ampdebug
from ampdebug import FormatError
from ampdebug._ranks import rank_of, read_directory


def line(step: int, loss: float, *, scale: float = 65536.0, overflow: bool = False, norm: float = 1.2) -> str:
    return (
        "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO - { Epoch:[  1/  2], "
        f"step:[{step:5d}/  900], loss: {loss:.3f}, per_step_time: 2510ms, lr: 9.5e-06, overflow cond: {overflow}, "
        f"loss_scale: {scale}, global_norm: [{norm}]"
    )


def healthy(steps: int = 200, *, shift: float = 0.0) -> list[str]:
    return [line(s, 7.0 - 0.01 * s + shift + 0.03 * (s % 3)) for s in range(1, steps + 1)]


def write(folder: Path, layout: str, logs: dict[int, list[str]]) -> None:
    for rank, lines in logs.items():
        path = folder / layout.format(rank=rank)
        path.parent.mkdir(parents=True, exist_ok=True)
        data = ("\n".join(lines) + "\n").encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


LAYOUTS = (
    "worker_{rank}.log",
    "log_{rank}.txt",
    "rank_{rank}/info.log",
    "attempt_0/{rank}/stdout.log",
    "train_parallel{rank}/log.txt",
    "device{rank}/train.log.gz",
    "output/log/rank_{rank}/mindformer.log",
    "LOG{rank}/log",
    "slurm_{rank}.out",
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_of_launchers(layout: str, tmp_path: Path) -> None:
    write(tmp_path, layout, {rank: healthy(60, shift=0.01 * rank) for rank in range(4)})
    (tmp_path / "scheduler.log").write_text("[INFO] scheduler is up\n")
    (tmp_path / "model.ckpt").write_bytes(b"\x00" * 100)
    found = ampdebug.diagnose(tmp_path)
    assert found.ok, str(found)
    assert "4 ranks" in found.looked_at[0]
    assert "2 other files passed over" in found.looked_at[0]


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("worker_12.log", 12),
        ("attempt_0/3/stderr.log", 3),
        ("rank_7/log_0.txt", 7),
        ("log_2024-08-19.txt", None),
        ("train.log", None),
        ("stdout.5", 5),
    ],
)
def test_rank_of_a_path(path: str, rank: int | None) -> None:
    assert rank_of(Path(path)) == rank


def test_one_fault_in_all_ranks_is_one_finding(tmp_path: Path) -> None:
    broken = [
        *healthy(100),
        *(line(s, float("nan"), scale=65536 / 2 ** (s - 101), overflow=True) for s in range(101, 117)),
    ]
    write(tmp_path, "worker_{rank}.log", dict.fromkeys(range(8), broken))
    found = ampdebug.diagnose(tmp_path)
    loud = [f for f in found.findings if f.severity != "note"]
    assert [f.slug for f in loud] == ["loss-nan-before-scale-moved"]
    assert any("ranks 1, 2, 3, 4, 5, 6, 7" in sentence for sentence in loud[0].consequences)
    assert {e.file for e in loud[0].evidence if e.line} == {"worker_0.log"}
    assert "worker_0.log:101:" in str(found)
    json.dumps(found.to_dict(), allow_nan=False)


def test_scales_that_differ(tmp_path: Path) -> None:
    logs = {rank: healthy(200) for rank in range(4)}
    logs[2] = [line(s, 7.0 - 0.01 * s, scale=65536.0 if s < 80 else 32768.0, overflow=s == 80) for s in range(1, 201)]
    write(tmp_path, "rank_{rank}/train.log", logs)
    found = ampdebug.diagnose(tmp_path)
    assert found.findings[0].slug == "loss-scale-not-synchronised", str(found)
    assert found.findings[0].first_step == 80
    shown = {(e.file, e.line) for e in found.findings[0].evidence if e.line}
    assert shown == {("rank_0/train.log", 80), ("rank_2/train.log", 80)}


@pytest.mark.parametrize("others_follow", [True, False])
def test_nan_that_begins_on_one_rank(others_follow: bool, tmp_path: Path) -> None:
    def log(begin: int) -> list[str]:
        return [line(s, float("nan") if s >= begin else 7 - 0.01 * s, scale=1.0) for s in range(1, 151)]

    write(tmp_path, "log_{rank}.txt", {r: log(90 if r == 3 else 95 if others_follow else 999) for r in range(4)})
    found = ampdebug.diagnose(tmp_path)
    by_slug = {f.slug: f for f in found.findings}
    spread = by_slug["nan-begins-on-one-rank"]
    assert (spread.where, spread.first_step) == ("rank 3", 90)
    assert spread.severity == ("warning" if others_follow else "error")
    assert any(e.file == "log_3.txt" and e.line == 90 for e in spread.evidence)
    assert ("followed at step 95" in spread.sentence) is others_follow
    assert found.findings[0].slug == "nan-updates-not-skipped", str(found)


def test_nan_in_all_ranks_at_once_is_no_matter_of_ranks(tmp_path: Path) -> None:
    logs = [line(s, float("nan") if s >= 90 else 7 - 0.01 * s, scale=1.0) for s in range(1, 151)]
    write(tmp_path, "log_{rank}.txt", dict.fromkeys(range(4), logs))
    assert "nan-begins-on-one-rank" not in [f.slug for f in ampdebug.diagnose(tmp_path).findings]


def test_a_single_log_among_other_files(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("\n".join(healthy(50)))
    (tmp_path / "config.yaml").write_text("loss: 1")
    (tmp_path / "requirements.txt").write_text("numpy")
    found = ampdebug.diagnose(tmp_path)
    assert found.ok
    assert "1 rank (train.log); 2 other files passed over." in found.looked_at[0]


def test_attempts_are_no_ranks(tmp_path: Path) -> None:
    first = [line(s, 7.0, scale=1024.0) for s in range(1, 40)]
    write(tmp_path, "try_{rank}.log", {1: first, 2: healthy(50)})
    found = ampdebug.diagnose(tmp_path)
    assert found.ok, str(found)
    assert "1 rank (try_2.log)" in found.looked_at[0]


def test_nodes_with_the_same_names_are_all_read(tmp_path: Path) -> None:
    for node in range(2):
        write(tmp_path / f"node_{node}", "worker_{rank}.log", {rank: healthy(30) for rank in range(2)})
    assert [log.rank for log in read_directory(tmp_path).logs] == [0, 1, 2, 3]


def test_a_pipeline_stage_without_a_loss_is_not_the_one_that_is_judged(tmp_path: Path) -> None:
    stage = (
        "time: Thu Mar 02 20:18:00 2023 local_rank: {r}, epoch: 0, step: {s}, loss is {loss}, "
        "overflow is False, loss scale is 1024.0"
    )
    for rank, loss in ((0, "no loss for this stage"), (1, "3.98")):
        path = tmp_path / f"worker_{rank}.log"
        path.write_text("\n".join(stage.format(r=rank, s=s, loss=loss) for s in range(1, 40)))
    assert read_directory(tmp_path).main.rank == 1


def test_a_directory_without_a_log(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "x.bin").write_bytes(b"\x00")
    with pytest.raises(FormatError, match="2 files were looked at"):
        ampdebug.diagnose(tmp_path)
