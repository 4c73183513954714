"""The record types: what the measuring side says and the judging side reads.

A hook, a log reader or a user's own loop produces these; the store keeps them; every judge reads only them.
They hold plain Python values, never tensors or cells.

Words used here and everywhere else:

* *step*: one call of the training step, counted from 1 over the whole run (not per epoch).
* *loss scale*: the factor the loss is multiplied with before the backward pass. ``loss_scale`` is the one **used in**
  the step; ``loss_scale_after`` is the one the step left behind for the next.
* *unknown* is ``None``; it never means zero or False.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Kind = Literal["input", "output", "output_gradient", "gradient", "reduced_gradient", "parameter", "update"]
"""What a row of statistics is about.

``input`` / ``output``: a tensor that went into / came out of a cell. ``output_gradient``: the gradient with respect to
a cell's output, as it arrived in the backward pass. ``gradient``: the gradient of a parameter as it arrived, scaled by
the loss scale unless the step record says otherwise, on this rank before any reduction. ``reduced_gradient``: the same
after the reduction over ranks. ``parameter``: a parameter's values before the update. ``update``: parameter after minus
parameter before the step.
"""

KINDS: tuple[Kind, ...] = ("input", "output", "output_gradient", "gradient", "reduced_gradient", "parameter", "update")


DTYPES: tuple[str, ...] = (
    "unknown",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "int8",
    "int16",
    "int32",
    "int64",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
    "bool",
    "int4",
    "complex64",
    "complex128",
    "float8_e4m3fn",
    "float8_e5m2",
    "hifloat8",
)
"""Names of dtypes; a row of statistics holds the index. New names are added at the end only."""

DTYPE_CODES: dict[str, int] = {name: code for code, name in enumerate(DTYPES)}


@dataclass(frozen=True, slots=True)
class Site:
    """One place whose tensor is measured again and again; a row of statistics names it by number.

    Attributes:
        kind: What is measured there.
        path: Cell path (``"blocks.0.attn"``; ``""`` is the network itself) for inputs, outputs and output gradients;
            parameter name for gradients, parameters and updates.
        call: Which call of the cell within one step, from 0. Always 0 for parameters.
        slot: Place inside a nested value: ``""`` for a lone tensor, else keys joined by dots (``"0"``, ``"1.mask"``).
        cell_type: Class name of the cell (``"Dense"``); ``""`` for parameters.
    """

    kind: Kind
    path: str
    call: int = 0
    slot: str = ""
    cell_type: str = ""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the watched network, as found when watching began.

    Attributes:
        path: Cell path with the wrappers of the AMP levels and train cells taken off, so that it is the same at every
            level.
        cell_type: Class name, likewise without what a level adds (O1's ``NetOpt`` is ``Net``).
        children: Paths of the direct children.
        parameters: ``{parameter name: dtype}`` of the cell's own parameters.
        asked_dtype: The dtype that the level or ``to_float`` set on this cell; None where nothing did.
        compute_dtypes: ``{operator or "": dtype}``, what the cell's own operators were seen to compute in. Empty where
            it could not be seen.
        compute_source: How ``compute_dtypes`` is known: ``"operators"`` (seen at dispatch), ``"trace"`` (dtypes inside
            the compiled construct), ``"flags"`` (from the precision flags in force), ``""`` unknown.
        aliases: Other paths under which the same cell object hangs.
        watched: False where ``cells=`` left it out or it cannot be observed; ``note`` says why.
        note: One sentence, or "".
    """

    path: str
    cell_type: str
    children: tuple[str, ...] = ()
    parameters: dict[str, str] = field(default_factory=dict)
    asked_dtype: str | None = None
    compute_dtypes: dict[str, str] = field(default_factory=dict)
    compute_source: str = ""
    aliases: tuple[str, ...] = ()
    watched: bool = True
    note: str = ""


@dataclass(frozen=True, slots=True)
class Birth:
    """Where the first non-finite value of a step appeared, in execution order.

    Attributes:
        phase: ``"forward"`` or ``"backward"``.
        path: Cell path for a forward birth or an output gradient; parameter name for a parameter gradient; ``""`` with
            ``kind="input"`` is the network's own input.
        cell_type: Class name of that cell ("" for parameters).
        kind: The kind of site it was seen at.
        call: Call of the cell within the step, from 0.
        slot: Place in the nested value.
        inputs_finite: True: everything that went in was finite, so it was born here. False: what went in was already
            non-finite. None: what went in was not observed.
        own_code: True where the cell has children and all of their outputs were finite, so that the value comes from
            the cell's own ``construct``.
        nan: How many NaN.
        pos_inf: How many +inf.
        neg_inf: How many -inf.
        count: Elements in that tensor.
        dtype: Its dtype.
        seen_at: Cell path or parameter name of the tensor it was first seen in, where that is not ``path``: a cell's
            own code can make a value that is first seen as the input of a child.
    """

    phase: Literal["forward", "backward"]
    path: str
    cell_type: str
    kind: Kind
    call: int
    slot: str
    inputs_finite: bool | None
    own_code: bool
    nan: int
    pos_inf: int
    neg_inf: int
    count: int
    dtype: str
    seen_at: str = ""


@dataclass(slots=True)
class Step:
    """The scalars of one training step. Every field but ``step`` may be unknown (None).

    Attributes:
        step: Counted from 1 over the whole run.
        epoch: Counted from 1.
        epoch_step: Step within the epoch, counted from 1.
        loss: The unscaled loss. NaN and infinities are kept as they are.
        loss_scale: The scale used in this step.
        loss_scale_after: The scale this step left behind.
        overflow: What the training loop itself said.
        nonfinite_gradients: Own check: some gradient element was NaN or infinite.
        update_skipped: The parameters were not updated. None while gradients accumulate or where it cannot be known.
        accumulating: This step only accumulated gradients, by design.
        learning_rate: The rate of the first parameter group.
        grad_norm: Global L2 norm of the *unscaled* gradients (non-finite if they are).
        grad_norm_scaled: The same as they arrived.
        parameters_without_gradient: How many watched parameters got none.
        seconds: Wall time from the begin to the end of the step, the monitor's own work included.
        monitor_seconds: Of these, the monitor's own.
        sampled: Statistics were taken in this step.
        forward_birth: First non-finite value of the forward pass.
        backward_birth: First non-finite value of the backward pass.
        extra: Whatever else the loop gave, by name; plain JSON values only.
    """

    step: int
    epoch: int | None = None
    epoch_step: int | None = None
    loss: float | None = None
    loss_scale: float | None = None
    loss_scale_after: float | None = None
    overflow: bool | None = None
    nonfinite_gradients: bool | None = None
    update_skipped: bool | None = None
    accumulating: bool | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    grad_norm_scaled: float | None = None
    parameters_without_gradient: int | None = None
    seconds: float | None = None
    monitor_seconds: float | None = None
    sampled: bool = False
    forward_birth: Birth | None = None
    backward_birth: Birth | None = None
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Event:
    """Something said once: a warning of the monitor, a lint, a note on the run.

    Attributes:
        step: The step it belongs to, 0 before the first.
        kind: A stable slug (``"monitor-off"``, ``"sens-differs-from-optimizer-loss-scale"``).
        message: One or two sentences for a reader.
        data: Plain JSON values behind it.
    """

    step: int
    kind: str
    message: str
    data: dict[str, Any] = field(default_factory=dict)


def parameter_name(name: str) -> str:
    """A parameter's name without what the wrappers of the AMP levels, losses and train cells put into it."""
    return name.replace("_backbone.", "")
