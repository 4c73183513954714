"""What a forward birth is, told from the operators that the cell's own code was seen to run in float16.

They name the kind where numbers alone can't: an overflow below an ``Exp`` is another one than below a sum.
"""

from __future__ import annotations

from ampdebug.rules._birth_kinds import FLOAT16_MAX, LARGEST_EXPONENT, Place, Verdict, called
from ampdebug.rules._history import Record
from ampdebug.rules._run import Row, RunView

_EXP = frozenset({"exp", "expm1", "exp2", "pow"})
_LOG = frozenset({"log", "log2", "log10", "log1p"})
_DIVIDE = frozenset({"truediv", "div", "realdiv", "divide", "reciprocal", "rsqrt", "divext", "rtruediv", "divmod"})
_ROOT = frozenset({"sqrt", "rsqrt", "norm", "l2norm"})
_SUM = frozenset({"sum", "reducesum", "sumext", "cumsum", "cumsumext", "reducesumd", "addn"})
_ADD = frozenset({"add", "radd", "iadd", "addext", "sub", "rsub", "isub"})
_MULTIPLY = frozenset({"matmul", "matmulext", "batchmatmul", "bmm", "rmatmul", "dense", "linear", "conv2d"})


def own_operators(view: RunView, path: str) -> frozenset[str]:
    """Names of the operators of a cell's own code that ran in 16 bits, plain and lower case.

    Args:
        view: The run.
        path: The cell.
    """
    cell = view.cells.get(path)
    if cell is None or cell.compute_source not in ("operators", "trace"):
        return frozenset()
    return frozenset(_plain(name) for name, dtype in cell.compute_dtypes.items() if dtype in ("float16", "bfloat16"))


def _plain(operator: str) -> str:
    """``"truediv"`` for ``"Tensor.__truediv__"``."""
    return operator.rsplit(".", 1)[-1].strip("_").lower()


def _sources(place: Place) -> list[Row]:
    """The finite tensors that the cell's own code worked on."""
    rows = place.before if place.birth.own_code and place.before else place.inputs
    return [row for row in rows if not row.nonfinite and row.absmax == row.absmax]


def exponential(view: RunView, record: Record, place: Place) -> Verdict | None:
    """``exp`` in float16 of more than 11.09, written out by hand."""
    birth = place.birth
    if not (birth.own_code or not place.before) or birth.inputs_finite is not True:
        return None
    if not own_operators(view, birth.path) & (_EXP - {"pow"}):
        return None
    sources = _sources(place)
    largest = max((row.max for row in sources[-2:]), default=0.0)
    if not largest > LARGEST_EXPONENT:
        return None
    return Verdict(
        "handwritten-softmax-overflow",
        f"The own code of {called(birth)} takes exp in float16 of values up to {largest:.4g}: exp of more than 11.09 "
        f"is inf there, and it makes {birth.nan} NaN and {birth.pos_inf + birth.neg_inf} infinities of it.",
        "high",
        "exp was seen to run in float16, and its input is beyond its range",
        "Subtract the maximum of each row before exp (x - x.max(axis, keepdims=True)), or use ops.softmax, "
        "ops.logsumexp or nn.Softmax in float32.",
        birth.path,
    )


def epsilon(view: RunView, record: Record, place: Place) -> Verdict | None:
    """``log(p + eps)`` or ``x / (norm + eps)`` whose epsilon is 0 in float16."""
    birth = place.birth
    if not birth.own_code or birth.inputs_finite is not True:
        return None
    names = own_operators(view, birth.path)
    sources = _sources(place)
    if not sources:
        return None
    last = sources[-1]
    terms = last.shape[-1] if last.shape else 1
    if last.absmax**2 * terms > 0.5 * FLOAT16_MAX:
        return None  # it may as well be an overflow
    logarithm = names & _LOG and (last.zeros or last.absmax >= 8.0)
    quotient = names & _DIVIDE and names & (_ROOT | _SUM) and last.zeros and birth.nan and not birth.pos_inf
    if not logarithm and not (quotient and names & (_ADD | {"maximum", "clamp"})):
        return None
    what = (
        "log of a probability that float16 rounds to exactly 0 or 1"
        if logarithm
        else "a division by a norm or sum that is exactly 0"
    )
    return Verdict(
        "eps-1e-8-is-zero-in-fp16",
        f"The own code of {called(birth)} makes {birth.nan} NaN and {birth.pos_inf + birth.neg_inf} infinities in "
        f"float16 out of values of at most {last.absmax:.4g}, {last.zeros} of them exactly 0: it holds {what}, and an "
        "epsilon below 3e-8 (1e-8, 1e-12) added against that is itself 0 in float16.",
        "medium",
        "the operators and their dtype were seen, and the values are far too small to overflow",
        "Compute this part in float32 (x.astype(ms.float32)), use binary_cross_entropy_with_logits / cross_entropy on "
        "logits, or an epsilon that float16 holds (1e-4).",
        birth.path,
    )


