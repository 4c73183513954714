"""What the keys of hand-written loops and of tools mean: one dictionary of spellings.

It serves the catch-all format, JSON lines and the columns of tables.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

from ampdebug.logs._format import Fields, scale_number

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
    (
        *("train", "training", "the", "current", "cur", "info", "debug", "and", "at", "done", "for", "completed"),
        *("trainer", "root", "main", "stdout", "stderr", "f", "p"),  # loggers; "stdout F" is of a container's log
    )
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


def whole_number(value: Any) -> int | None:
    """A counter below 10**15, None for anything else."""
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


def truth(value: Any) -> bool | None:
    """A bool, or 0 or 1 as one; None for anything else."""
    if isinstance(value, bool):
        return value
    return bool(value) if value in (0, 1) else None


Pair = tuple[str, Any, int | None]
"""``(key, value, total)``: the value a number or a bool, ``total`` what stands after a slash (``3/100``)."""


def best_keys(keys: Iterable[str]) -> dict[str, int]:
    """Which of the keys of a line says what: ``{meaning: place among the keys}``, the best spelling of each."""
    best: dict[str, tuple[int, int]] = {}
    for at, key in enumerate(keys):
        found = meaning(key)
        if found is not None and (found[0] not in best or found[1] < best[found[0]][0]):
            best[found[0]] = (found[1], at)
    return {name: at for name, (_, at) in best.items()}


def kind_of(keys: list[str], best: dict[str, int]) -> tuple[str, ...]:
    """The spellings that were used, by which lines of one kind are known."""
    return tuple(keys[best[name]] for name in ("loss", "step", "iter") if name in best)


def real_scale(value: float) -> float | None:
    """A loss scale read as a number; see ``scale_number``."""
    return scale_number(repr(value).encode())


def put_counter(fields: Fields, at: int, total: int | None) -> None:
    """``Epoch 2, Step 5/100`` counts within the epoch, ``step 5/100`` over the run."""
    if total and "epoch" in fields and at <= total + 1:
        fields["epoch_step"], fields["epoch_steps"] = at, total
    else:
        fields["step"] = at


def fields_of(pairs: Iterable[Pair]) -> tuple[Fields, tuple[str, ...]]:
    """Fields of one line, and the spellings that were used."""
    pairs = list(pairs)
    keys = [pair[0] for pair in pairs]
    places = best_keys(keys)
    best = {name: pairs[at] for name, at in places.items()}
    fields: Fields = {}
    for name in ("loss", "grad_norm", "lr"):
        if name in best and not isinstance(best[name][1], bool):
            fields[name] = _real(best[name][1])
    if "scale" in best and not isinstance(best["scale"][1], bool):
        fields["scale"] = real_scale(_real(best["scale"][1]))
    for name in ("epoch", "rank"):
        whole = whole_number(best[name][1]) if name in best else None
        if whole is not None:
            fields[name] = whole
    flag = truth(best["overflow"][1]) if "overflow" in best else None
    if flag is None and "finite" in best:
        finite = truth(best["finite"][1])
        flag = None if finite is None else not finite
    if flag is not None:
        fields["overflow"] = flag
    counter = best.get("step", best.get("iter"))
    if counter is not None:
        whole = whole_number(counter[1])
        if whole is not None:
            put_counter(fields, whole, counter[2])
    return fields, kind_of(keys, places)
