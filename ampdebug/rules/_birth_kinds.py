"""What a forward birth is, told from the numbers around it: one function a kind, the most specific first."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from ampdebug._records import Birth
from ampdebug.rules._finding import Confidence
from ampdebug.rules._history import Record
from ampdebug.rules._run import Row, RunView

FLOAT16_MAX = 65504.0
LARGEST_EXPONENT = 11.09  # exp of it is 65504


@dataclass(frozen=True)
class Place:
    """A birth and what was measured around it.

    Attributes:
        birth: It.
        inputs: Rows that went into the cell of the birth.
        before: Rows of outputs inside that cell (or of the cell itself), in order, up to where the value was seen.
        seen: The row in which it was seen, None where the step has no statistics.
        last_outputs: Rows of what the network put out.
    """

    birth: Birth
    inputs: tuple[Row, ...]
    before: tuple[Row, ...]
    seen: Row | None
    last_outputs: tuple[Row, ...]

    @property
    def low(self) -> bool:
        """It was computed in float16: seen in it, or made from it (the levels cast the network's output to float32)."""
        return self.birth.dtype == "float16" or (bool(self.before) and self.before[-1].dtype == "float16")


@dataclass(frozen=True)
class Verdict:
    """What a birth is: the parts of a finding that depend on it."""

    slug: str
    sentence: str
    confidence: Confidence
    reason: str
    action: str
    where: str


def place_of(view: RunView, record: Record, birth: Birth) -> Place:
    """Gather the rows around a birth."""
    rows = view.rows(record.step.step)
    path = birth.path
    seen_path = birth.seen_at or path
    seen_at = next(
        (
            i
            for i, r in enumerate(rows)
            if r.site.kind == birth.kind
            and r.site.path == seen_path
            and r.site.call == birth.call
            and r.site.slot == birth.slot
            and r.nonfinite
        ),
        None,
    )
    upto = rows if seen_at is None else rows[:seen_at]
    inside = f"{path}." if path else ""
    before = tuple(
        r for r in upto if r.site.kind == "output" and r.site.path != path and r.site.path.startswith(inside)
    )
    inputs = tuple(r for r in rows if r.site.kind == "input" and r.site.path == path)
    outputs = tuple(r for r in rows if r.site.kind == "output" and r.site.path == "")
    return Place(birth, inputs, before, None if seen_at is None else rows[seen_at], outputs)


def called(birth: Birth) -> str:
    """The cell of a birth in a sentence."""
    return f"{birth.cell_type}{f' {birth.path!r}' if birth.path else ''}"


def counted(birth: Birth) -> str:
    parts = [f"{n} {name}" for n, name in ((birth.nan, "NaN"), (birth.pos_inf, "+inf"), (birth.neg_inf, "-inf")) if n]
    return f"{', '.join(parts)} of {birth.count} elements"


def _input_batch(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if birth.kind != "input" or birth.path != "" or birth.own_code:
        return None
    which = f"input {birth.slot}" if birth.slot else "the input"
    outputs_finite = bool(place.last_outputs) and not any(r.nonfinite for r in place.last_outputs)
    loss = record.step.loss
    if outputs_finite and (loss is None or math.isfinite(loss)):
        swallower = _swallower(view.rows(record.step.step))
        by = f"{swallower[1]} {swallower[0]!r}" if swallower else "a cell on the way"
        return Verdict(
            "nan-input-hidden-by-relu",
            f"In step {record.step.step} {which} of the network already holds {counted(birth)}, but {by} turns it "
            "into a number (ReLU, MaxPool, clip and maximum do on this backend), so that the output does not show it.",
            "high",
            "the input is not finite and the output is",
            "Fix the data pipeline (check np.isfinite over the loader's output); do not take a finite output as proof.",
            swallower[0] if swallower else "",
        )
    return Verdict(
        "nan-in-input-batch",
        f"In step {record.step.step} {which} of the network already holds {counted(birth)}; the network only passes "
        "it on, and would in any precision.",
        "high",
        "the first non-finite value is in what the data pipeline delivered",
        "Fix the data pipeline: look for 0/0 in a min-max or standard-deviation normalisation, log of 0, missing "
        "values; check np.isfinite over the loader's output.",
        "",
    )


def _swallower(rows: list[Row]) -> tuple[str, str] | None:
    """The first cell whose input is not finite and whose output is."""
    bad: dict[tuple[str, int], bool] = {}
    for row in rows:
        key = (row.site.path, row.site.call)
        if row.site.kind == "input":
            bad[key] = bad.get(key, False) or row.nonfinite > 0
        elif row.site.kind == "output" and bad.get(key) and not row.nonfinite and row.site.path:
            return row.site.path, row.site.cell_type
    return None


def _masked_row(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if "softmax" not in birth.cell_type.lower() or birth.kind != "output" or not birth.nan:
        return None
    if not place.inputs or any(r.nan or r.pos_inf for r in place.inputs) or not any(r.neg_inf for r in place.inputs):
        return None
    return Verdict(
        "softmax-row-fully-masked",
        f"{birth.cell_type} {birth.path!r} makes {counted(birth)} out of an input whose only infinities are -inf: a "
        "row is masked completely, and softmax over nothing is 0/0.",
        "high",
        "the input holds -inf but neither NaN nor +inf",
        "Keep at least one entry of each row, or mask with a large finite number that the format holds (-1e4 in "
        "float16), or put zeros where the whole row is masked.",
        birth.path,
    )


def _mask_constant(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if not (birth.own_code and birth.nan and birth.inputs_finite and place.low):
        return None
    masks = [
        r for r in place.inputs if r.min >= 0.0 and r.max == 1.0 and r.mantissa_bits == 0 and 0 < r.zeros < r.count
    ]
    ones = [r for r in place.inputs if r.min == r.max == 1.0]
    biggest = max((r.absmax for r in place.before if not r.nonfinite), default=0.0)
    if not (masks or ones) or biggest > 200:
        return None
    return Verdict(
        "mask-constant-overflows-fp16",
        f"The own code of {called(birth)} makes {counted(birth)} from a "
        f"0/1 mask and small values (largest {biggest:.4g}): a mask constant such as -1e9 is -inf in float16, and 0 * "
        "-inf at the kept positions is NaN.",
        "medium",
        "an input is a 0/1 mask, all other values are small, and nothing but NaN can come of 0 * inf",
        "Build the mask in float32 or with where/masked_fill instead of a product, and with a constant that float16 "
        "holds (-1e4, or np.finfo(np.float16).min).",
        birth.path,
    )


def _reduction(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if birth.nan or not (birth.pos_inf or birth.neg_inf) or not place.low:
        return None
    sources = [r for r in (place.before[-1:] if place.before else place.inputs[-1:]) if not r.nonfinite]
    reduces = birth.own_code or "pool" in birth.cell_type.lower()
    if not sources or not birth.count or not reduces:
        return None
    source = sources[-1]
    terms = source.count / birth.count
    total = abs(source.mean) * terms
    if terms < 32 or total < 0.5 * FLOAT16_MAX or source.absmax > 0.25 * FLOAT16_MAX:
        return None
    return Verdict(
        "reduce-sum-overflow-in-pooling",
        f"A sum over about {terms:.0f} values per element in "
        f"{called(birth)} exceeds float16's 65504 (mean {source.mean:.4g}, "
        f"so about {total:.4g}), although the values themselves are at most {source.absmax:.4g}.",
        "high",
        "number of terms times their mean is beyond the format",
        "Use mean (nn.AdaptiveAvgPool2d, x.mean(axis)) instead of sum followed by a division, or reduce in float32.",
        birth.path,
    )


def _attention(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if not (birth.own_code and place.low and birth.inputs_finite and len(place.before) >= 2):
        return None
    a, b = place.before[-2], place.before[-1]
    pairs = [
        (x, y) for i, x in enumerate(place.before) for y in place.before[i + 1 :] if x.shape and x.shape == y.shape
    ]
    for x, y in pairs or ([(a, b)] if a.shape and a.shape == b.shape else []):
        if x.nonfinite or y.nonfinite or not x.shape:
            continue
        bound = x.absmax * y.absmax * x.shape[-1]
        likely = x.rms * y.rms * math.sqrt(x.shape[-1]) * 4
        if bound >= FLOAT16_MAX and likely >= 0.25 * FLOAT16_MAX and max(x.absmax, y.absmax) < 0.5 * FLOAT16_MAX:
            return Verdict(
                "qk-matmul-overflow-before-scaling",
                f"The own code of {called(birth)} multiplies "
                f"{x.site.path!r} (largest {x.absmax:.4g}) with {y.site.path!r} (largest {y.absmax:.4g}) over "
                f"{x.shape[-1]} terms: the product exceeds 65504 before its scale factor comes.",
                "medium",
                "computed from the largest values and the number of terms",
                "Scale before the product: matmul(q * scale, k.swapaxes(-1, -2)), or compute the product in float32.",
                birth.path,
            )
    return None


def _residual(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if birth.nan and not (birth.pos_inf or birth.neg_inf):
        return None
    near = [r for r in (*place.before, *place.inputs) if not r.nonfinite and r.count == birth.count]
    if not near or not place.low:
        return None
    parts = sorted((r.absmax for r in near), reverse=True)[:2]
    if not birth.own_code or len(parts) < 2 or parts[0] < 0.25 * FLOAT16_MAX or sum(parts) < 0.9 * FLOAT16_MAX:
        return None
    return Verdict(
        "residual-stream-exceeds-fp16",
        f"The sum in {called(birth)} exceeds float16's 65504: its parts "
        f"reach {parts[0]:.4g} and {parts[1]:.4g}; the hidden state has grown out of the format.",
        "high",
        "the parts of the sum add up to more than the format holds",
        "Keep the residual stream in float32 or use bfloat16; smaller initialisation of the output projections or a "
        "norm before the sum keeps it small.",
        birth.path,
    )


def _exponential(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    seen = place.seen
    if not birth.nan or birth.pos_inf or birth.neg_inf or birth.inputs_finite is not True or seen is None:
        return None
    low = place.low or any(r.dtype == "float16" for r in place.inputs)
    if birth.cell_type in ("Softmax", "LogSoftmax") or not low:
        return None
    # Where it did not overflow the result is a share: what softmax puts out.
    if not (seen.min >= 0.0 and seen.max <= 1.0 and seen.count > seen.nan):
        return None
    sources = place.before[-1:] if birth.own_code and place.before else place.inputs
    largest = max((r.max for r in sources if not r.nonfinite), default=0.0)
    if not largest > LARGEST_EXPONENT:
        return None
    return Verdict(
        "handwritten-softmax-overflow",
        f"{called(birth)} makes {birth.nan} NaN of {birth.count} elements, "
        f"the others lying between 0 and 1, out of finite values up to {largest:.4g}: exp of more than 11.09 is inf in "
        "float16, and inf / inf is NaN.",
        "high",
        "the input is beyond the range of exp, and the rest of the output are shares",
        "Subtract the maximum of each row before exp (x - x.max(axis, keepdims=True)), or use ops.softmax / "
        "nn.Softmax in float32.",
        birth.path,
    )


def _epsilon(view: RunView, record: Record, place: Place) -> Verdict | None:
    birth = place.birth
    if not (birth.own_code and place.low and birth.inputs_finite and birth.count == 1 and place.before):
        return None
    last = place.before[-1]
    if last.nonfinite or not 8.0 <= last.absmax <= 1000.0:
        return None
    return Verdict(
        "eps-1e-8-is-zero-in-fp16",
        f"The own code of {called(birth)} makes an infinite value out of "
        f"outputs of at most {last.absmax:.4g}: in float16 a sigmoid or softmax of these is exactly 0 or 1, an epsilon "
        "below 3e-8 is 0, and log(0) is -inf.",
        "medium",
        "the values are far too small to overflow, and large enough for a probability to round to 0 or 1",
        "Compute the loss in float32 (logits.astype(ms.float32)), use ops.binary_cross_entropy_with_logits / "
        "cross_entropy on logits, or an epsilon that float16 holds (1e-4).",
        birth.path,
    )


KINDS: tuple[Callable[[RunView, Record, Place], Verdict | None], ...] = (
    _input_batch,
    _masked_row,
    _mask_constant,
    _reduction,
    _residual,
    _attention,
    _exponential,
    _epsilon,
)