def reduction(view: RunView, record: Record, place: Place) -> Verdict | None:
    """A sum in float16 over many values that are themselves small."""
    birth = place.birth
    if not birth.own_code or birth.nan or not (birth.pos_inf or birth.neg_inf):
        return None
    names = own_operators(view, birth.path)
    sources = _sources(place)
    if not names & _SUM or not sources or not birth.count:
        return None
    source = sources[-1]
    terms = source.count / birth.count
    if terms < 32 or source.absmax * terms < FLOAT16_MAX or source.absmax > 256:
        return None
    return Verdict(
        "reduce-sum-overflow-in-pooling",
        f"A sum in float16 over about {terms:.0f} values per element in {called(birth)} exceeds 65504, although the "
        f"values that went into this code are at most {source.absmax:.4g}.",
        "medium",
        "a sum was seen to run in float16, with terms enough to reach 65504",
        "Use mean (x.mean(axis), nn.AdaptiveAvgPool2d) instead of sum followed by a division, or reduce in float32.",
        birth.path,
    )


def empty_mean(view: RunView, record: Record, place: Place) -> Verdict | None:
    """A scalar that is NaN in float32 out of finite numbers: 0 / 0."""
    birth = place.birth
    cell = view.cells.get(birth.path)
    if not birth.own_code or birth.count != 1 or birth.nan != 1 or birth.inputs_finite is not True or cell is None:
        return None
    names = {_plain(name) for name in cell.compute_dtypes}
    sources = _sources(place)
    if not names & (_DIVIDE | {"crossentropy", "nllloss", "mean"}) or not sources:
        return None
    gradients = [row for row in view.rows(record.step.step) if row.site.kind == "gradient"]
    # A mask of nothing but zeros lets no gradient through; an overflow or a log of 0 spoils them.
    empty = bool(gradients) and all(row.zeros == row.count for row in gradients)
    if not empty and (birth.dtype != "float32" or names & (_LOG | _EXP | _ROOT) or place.low):
        return None
    if max(row.absmax for row in sources) > 1e4:
        return None
    return Verdict(
        "mean-over-zero-valid-labels",
        f"The loss that {called(birth)} computes is NaN{' while every gradient is exactly 0' if empty else ''}, out "
        f"of finite values of at most {max(row.absmax for row in sources):.4g}: a sum of nothing divided by a count of "
        "nothing, as for a batch whose labels or mask leave no element.",
        "high" if empty else "medium",
        "nothing that went into it could overflow, and 0 / 0 is what is left",
        "Divide by maximum(mask.sum(), 1), or skip batches without a valid label.",
        birth.path,
    )


def residual_branch(view: RunView, record: Record, place: Place) -> Verdict | None:
    """A branch of a residual stream that overflows where the stream itself is about to."""
    birth = place.birth
    parent = birth.path.rpartition(".")[0]
    if birth.nan or not birth.path or not parent or not place.low:
        return None
    names = own_operators(view, parent) - {""}  # a compiled cell may tell its dtype only
    if names and not names & _ADD:
        return None
    family = parent.rpartition(".")[0]
    if not parent.rpartition(".")[2].isdigit():
        return None
    stream = [
        row
        for row in view.rows(record.step.step)
        if row.site.kind == "output"
        and row.site.path.rpartition(".")[0] == family
        and row.site.path.rpartition(".")[2].isdigit()
        and not row.nonfinite
        and row.count == birth.count
    ]
    sizes = [row.absmax for row in stream]
    if len(sizes) < 2 or sizes[-1] < 0.25 * FLOAT16_MAX or sizes[-1] < 2 * sizes[0]:
        return None
    return Verdict(
        "residual-stream-exceeds-fp16",
        f"The hidden state grows from block to block ({', '.join(f'{size:.4g}' for size in sizes[-4:])}) and leaves "
        f"float16's range in {called(birth)}, the branch that is added to it next.",
        "high",
        "the outputs of the blocks before it were measured",
        "Keep the residual stream in float32 or use bfloat16; smaller initialisation of the output projections or a "
        "norm before the sum keeps it small.",
        birth.path,
    )


def hidden_by_clip(view: RunView, record: Record, place: Place) -> Verdict | None:
    """An overflow that a clip turns into 65504, so that the loss does not show it."""
    birth = place.birth
    if birth.nan or not (birth.pos_inf or birth.neg_inf) or not place.low:
        return None
    rows = view.rows(record.step.step)
    if not place.last_outputs or any(row.nonfinite for row in place.last_outputs):
        return None
    pinned = next(
        (r for r in rows if r.site.kind in ("input", "output") and r.saturated >= 1 and not r.nonfinite), None
    )
    if pinned is None or pinned.saturated < 0.5 * (birth.pos_inf + birth.neg_inf):
        return None
    return Verdict(
        "values-pinned-at-fp16-max",
        f"{called(birth)} overflows float16 in {birth.pos_inf + birth.neg_inf} of {birth.count} elements, and a clip "
        f"or nan_to_num after it turns them into 65504 ({pinned.saturated} elements of the {pinned.site.kind} of "
        f"{pinned.site.path or 'the network'}): the loss stays finite and does not show it.",
        "high",
        "the overflow and the values that take its place were both measured",
        f"Keep {birth.path or 'this part'} in float32 or bring its values down; do not take a finite loss as proof.",
        birth.path,
    )
