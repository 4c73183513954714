"""Lines that say ``key value`` in any notation, and JSON lines: what the keys of hand-written loops and tools mean.

One dictionary of spellings serves the catch-all format, JSON lines and the columns of tables.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ampdebug.logs._format import NUMBER, Fields, LogFormat, number, scale_number

GENERIC_LIMIT = 1024
"""Longest line that the catch-all format is tried on."""

_SPELLINGS: dict[str, tuple[str, ...]] = {
    "step": ("global_step", "train_step", "trainer_global_step", "step", "steps", "current_steps", "num_updates"),
    "iter": ("iteration", "training_iteration", "iterations", "iter", "iters", "it", "batch", "batch_idx", "batches"),
    "epoch": ("epoch", "epochs", "ep", "cur_epoch", "train_epoch", "training_epoch"),
    "loss": (
        *("loss", "total_loss", "loss_total", "train_loss", "training_loss", "loss_train", "lm_loss", "step_loss"),
        *("train_loss_step", "loss_step", "batch_loss", "reduced_train_loss", "loss_train_total", "mean_loss"),
        *("avg_loss", "average_loss", "loss_avg", "loss_avg_rank", "running_loss", "avr_loss", "train_loss_epoch"),
    ),
    "scale": (
        *("loss_scale", "scale", "scaler", "grad_scale", "grad_scaler", "gradscaler", "amp_scale", "scaling"),
        *("loss_scaling", "scale_value", "scale_sense", "loss_scaler", "scaler_scale", "dynamic_scale", "lossscale"),
        *("fp16_scale", "fp16_grad_scale", "loss_scale_value", "gradscale", "amp_loss_scale", "scaler_value"),
    ),
    "grad_norm": (
        *("grad_norm", "gradient_norm", "gnorm", "global_norm", "total_norm", "gradnorm", "global_grad_norm"),
        *("grad_l2", "grad_norm_total", "grad_2_0_norm_total", "norm", "grad_norm_before_clip"),
    ),
    "lr": ("lr", "learning_rate", "cur_lr", "lr_0", "current_lr", "lr_adam", "lr_adamw", "lr_sgd", "optim0_lr0"),
    "overflow": (
        *("overflow", "is_overflow", "overflow_cond", "has_overflow", "found_inf", "inf_found", "grad_overflow"),
        *("overflowed", "overflow_flag", "found_nan_inf", "skipped", "skip", "step_skipped"),
    ),
    "finite": ("all_finite", "is_finite", "grads_finite", "finite", "grad_finite", "gradients_finite"),
    "rank": ("rank", "local_rank", "global_rank", "rank_id"),
}
_MEANING: dict[str, tuple[str, int]] = {
    spelling: (meaning, place) for meaning, names in _SPELLINGS.items() for place, spelling in enumerate(names)
}
_WORDS_BEFORE = frozenset(
    ("train", "training", "the", "current", "cur", "info", "debug", "and", "at", "done", "for", "completed")
)
_EVALUATION = frozenset(("val", "valid", "validation", "eval", "evaluation", "test", "dev", "best"))
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z0-9]+|[0-9]+")


def meaning(key: str) -> tuple[str, int] | None:
    """What a key stands for and how good a spelling it is (0 is best), None for any other key.

    Args:
        key: As printed: ``train/loss``, ``Loss Scale``, ``gradNorm``.
    """
    plain = re.sub(r"[^A-Za-z0-9]+", "_", key.strip()).strip("_").lower()
    found = _MEANING.get(plain)
    if found is not None:
        return found
    words = plain.split("_")
    while len(words) > 1 and words[0] in _WORDS_BEFORE:
        words = words[1:]
        found = _MEANING.get("_".join(words))
        if found is not None:
            return found
    joined = "_".join(_WORD.findall(key)).lower()
    return _MEANING.get(joined)


def is_evaluation(key: str) -> bool:
    """The key belongs to a validation: ``val_loss``, ``eval/loss``."""
    return not _EVALUATION.isdisjoint(re.split(r"[^a-z0-9]+", key.lower()))


def _whole(value: Any) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, float):
        return int(value) if value.is_integer() and 0 <= value < 1e15 else None
    return value if isinstance(value, int) and 0 <= value < 10**15 else None


def _real(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # JSON has integers of any length
        return math.inf if value > 0 else -math.inf


def _true(value: Any) -> bool | None:
    if isinstance(value, bool):
        return value
    return bool(value) if value in (0, 1) else None


def fields_of(pairs: Iterable[tuple[str, Any, int | None]]) -> tuple[Fields, tuple[str, ...]]:
    """Fields of one line.

    Args:
        pairs: ``(key, value, total)``: the value a number or a bool, ``total`` what stands after a slash (``3/100``).

    Returns:
        The fields, and the spellings that were used, by which lines of one kind are known.
    """
    best: dict[str, tuple[int, Any, int | None, str]] = {}
    for key, value, total in pairs:
        found = meaning(key)
        if found is None:
            continue
        name, place = found
        if name not in best or place < best[name][0]:
            best[name] = (place, value, total, key)
    fields: Fields = {}
    for name in ("loss", "grad_norm", "lr"):
        if name in best and not isinstance(best[name][1], bool):
            fields[name] = _real(best[name][1])
    if "scale" in best and not isinstance(best["scale"][1], bool):
        fields["scale"] = scale_number(repr(_real(best["scale"][1])).encode())
    for name in ("epoch", "rank"):
        whole = _whole(best[name][1]) if name in best else None
        if whole is not None:
            fields[name] = whole
    flag = _true(best["overflow"][1]) if "overflow" in best else None
    if flag is None and "finite" in best:
        finite = _true(best["finite"][1])
        flag = None if finite is None else not finite
    if flag is not None:
        fields["overflow"] = flag
    counter = best.get("step", best.get("iter"))
    if counter is not None:
        whole, total = _whole(counter[1]), counter[2]
        if whole is not None:
            # "Epoch 2, Step 5/100" counts within the epoch, "step 5/100" over the run.
            if total and "epoch" in fields and whole <= total + 1:
                fields["epoch_step"], fields["epoch_steps"] = whole, total
            else:
                fields["step"] = whole
    return fields, tuple(best[name][3] for name in ("loss", "step", "iter") if name in best)


_PAIR = re.compile(
    rb"(?<![A-Za-z0-9_./])([A-Za-z_][A-Za-z0-9_]{0,40}(?:[ \-./][A-Za-z_][A-Za-z0-9_]{0,40}){0,3})['\"]?\s{0,3}"
    rb"(?:is |[:=|])?\s{0,8}[\[('\"]{0,2}\s{0,8}(" + NUMBER + rb"|[Tt]rue\b|[Ff]alse\b)"
    rb"(?:,(\d{1,8})(?=\s|$))?(?![A-Za-z_])['\"\])]{0,2}(?: {0,2}/ {0,6}(\d{1,12}))?"
)
_COUNTER = re.compile(rb"(?:^|[\s\]])\[? {0,8}(\d{1,12}) {0,2}/ {0,6}(\d{1,12})(?: {0,2}\( {0,3}\d+%\))?[\]\s,:]")
_TENSOR = re.compile(rb"[Tt]ensor\((?:[^()]{0,80}?value= ?)?\[?\s{0,4}(" + NUMBER + rb")[^()]{0,120}(?:\([^()]*\))?\)")


def line_pairs(line: bytes) -> Iterator[tuple[str, Any, int | None]]:
    """``(key, value, total)`` of every pair in a line of any notation."""
    if b"ensor(" in line:
        line = _TENSOR.sub(rb"\1", line)
    comma = b"." not in line  # a decimal comma, where no number of the line has a point
    for key, text, rest, total in _PAIR.findall(line):
        value: Any
        if text[:1] in b"tTfF":
            value = text.lower() == b"true"
        else:
            value = number(text + (b"." + rest if rest and comma else b""))
            if rest and not comma and text.isdigit() and len(rest) == 3:
                value = float(text + rest)  # thousands: "step 12,000"
        if value is not None:
            yield key.decode("ascii", "replace"), value, int(total) if total else None


class Keyed(LogFormat):
    """The catch-all: any line that says a step and a loss, in any order and notation."""

    def read(self, line: bytes) -> Fields | None:
        """The fields of ``line``, or None where it holds no step with a loss."""
        return self.read_signed(line)[0]

    def read_signed(self, line: bytes) -> tuple[Fields | None, tuple[str, ...]]:
        """The fields and the spelling of its keys, by which other lines of the same kind are known."""
        fields, keys = fields_of(line_pairs(line))
        if "loss" not in fields:
            return None, ()
        if "step" not in fields and "epoch_step" not in fields:
            counters = _COUNTER.findall(line)
            if counters and "epoch" in fields and fields["epoch"] == int(counters[0][0]):
                counters = counters[1:]  # "epoch 3/10" itself
            if counters:
                at, total = int(counters[-1][0]), int(counters[-1][1])
                if at > total + 1:
                    return None, ()
                if "epoch" in fields:
                    fields["epoch_step"], fields["epoch_steps"] = at, total
                else:
                    fields["step"] = at
                keys = (*keys, "/")
        if "step" not in fields and "epoch_step" not in fields:
            return None, ()
        words = line[:200].lower()
        if any(is_evaluation(word) for word in re.findall(r"[a-z]+", words.decode("ascii", "replace"))[:12]) and (
            b"train" not in words
        ):
            return None, ()
        return fields, keys


def _flat(data: dict[str, Any], depth: int = 0) -> Iterator[tuple[str, Any, int | None]]:
    for key, value in data.items():
        if isinstance(value, dict) and depth < 2:
            yield from _flat(value, depth + 1)
        elif isinstance(value, bool | int | float):
            yield key, value, None
        elif isinstance(value, list) and value and isinstance(value[-1], int) and key == "step":
            yield key, value[-1], None
        elif isinstance(value, str) and len(value) < 40:
            head, slash, tail = value.partition("/")
            if slash and head.strip().isdigit() and tail.strip().isdigit():
                # "global_step/max_steps": "10/100"
                yield key.partition("/max")[0], int(head), int(tail)
                continue
            known = number(value.encode())
            if known is not None:
                yield key, known, None


def json_object(text: bytes) -> dict[str, Any] | None:
    """The first JSON object in a line, None where there is none that can be read."""
    begin, end = text.find(b"{"), text.rfind(b"}")
    if begin < 0 or end < begin:
        return None
    try:
        data = json.loads(text[begin : end + 1])
    except (ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None


class JsonLines(LogFormat):
    """One JSON object a line."""

    def read(self, line: bytes) -> Fields | None:
        """The fields of ``line``, or None where it is no JSON object with a training loss."""
        if b'num_updates"' in line:
            return None  # fairseq's, which has a row of its own
        data = json_object(line)
        if data is None or data.get("mode") not in (None, "train"):
            return None
        pairs = [pair for pair in _flat(data) if not is_evaluation(pair[0])]
        fields, _ = fields_of(pairs)
        if "loss" not in fields and not ("scale" in fields and "step" in fields):
            return None
        if "step" not in fields and "epoch_step" not in fields and not fields.keys() & {"lr", "grad_norm", "scale"}:
            return None
        if data.get("mode") == "train" and "iter" in data and "epoch" in fields and "step" in fields:
            fields["epoch_step"] = fields.pop("step")  # mmcv 1 counts within the epoch
        return fields


@dataclass(frozen=True)
class Column:
    """One column of a table: its place and what it means."""

    place: int
    name: str


def table_header(line: bytes) -> LogFormat | None:
    """A format made from the header of a table (CSV and the like), None where the line is no such header.

    Args:
        line: ``step,loss,lr``; commas, semicolons or tabs.
    """
    for separator in (b",", b"\t", b";"):
        cells = [cell.strip().strip(b'"') for cell in line.strip().split(separator)]
        if len(cells) < 2 or len(cells) > 400:
            continue
        if any(len(c) > 60 or not re.fullmatch(rb"[A-Za-z_][\w ./\-()%@]{0,59}|", c) for c in cells):
            continue
        names = [cell.decode("ascii", "replace") for cell in cells]
        best: dict[str, tuple[int, int]] = {}
        for place, key in enumerate(names):
            found = None if is_evaluation(key) else meaning(key)
            if found is not None and (found[0] not in best or found[1] < best[found[0]][0]):
                best[found[0]] = (found[1], place)
        if "loss" not in best or not best.keys() & {"step", "iter", "epoch"}:
            continue
        if "step" not in best and "iter" in best:
            best["step"] = best["iter"]
        if "step" not in best:
            best["step"] = best["epoch"]
        best.pop("iter", None)
        best.pop("finite", None)
        wanted = {place: name for name, (_, place) in best.items()}
        value = rb"[^%s\r\n]*" % re.escape(separator)
        parts = [
            rb'\s*"?(?P<%s>%s)?"?\s*' % (wanted[i].encode(), _CELL[wanted[i]]) if i in wanted else value
            for i in range(len(cells))
        ]
        pattern = re.compile(rb"^" + re.escape(separator).join(parts) + rb"\s*$")
        return Table(
            name="table",
            tool="a table with a header: CSV, TSV",
            trigger=separator,
            pattern=pattern,
            sample=(),
            strict=False,
        )
    return None


_CELL = {
    "step": rb"\d{1,15}(?:\.0)?",
    "epoch": rb"\d{1,9}(?:\.\d+)?",
    "rank": rb"\d{1,9}",
    "loss": NUMBER,
    "scale": NUMBER,
    "grad_norm": NUMBER,
    "lr": NUMBER,
    "overflow": rb"[Tt]rue|[Ff]alse|[01](?:\.0)?",
}


class Table(LogFormat):
    """Rows of a table whose header was seen."""

    def read(self, line: bytes) -> Fields | None:
        """The fields of a row, None where the loss and the scale are empty."""
        match = self.pattern.match(line)
        if match is None:
            return None
        texts = match.groupdict()
        fields: Fields = {}
        for name in ("loss", "grad_norm", "lr"):
            text = texts.get(name)
            value = number(text) if text else None
            if value is not None:
                fields[name] = value
        scale = texts.get("scale")
        if scale:
            fields["scale"] = scale_number(scale)
        for name in ("step", "epoch", "rank"):
            text = texts.get(name)
            if text and not (name == "epoch" and b"." in text):
                fields[name] = int(float(text))
        overflow = texts.get("overflow")
        if overflow:
            fields["overflow"] = overflow[:1] in b"tT1"
        if "step" not in fields or ("loss" not in fields and "scale" not in fields):
            return None
        return fields if not math.isinf(fields["step"]) else None
