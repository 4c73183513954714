"""Class labels of a batch, by what their values and shapes say."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from mindspore import dtype as mstype

from ampdebug.hooks._preflight_float32 import Array
from ampdebug.hooks._shadow import flat_tensors
from ampdebug.hooks._tensors import FLOATING
from ampdebug.rules._operator_records import LabelFacts

# Labels that by convention are left out of a loss, besides negative ones.
_IGNORED = (255,)


def label_facts(labels: tuple[Any, ...]) -> list[LabelFacts]:
    """Labels that leave nothing to learn from."""
    found = []
    for number, tensor in enumerate(flat_tensors(labels)):
        values = _integers(tensor)
        if values is not None and values.size and (values < 0).all():
            low, high = int(values.min()), int(values.max())
            found.append(LabelFacts(f"label {number}", low, high, 1 << 30, low, all_ignored=True))
    return found


def score_shape(output: Any) -> tuple[int, ...]:
    scores = [t for t in flat_tensors(output) if t.dtype in FLOATING and len(t.shape) >= 2]
    return tuple(int(n) for n in scores[0].shape) if scores else ()


def shape_labels(labels: tuple[Any, ...], shape: tuple[int, ...], *, error: str = "") -> list[LabelFacts]:
    """Labels whose shape says that they are class numbers for scores of this shape.

    A label that is usually left out counts where ``error``, which ended the step, names it.
    """
    ignored = [label for label in _IGNORED if not re.search(rf"\b{label}\b", error)]
    found: list[LabelFacts] = []
    for number, tensor in enumerate(flat_tensors(labels)):
        values = _integers(tensor)
        if values is None or not values.size or len(shape) < 2:
            continue
        if values.shape == (shape[0], *shape[2:]):
            classes = shape[1]
        elif values.shape == shape[:-1]:
            classes = shape[-1]
        else:
            continue
        kept = values[~np.isin(values, ignored) & (values >= 0)]
        if kept.size and classes > 1:
            found.append(LabelFacts(f"label {number}", int(kept.min()), int(kept.max()), classes))
    return found


def _integers(tensor: Any) -> Array | None:
    if tensor.dtype in FLOATING or tensor.dtype == mstype.bool_:
        return None
    values: Array = tensor.asnumpy()
    return values
