"""How fast logs are read: matching lines a second of every format, and megabytes a second of a log that mostly does
not match.

Run ``python benchmarks/logs.py [--lines N] [--megabytes N] [NAME ...]``; names are formats, ``foreign`` is the log of
other lines. The logs are made of the sample lines of the table of formats: the fields move as in a training, and so do
times, bars and all numbers with decimals between them. Each rate is the best of some, in CPU seconds of this process
(and of ``grep -c`` over the same files, for the ratio), so that other work on the machine counts little.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from ampdebug.logs import FORMATS, GENERIC, LogFormat, read_log
from ampdebug.logs._keys import meaning

LENGTH = 5000
"""Steps in an epoch."""

# Layouts without a row of their own in the table, or with more lines than one: (name, format, lines of one step).
EXTRA = (
    (
        "mindformers + bar",
        "mindformers",
        "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO - { Epoch:[  1/  2], "
        "step:[   12/  500], loss: 10.618, per_step_time: 2510ms, lr: 9.5e-06, overflow cond: False, loss_scale: "
        "65536.0, global_norm: [1.4355]\n2024-08-19 14:03:22,119 - mindformers[mindformers/core/callback/callback.py:"
        "485] - INFO -    2.4% |█         | 12.50000 samples/s/p  0:20:47 }",
    ),
    (
        "mindyolo + time",
        "mindyolo",
        "2024-03-05 09:33:51,054 [INFO] Epoch 2/30, Step 600/1600, imgsize (640, 640), loss: 0.2151, lbox: 0.0711, "
        "lobj: 0.1021, lcls: 0.0419, cur_lr: 0.0954166650772095\n2024-03-05 09:33:51,058 [INFO] Epoch 2/30, Step "
        "600/1600, step time: 626.57 ms",
    ),
    (
        "generic of ranks",
        "generic",
        "\n".join(
            f"[rank{rank}]:2024-10-09 12:00:00,123 - root - INFO - step: 120  loss:  2.3117  grad_norm:  1.3312  "
            "loss_scale: 65536  memory: 40.20GiB(42.30%)  tps: 3,456  mfu: 38.90%"
            for rank in (2, 0, 3, 1)
        ),
    ),
    ("table", "table", "1,0.0001,120,2.31171,65536,1.3312,"),
    ("trainer_state.json", "json-lines", ""),
)
HEADER = "epoch,lr-SGD,step,train_loss,loss_scale,grad_norm,val_loss\n"

_NUMBER = re.compile(r"-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\b(?:nan|NaN|True|False|true|false)\b")
_KEY = re.compile(r"((?:[A-Za-z_]\w*[ /])?([A-Za-z_]\w*))['\"]?(?:: ?|=| )\s*['\"]?(?:tensor\(|\[)?$")


def spans(row: LogFormat | None, sample: str) -> dict[tuple[int, int], str]:
    """Where the fields stand in a sample, found by the table itself or, for its catch-all rows, by the keys."""
    found: dict[tuple[int, int], str] = {}
    data = sample.encode()

    def place(begin: int, end: int) -> tuple[int, int]:
        return len(data[:begin].decode()), len(data[:end].decode())

    if row is not None and type(row) is LogFormat:
        for match in row.pattern.finditer(data):
            found.update({place(*match.span(name)): name for name in match.groupdict() if match.start(name) >= 0})
        if row.pairs is not None:
            for match in row.pairs.finditer(data):
                field = row.keys.get(match.group(1).strip())
                if field is not None and field not in found.values():
                    found[place(*match.span(2))] = field
        return found
    for match in _NUMBER.finditer(sample):
        before = _KEY.search(sample, 0, match.start())
        known = (meaning(before.group(1)) or meaning(before.group(2))) if before is not None else None
        name = known[0] if known is not None else ""
        if sample[match.end() : match.end() + 1] == "/" and name in ("step", "iter"):
            name = "epoch_step"
        elif sample[: match.start()].endswith("/") and "epoch_step" in found.values():
            name = "epoch_steps"
        elif name == "iter":
            name = "epoch_step" if '"mode"' in sample else "step"
        if name not in ("", "rank"):
            found[match.span()] = name
    return found


def like(sample: str, value: float) -> str:
    """A number printed as the sample prints its own."""
    mantissa, exponent, _ = sample.lower().partition("e")
    decimals = len(mantissa.partition(".")[2]) if "." in mantissa else 4 if sample.lower() == "nan" else 0
    if exponent:
        text = f"{value:.{decimals}e}"
        return text.upper() if "E" in sample else text
    if decimals > 12:
        return repr(value)
    return f"{value:.{decimals}f}" if decimals or sample.lower() == "nan" else f"{value:.0f}"


def parts(row: LogFormat | None, sample: str) -> list[str | tuple[str, str]]:
    """A sample cut into fixed text and ``(field, text in the sample)``."""
    cuts = spans(row, sample)
    for match in re.finditer(r"\b\d+%\|[^|]*\|", sample):
        cuts[match.span()] = "bar"
    for match in re.finditer(r"\d+:\d\d(?::\d\d)?(?:,\d+)?|\d+\.\d+(?:[eE][-+]\d+)?", sample):
        if not any(begin < match.end() and match.start() < end for begin, end in cuts):
            cuts[match.span()] = "clock" if ":" in match.group() else "number"
    out: list[str | tuple[str, str]] = []
    at = 0
    for (begin, end), name in sorted(cuts.items()):
        if name in ("epoch_step", "step"):
            while sample[begin - 1 : begin] == " " and sample[begin - 2 : begin - 1] in (" ", "["):
                begin -= 1
        out += [sample[at:begin], (name, sample[begin:end])]
        at = end
    return [*out, sample[at:]]


class Training:
    """The values of one step after the other."""

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.rng = random.Random(1)
        self.step = 0

    def text(self, name: str, sample: str) -> str:
        """What is printed in the place of ``sample``."""
        step, rng = self.step, self.rng
        width = len(sample) if sample[:1] == " " else 0  # a padded column
        if name in ("step", "optimizer_step"):
            return str(step).rjust(width)
        if name == "epoch_step":
            return str((step - 1) % LENGTH + 1).rjust(width)
        if name == "epoch_steps":
            return str(LENGTH)
        if name == "epoch":
            return str((step - 1) // LENGTH + 1) if "." not in sample else f"{step / LENGTH:.2f}"
        if name == "loss":
            return like(sample, 7 - 5 * step / self.steps + rng.gauss(0, 0.05))
        if name == "grad_norm":
            return like(sample, 1 + rng.random() if sample.lower() == "nan" else float(sample) * (0.5 + rng.random()))
        if name == "lr":
            return like(sample, float(sample) * (1.2 - step / self.steps))
        if name == "overflow":
            if sample in ("1.0", "0.0"):
                return "1.0" if step % 1000 == 0 else "0.0"
            return str(step % 1000 == 0) if sample[0] in "TF" else str(step % 1000 == 0).lower()
        if name == "bar":
            share = (step - 1) % LENGTH / LENGTH
            cells = len(sample) - sample.index("|") - 2
            eighths = int(8 * cells * share)
            bar = "█" * (eighths // 8) + ("", *"▏▎▍▌▋▊▉")[eighths % 8]
            return f"{int(100 * share)}%|{bar:<{cells}}|"
        if name == "clock":
            return re.sub(r"\d\d", lambda pair: f"{rng.randrange(60):02d}", sample)
        if name == "number":
            return like(sample, float(sample) * (0.7 + 0.7 * rng.random()))
        return {"finite": "True", "skipped": sample, "nan_losses": sample}.get(name, sample)


def log_of(row: LogFormat | None, sample: str, lines: int) -> bytes:
    """A log of a format, some lines long, one step for every copy of ``sample``."""
    cut = parts(row, sample)
    each = sample.count("\n") + 1
    training = Training(lines // each)
    out = []
    for _ in range(lines // each):
        training.step += 1
        out.append("".join(part if isinstance(part, str) else training.text(*part) for part in cut))
    return ("\n".join(out) + "\n").encode()


def document(lines: int) -> bytes:
    """A ``trainer_state.json`` as the Hugging Face Trainer leaves it."""
    training = Training(lines // 7)
    history = []
    for _ in range(lines // 7):
        training.step += 1
        history.append(
            {
                "epoch": training.step / LENGTH,
                "grad_norm": float(training.text("grad_norm", "2.3141672611236572")),
                "learning_rate": float(training.text("lr", "0.000153")),
                "loss": float(training.text("loss", "1.9007")),
                "step": training.step,
            }
        )
    return json.dumps({"best_metric": None, "log_history": history, "max_steps": lines}, indent=2).encode()


def foreign(megabytes: int) -> bytes:
    """Lines of other origin with a step line every 2,000 of them."""
    rng = random.Random(2)
    words = ["tensor", "shape", "worker", "kernel", "compile", "graph", "cache", "dataset", "queue", "host", "device"]
    block = []
    size = 0
    while size < megabytes << 20:
        if len(block) % 2000 == 0:
            line = f"epoch: 1 step: {len(block) + 1}, loss is 2.{rng.randrange(1000, 9999)}\n"
        else:
            line = (
                f"[INFO] 2024-01-01 10:00:00 [{rng.choice(words)}.cc:{rng.randrange(999)}] "
                + " ".join(rng.choices(words, k=14))
                + "\n"
            )
        block.append(line)
        size += len(line)
    return "".join(block).encode()


def layouts() -> Iterator[tuple[str, str, Callable[[int], bytes]]]:
    """``(name, format, make)`` of every layout."""
    for row in (*FORMATS, GENERIC):
        for place, sample in enumerate(row.sample):
            name = row.name if len(row.sample) == 1 else f"{row.name} {place + 1}"
            yield name, row.name, lambda lines, row=row, sample=sample: log_of(row, sample, lines)  # type: ignore[misc]
    by_name = {row.name: row for row in FORMATS}
    for name, kind, sample in EXTRA:
        if not sample:
            yield name, kind, document
        elif kind == "table":
            columns = HEADER.strip().split(",")
            row = LogFormat("", "", b",", re.compile(_columns(sample, columns).encode()), ())
            yield name, kind, lambda lines, row=row, sample=sample: HEADER.encode() + log_of(row, sample, lines)  # type: ignore[misc]
        else:
            yield name, kind, lambda lines, kind=kind, sample=sample: log_of(by_name.get(kind), sample, lines)  # type: ignore[misc]


def _columns(sample: str, columns: list[str]) -> str:
    cells = []
    for cell, column in zip(sample.split(","), columns, strict=True):
        known = meaning(column)
        cells.append(f"(?P<{known[0]}>{re.escape(cell)})" if known is not None else re.escape(cell))
    return ",".join(cells)


def best(path: Path, repeat: int) -> tuple[float, dict[str, int]]:
    """CPU seconds to read a log, the best of some, and the lines of each format."""
    times = []
    for _ in range(repeat):
        begin = time.process_time()
        _, coverage = read_log(path)
        times.append(time.process_time() - begin)
    return min(times), coverage.formats


def grep(path: Path) -> float:
    """CPU seconds that ``grep -c loss`` takes, or NaN where there is no grep."""
    if shutil.which("grep") is None:
        return float("nan")
    times = []
    for _ in range(3):
        before = os.times()
        subprocess.run(["grep", "-c", "loss", str(path)], check=False, capture_output=True)
        after = os.times()
        spent = after.children_user + after.children_system - before.children_user - before.children_system
        times.append(max(spent, 0.01))  # the clock's own step
    return min(times)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", help="formats, or foreign; all without any")
    parser.add_argument("--lines", type=int, default=300_000)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--repeat", type=int, default=2)
    arguments = parser.parse_args()
    names = set(arguments.names)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "train.log")
        for name, kind, make in layouts():
            if names and not names & {name, kind}:
                continue
            path.write_bytes(make(arguments.lines))
            lines = path.read_bytes().count(b"\n")
            (seconds, formats), reference = best(path, arguments.repeat), grep(path)
            other = "" if formats.keys() == {kind} else f"  read as {formats}"
            ratio = f"{seconds / reference:8.1f} x the CPU time of grep -c"
            print(f"{name:22} {lines / seconds:12,.0f} lines/s  {ratio}{other}", flush=True)
        if not names or "foreign" in names:
            path.write_bytes(foreign(arguments.megabytes))
            size = path.stat().st_size / 1e6
            (seconds, _), reference = best(path, arguments.repeat), grep(path)
            ratio = f"{seconds / reference:8.1f} x the CPU time of grep -c"
            print(f"{'foreign lines':22} {size / seconds:12,.0f} MB/s     {ratio}")


if __name__ == "__main__":
    main()
