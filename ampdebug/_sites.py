"""Operator sites: the places in a network where an operator is called, and what was seen to run there."""

from __future__ import annotations

import linecache
import math
from dataclasses import dataclass

_CASTS = frozenset({"cast", "astype", "to", "half", "float", "bfloat16", "typeas", "type", "double"})
# They hand on every value as it is, and never cast: the dtype of what comes out is that of what went in.
_MOVEMENTS = frozenset(
    """
    reshape view viewas transpose transposeext swapaxes swapdims permute t squeeze unsqueeze expanddims flatten
    flattenext split splittensor splitwithsize chunk broadcastto expand expandas narrow select selectext slice
    stridedslice sliceext getitem unstack unstackext unbind diagonal pixelshuffle movedim contiguous unfold ravel
    """.split()  # noqa: SIM905 - a page of quotes reads worse
)
# Exact too, but from several tensors, or more than once.
_ASSEMBLIES = frozenset({"concat", "concatenate", "cat", "stack", "stackext", "tile", "hstack", "vstack"})


def _plain(operator: str) -> str:
    """``"Tensor.expand_dims"``, ``"mint.expand_dims"`` and ``"ExpandDims"`` by one name: ``"expanddims"``."""
    name = operator.rpartition(".")[2]
    return (name.removesuffix("View") or name).replace("_", "").lower()  # one primitive is called View


_SYMBOLS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "matmul": "@", "pow": "**", "mod": "%",
    "neg": "-", "eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "getitem": "[]", "setitem": "[]=",
}  # fmt: skip


def short_name(operator: str) -> str:
    """An operator's name for a reader: ``"/"`` for ``"Tensor.__truediv__"``, ``"sum"`` for ``"Tensor.sum"``."""
    name = operator.removeprefix("Tensor.")
    if name.startswith("__"):
        name = name.strip("_")
        if name in _SYMBOLS:
            return _SYMBOLS[name]
        if name[1:] in _SYMBOLS:  # radd, iadd
            return _SYMBOLS[name[1:]] + ("=" if name[0] == "i" else "")
    return name


def is_cast(operator: str) -> bool:
    """The operator only changes the dtype."""
    return _plain(operator) in _CASTS


def is_movement(operator: str) -> bool:
    """The operator moves values and computes none: reshape, transpose, slice and the like."""
    # The primitive of this name is `where`: it brings its operands to one dtype, constants too, which may not fit.
    return operator != "Select" and _plain(operator) in _MOVEMENTS


def is_transparent(operator: str) -> bool:
    """The operator hands on every value as it is: a movement, or one that puts tensors together."""
    return is_movement(operator) or _plain(operator) in _ASSEMBLIES


@dataclass(frozen=True, slots=True)
class OperatorSite:
    """One operator call in the source, named so that it is found again in another run, at another level.

    The ``index``-th call of ``operator`` on source line ``line`` within one call of the cell at ``path``. Other
    branches being taken, loops, helper functions and shared cells leave it the same; a second call of the cell does
    too, so that all its calls are one site.

    Attributes:
        path: Path of the innermost cell; a cell that hangs in no attribute is named after its parent, its class and
            its place among such cells (``"encoder.<Block#2>"``).
        operator: Its name as called: a primitive (``"Exp"``), ``"Tensor.sum"``, ``"mint.add"``.
        line: ``"net.py:33"``, the innermost source line outside MindSpore; ``""`` where the network has none.
        index: From 0.
    """

    path: str
    operator: str
    line: str
    index: int

    @property
    def key(self) -> str:
        """The site as one string, different for different sites."""
        return f"{self.path}|{self.operator}|{self.line}|{self.index}"


@dataclass(frozen=True, slots=True)
class OperatorCall:
    """One operator call that was seen to run.

    Attributes:
        site: Where; None outside the network (the loss function, the optimizer).
        operator: Its name as called.
        file: Full path of the source file of ``site.line``; ``""`` if there is none.
        cell_type: Class name of the innermost cell; ``""`` outside of any.
        inputs: Dtypes of the tensors that were handed in, in order. The implicit casts of mixed precision come after
            this point.
        outputs: Dtypes of the tensors that came out.
        compiled: The call was one of a compiled function (``@ms.jit``): the operators inside it cannot be seen.
    """

    site: OperatorSite | None
    operator: str
    file: str
    cell_type: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    compiled: bool = False

    @property
    def path(self) -> str | None:
        """Cell path of the site; None outside the network."""
        return None if self.site is None else self.site.path

    @property
    def compute_dtype(self) -> str | None:
        """The floating-point dtype the operator computed in.

        None where it computed nothing (casts, reshapes) or no floats (comparisons, ``argmax``).

        Taken from the first floating-point output: the implicit casts act before the kernel, and nothing is cast back
        between kernel and output. The further outputs of a normalisation are statistics and may differ.
        """
        if is_cast(self.operator) or is_movement(self.operator):
            return None
        return next((dtype for dtype in self.outputs if dtype.startswith(("float", "bfloat"))), None)

    def source(self) -> str:
        """The text of the source line, stripped; ``""`` where it cannot be read."""
        if not self.file or self.site is None:
            return ""
        return linecache.getline(self.file, int(self.site.line.rpartition(":")[2])).strip()


@dataclass(frozen=True, slots=True)
class SiteScore:
    """What the level's rounding at one site does, in the state in which the network fails.

    Attributes:
        score: Effect on the loss to first order, root of the sum of squares over the elements; infinite where something
            overflowed.
        elements: How many elements came out.
        overflowed: Elements that are finite in float32 and not in 16 bits.
        flushed: Elements that are nonzero in float32 and zero in 16 bits.
        absmax: Largest absolute value in float32.
        spread: Standard deviation in float32.
        error: Largest absolute difference among the elements that stay finite.
    """

    score: float
    elements: int
    overflowed: int
    flushed: int
    absmax: float
    spread: float
    error: float

    @property
    def kind(self) -> str:
        """``"overflow"``, ``"flush"`` (a tenth of the elements or more become zero) or ``"rounding"``."""
        if self.overflowed:
            return "overflow"
        return "flush" if self.flushed * 10 >= max(1, self.elements) else "rounding"

    @property
    def why(self) -> str:
        """One phrase with the numbers."""
        if self.kind == "overflow":
            return f"overflow: {self.overflowed} of {self.elements} leave the format, float32 absmax {self.absmax:.3g}"
        if self.kind == "flush":
            return f"flush: {self.flushed} of {self.elements} become 0, float32 absmax {self.absmax:.3g}"
        return f"rounding: off by up to {self.error:.3g} where values spread by {self.spread:.3g}"

    def joined(self, other: SiteScore) -> SiteScore:
        """Two calls of one site as one: counts added, scores by their squares, the larger of the rest."""
        return SiteScore(
            score=math.hypot(self.score, other.score),
            elements=self.elements + other.elements,
            overflowed=self.overflowed + other.overflowed,
            flushed=self.flushed + other.flushed,
            absmax=max(self.absmax, other.absmax),
            spread=max(self.spread, other.spread),
            error=max(self.error, other.error),
        )
