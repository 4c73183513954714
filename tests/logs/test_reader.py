"""The reader: blocks, encodings, damage, step numbers, ranks, and bounded memory."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import math
import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import pytest

from ampdebug._errors import ArgumentError, FormatError
from ampdebug.logs import read_log
from ampdebug.logs._source import BLOCK, LINE_LIMIT, Source
from ampdebug.rules import History


def plain(step: int, loss: float = 2.0) -> str:
    return f"epoch: 1 step: {step}, loss is {loss}"


def text(lines: list[str], newline: str = "\n") -> bytes:
    return (newline.join(lines) + newline).encode()


def losses(history: History) -> list[tuple[int, float]]:
    return [(r.step.step, r.step.loss or 0.0) for r in history.records]


LINES = [plain(step, 3.0 - step / 100) for step in range(1, 41)]
WANT = [(step, 3.0 - step / 100) for step in range(1, 41)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, lzma.compress])
def test_compressed_logs(tmp_path: Path, pack: object) -> None:
    path = tmp_path / "log"
    path.write_bytes(pack(text(LINES)))  # type: ignore[operator]
    history, coverage = read_log(path)
    assert losses(history) == WANT
    assert coverage.lines == 40
    assert coverage.matched == 40
    assert coverage.damage == ""


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(encoding: str) -> None:
    history, _ = read_log(io.BytesIO(text(LINES).decode().encode(encoding)))
    assert losses(history) == WANT


def test_text_files_are_read() -> None:
    history, _ = read_log(io.StringIO(text(LINES).decode()))
    assert losses(history) == WANT


@pytest.mark.parametrize("newline", ["\r\n", "\n\n", "\r"])
def test_newlines(newline: str) -> None:
    history, _ = read_log(io.BytesIO(text(LINES, newline)))
    assert losses(history) == WANT


def test_colours_and_binary_junk_do_no_harm() -> None:
    lines = [f"\x1b[32m{line[:9]}\x1b[1;31m{line[9:]}\x1b[0m" for line in LINES]
    data = text(lines) + bytes(range(256)) * 50 + b"\n" + text([plain(41, 1.0)])
    history, _ = read_log(io.BytesIO(data))
    assert losses(history) == [*WANT, (41, 1.0)]


@pytest.mark.parametrize("chunk", [1, 7, 63, 4096])
def test_line_numbers_whatever_the_pieces(chunk: int) -> None:
    data = text(["foreign", *LINES[:3], "", "another\rone", *LINES[3:]])

    class Slow(io.BytesIO):
        def read1(self, size: int | None = -1) -> bytes:
            return super().read(chunk)

    history, coverage = read_log(Slow(data))
    numbered = [(i, line) for i, line in enumerate(data.decode().split("\n"), 1) if line.startswith("epoch")]
    assert [(r.line, r.text.decode()) for r in history.records] == numbered
    assert coverage.lines == data.count(b"\n")


def test_line_numbers_are_the_same_on_both_ways_through_a_block() -> None:
    filler = ["filler of no interest " * 3] * 900
    lines: list[str] = []
    for step in range(1, 60):
        lines += [*filler[: (step * 37) % 300], plain(step)]
    dense = [plain(step) for step in range(60, 8000)]
    data = text(lines + dense + filler * 30 + [plain(8000)])
    history, _ = read_log(io.BytesIO(data))
    by_number = dict(enumerate(data.decode().split("\n"), 1))
    assert len(history.records) == 8000
    assert all(by_number[r.line] == r.text.decode() for r in history.records)


def test_truncated_gz_is_read_to_its_end_and_said(tmp_path: Path) -> None:
    path = tmp_path / "log.gz"
    many = [plain(step, 3.0 + (step * 7919 % 1000) / 1000) for step in range(1, 20_000)]
    packed = gzip.compress(text(many))
    path.write_bytes(packed[: len(packed) * 2 // 3])
    history, coverage = read_log(path)
    assert 1000 < history.totals.logged < 20_000
    assert "breaks off" in coverage.damage


def test_missing_file_and_directory(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="cannot read the log"):
        read_log(tmp_path / "none.log")
    with pytest.raises(FormatError, match="cannot read the log"):
        read_log(tmp_path)


def test_ten_megabytes_without_a_newline_are_not_kept() -> None:
    data = text(LINES[:20]) + b"x" * (10 << 20) + b"\n" + text(LINES[20:])
    tracemalloc.start()
    history, coverage = read_log(io.BytesIO(data))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert losses(history) == WANT
    assert coverage.cut_lines == 1
    assert peak < 40 << 20
    assert history.records[-1].line == 41


def test_a_long_bar_keeps_its_pieces() -> None:
    bar = "\r".join(
        f"Steps: 1%|#     | {step}/999999 [00:01<00:02, 5.02s/it, step_loss=0.5]" for step in range(1, 90_000)
    )
    assert len(bar) > 5 << 20
    history, _ = read_log(io.BytesIO(bar.encode() + b"\n"))
    assert history.totals.logged == 89_999


def test_a_line_is_looked_at_no_further_than_the_limit() -> None:
    line = "y" * (LINE_LIMIT + 10) + plain(7)
    history, coverage = read_log(io.BytesIO(text([plain(1), line, plain(2)])))
    assert [r.step.step for r in history.records] == [1, 2]
    assert coverage.cut_lines == 1


def test_source_closes_its_own_file_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(text(LINES))
    with open(path, "rb") as file:
        read_log(file)
        assert not file.closed
    source = Source(path)
    list(source.blocks())
    source.close()
    assert source._raw.closed


def test_memory_is_bounded_however_long_the_log() -> None:
    class Endless(io.RawIOBase):
        """Steps without end, made as they are read."""

        def __init__(self, steps: int) -> None:
            self.lines = self.make(steps)

        def make(self, steps: int) -> Iterator[bytes]:
            for start in range(1, steps, 1000):
                yield b"".join(
                    b"time: 1, epoch: 1, step: %d, loss: 2.5, overflow: %s, loss_scale: 1024.0\n"
                    % (i, b"True" if i % 1000 == 0 else b"False")
                    for i in range(start, start + 1000)
                )

        def read(self, size: int = -1) -> bytes:
            return next(self.lines, b"")

    def peak(steps: int) -> tuple[int, History]:
        tracemalloc.start()
        history, _ = read_log(Endless(steps))  # type: ignore[arg-type]
        top = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return top, history

    _, small = peak(50_000)
    high, large = peak(100_000)
    assert large.totals.logged == 100_000
    assert large.totals.overflows == 100
    assert not large.exact
    assert len(large.records) < 70_000
    assert high < 90 << 20
    overflowed = [r.step.step for r in large.records if r.step.overflow]
    assert overflowed == list(range(1000, 100_001, 1000))
    # The step before each overflow is there too, thinned out or not.
    known = {r.step.step for r in large.records}
    assert all(step - 1 in known for step in overflowed)
    assert small.totals.logged == 50_000


def test_progress_is_called_with_bytes_and_size(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(text([*LINES, "z" * (3 * BLOCK)]))
    seen: list[tuple[int, int | None]] = []
    read_log(path, progress=lambda done, size: seen.append((done, size)))
    assert seen[-1][0] == path.stat().st_size == seen[-1][1]
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# --- step numbers, ranks, restarts ---


def test_epochs_of_unprinted_length_are_learnt() -> None:
    lines = [f"epoch: {epoch} step: {step}, loss is 2.0" for epoch in (1, 2, 3) for step in range(1, 41)]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert [r.step.step for r in history.records] == list(range(1, 121))


def test_steps_counted_from_zero() -> None:
    lines = [f"iter {step}: loss 2.5, time 312.40ms, mfu 31.20%" for step in range(0, 50, 10)]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert [r.step.step for r in history.records] == [1, 11, 21, 31, 41]


def test_overflow_message_belongs_to_the_next_step_or_between() -> None:
    lines = [
        "Epoch 1/30, Step 100/1600, imgsize (640, 640), loss: 3.0, lbox: 1.0, cur_lr: 0.1",
        "overflow, still update, loss scale adjust to 1024.0",
        "Epoch 1/30, Step 200/1600, imgsize (640, 640), loss: 3.0, lbox: 1.0, cur_lr: 0.1",
    ]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert [(r.step.step, r.step.overflow, r.applied) for r in history.records] == [
        (100, None, False),
        (200, True, True),
    ]
    lines = [
        "eta: 1 day, 19:42:40  iter: 160  loss: 2.0 (2.0)  lr: 0.1",
        "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
        "eta: 1 day, 19:42:40  iter: 180  loss: 2.0 (2.0)  lr: 0.1",
    ]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert [(r.step.step, r.between) for r in history.records] == [(160, False), (160, True), (180, False)]
    assert history.records[1].step.loss_scale_after == 32768.0


def test_messages_of_several_processes_are_one_event() -> None:
    message = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}"
    lines = []
    for place, scale in enumerate((32768.0, 16384.0, 8192.0, 4096.0), 1):
        lines += [message.format(scale)] * 4 + [f"eta: 1:00:00  iter: {place * 20}  loss: 2.0 (2.0)  lr: 0.1"]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert history.totals.overflows == 4
    assert [r.step.loss_scale_after for r in history.records if r.between] == [32768.0, 16384.0, 8192.0, 4096.0]


def test_equal_messages_of_one_process_are_several_events() -> None:
    message = "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {}"
    lines = []
    for place, run in enumerate((1, 2, 1, 3, 1), 1):
        lines += [message.format(65536.0 if place % 2 else 32768.0)] * run
        lines += [f"eta: 1:00:00  iter: {place * 20}  loss: 2.0 (2.0)  lr: 0.1"]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert history.totals.overflows == 8


def test_interleaved_ranks_are_one_run() -> None:
    lines = [
        f"2025-02-20 00:46:13 DEBUG TRAIN Batch 0/{step} loss {2 + rank} lr 0.1 grad_norm 1.0 rank {rank}"
        for step in range(0, 500, 100)
        for rank in (2, 0, 1)
    ]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert [(r.step.step, r.step.loss) for r in history.records] == [(s + 1, 4.0) for s in range(0, 500, 100)]


def test_ranks_that_print_no_rank() -> None:
    lines = [line for line in LINES for _ in range(8)]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert losses(history) == WANT


def test_a_bar_drawn_again_counts_once_with_its_last_value() -> None:
    def bar(step: int, loss: float) -> str:
        return f"Steps:  25%|█    | {step}/2000 [00:05<2:01:07,  5.02s/it, lr=1e-5, step_loss={loss}]"

    history, _ = read_log(io.BytesIO("\r".join([bar(1, 0.9), bar(1, 0.5), bar(2, 0.4)]).encode()))
    assert losses(history) == [(1, 0.5), (2, 0.4)]


def test_a_bar_at_zero_is_no_step() -> None:
    bar = "Steps: {:3d}%|####| {}/100 [00:05<2:01:07,  5.02s/it, lr=1e-5, step_loss={}]"
    text = "".join("\r" + bar.format(step, step, 0.5 - step / 1000) for step in range(3))
    history, _ = read_log(io.BytesIO(text.encode()))
    assert [record.step.step for record in history.records] == [1, 2]


def test_a_configuration_as_json_and_then_the_training() -> None:
    config = '{\n  "loss_scale": "dynamic",\n  "steps": 1000\n}\n'
    lines = "".join(f"[{step}/1000] loss={4 - step / 100} lr=1e-4\n" for step in range(1, 30))
    history, _ = read_log(io.BytesIO((config + lines).encode()))
    assert [record.step.step for record in history.records] == list(range(1, 30))
    assert history.records[0].line == 5
    several = "".join(f'{{\n  "step": {step},\n  "loss": 2.5\n}}\n' for step in range(1, 30))
    history, _ = read_log(io.BytesIO(several.encode()))
    assert [record.step.step for record in history.records] == list(range(1, 30))


def test_a_message_on_the_line_of_a_bar() -> None:
    line = (
        "Steps:  25%|█    | 501/2000 [00:05<2:01:07,  5.02s/it, lr=1e-5, step_loss=0.5][2023-04-28 06:51:29,903] "
        "[INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768"
    )
    history, _ = read_log(io.BytesIO(text([line])))
    assert sorted((r.between, r.step.overflow) for r in history.records) == [(False, None), (True, True)]


def test_a_restart_is_a_new_segment() -> None:
    again = [*LINES, *[plain(step, 1.0) for step in range(21, 61)]]
    history, _ = read_log(io.BytesIO(text(again)))
    assert [r.segment for r in history.records] == [0] * 40 + [1] * 40


def test_mixed_formats_in_one_file() -> None:
    lines = [
        "{'loss': 1.9, 'grad_norm': 2.3, 'learning_rate': 1.5e-07, 'epoch': 0.02}",
        "[2023-04-28 06:51:29,903] [INFO] [deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, "
        "reducing to 32768",
        "{'loss': 1.8, 'grad_norm': 2.3, 'learning_rate': 1.5e-07, 'epoch': 0.03}",
    ]
    history, coverage = read_log(io.BytesIO(text(lines)))
    assert [r.step.loss for r in history.records] == [1.9, None, 1.8]
    assert history.totals.overflows == 1
    assert coverage.formats == {"hf-trainer": 2}


def test_generic_lines_are_not_read_beside_a_known_format() -> None:
    lines = [*LINES[:10], "summary: step 3 loss 99.0", *LINES[10:]]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert losses(history) == WANT


# --- choosing a format ---


def test_format_forces_one() -> None:
    data = text([*LINES, "iter 120: loss 3.2145, time 312.40ms, mfu 31.20%"])
    history, coverage = read_log(io.BytesIO(data), format="nanogpt")
    assert coverage.formats == {"nanogpt": 1}
    assert len(history.records) == 1


def test_unknown_format_lists_all() -> None:
    with pytest.raises(ArgumentError, match=r"format='nope' is not a known log format; choose one of .*mindcv"):
        read_log(io.BytesIO(b""), format="nope")
    with pytest.raises(ArgumentError, match="exclude each other"):
        read_log(io.BytesIO(b""), format="mindcv", pattern="(?P<loss>x)")


def test_user_pattern() -> None:
    data = text(
        [f"<{step}> L={4.0 - step:.2f} S={2**step} O={'True' if step == 3 else 'False'}" for step in range(1, 5)]
    )
    pattern = r"<(?P<step>\d+)> L=(?P<loss>\S+) S=(?P<scale>\d+) O=(?P<overflow>\w+)"
    history, coverage = read_log(io.BytesIO(data), pattern=pattern)
    assert [(r.step.step, r.step.loss, r.scale, r.step.overflow) for r in history.records] == [
        (1, 3.0, 2.0, False),
        (2, 2.0, 4.0, False),
        (3, 1.0, 8.0, True),
        (4, 0.0, 16.0, False),
    ]
    assert coverage.formats == {"pattern": 4}


def test_a_rounded_scale_is_the_same_scale() -> None:
    lines = [
        "NOTE: gradient overflow detected, ignoring gradient, setting loss scale to: 1048576.0",
        "epoch 001:     20 / 3680 loss=6.019, num_updates=19, lr=0.0004, gnorm=0.6, loss_scale=1.04858e+06, wall=8",
        "epoch 001:     40 / 3680 loss=6.019, num_updates=39, lr=0.0004, gnorm=0.6, loss_scale=1000, wall=8",
    ]
    history, _ = read_log(io.BytesIO(text(lines)))
    assert [r.scale for r in history.records] == [2.0**20, 2.0**20, 1000.0]


def test_nan_of_every_spelling() -> None:
    for spelling in ("nan", "NaN", "-nan", "inf", "-inf", "Infinity"):
        history, _ = read_log(io.BytesIO(text([plain(1), f"epoch: 1 step: 2, loss is {spelling}"])))
        loss = history.records[1].step.loss
        assert loss is not None
        assert not math.isfinite(loss), spelling
