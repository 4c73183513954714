"""The state in which a network fails: a checkpoint, or the step that a recorded run kept."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mindspore
import numpy as np
from mindspore import Parameter, Tensor, nn

from ampdebug._errors import AmpdebugError, ArgumentError
from ampdebug._flight_file import KeptArray, KeptStep, find_kept_steps, read_kept_step
from ampdebug._records import parameter_name
from ampdebug.hooks._state import to_numpy

Checkpoint = str | os.PathLike[str] | Mapping[str, Any]

# What train cells put before the names of parameters.
_BEFORE = ("", "network.", "_network.", "network._network.")


def load_checkpoint(network: nn.Cell, checkpoint: Checkpoint) -> None:
    """Gives a network the values of a checkpoint.

    Names are compared without what the wrappers of levels, losses and train cells add to them. What the network does
    not have (the optimizer's moments) is passed over; 16-bit values are widened to what the network has.

    Args:
        network: The network at O0.
        checkpoint: A ``.ckpt`` or ``.safetensors`` file, a step kept by a recorded run (``.npz``), or
            ``{name: tensor or array}``.

    Raises:
        ArgumentError: There is no such file, it is of another kind, or it lacks a parameter of the network or has it in
            another shape.
        AmpdebugError: MindSpore cannot read it.
        FormatError: The kept step is damaged.
    """
    shown = "checkpoint" if isinstance(checkpoint, Mapping) else f"checkpoint={os.fspath(checkpoint)!r}"
    given = checkpoint if isinstance(checkpoint, Mapping) else _read(Path(checkpoint))
    values = {parameter_name(name): value for name, value in given.items()}
    parameters = {parameter_name(parameter.name): parameter for parameter in network.get_parameters()}
    theirs = {name: next((b + name for b in _BEFORE if b + name in values), None) for name in parameters}
    missing = [name for name, their in theirs.items() if their is None]
    if missing:
        raise ArgumentError(
            f"{shown} lacks {len(missing)} of {len(parameters)} parameters of the network, such as {missing[0]!r}; it "
            f"holds {len(values)}" + (f", such as {next(iter(values))!r}" if values else "")
        )
    for name, parameter in parameters.items():
        value = _array(values[theirs[name] or name])
        if value.shape != tuple(parameter.shape):
            raise ArgumentError(f"{shown} has {name!r} in shape {value.shape}, and the network in {parameter.shape}")
        parameter.set_data(Tensor(value, parameter.dtype))


def kept_step(run: str | os.PathLike[str]) -> tuple[Path, KeptStep]:
    """The first bad step that a recorded run kept, with the state before it.

    Args:
        run: The directory of the run, or a kept step's file itself.

    Raises:
        ArgumentError: It kept none, or none with its parameters.
        StoreError: It cannot be read.
        FormatError: The file is damaged.
    """
    path = Path(run)
    if path.suffix != ".npz":
        directory = path.parent if path.is_file() else path
        steps = find_kept_steps(directory, rank=0)
        if not steps:
            raise ArgumentError(
                f"run={os.fspath(run)!r} kept no bad step: record it with AMPMonitor(..., keep_bad_steps=1), or give a "
                "checkpoint from before the trouble"
            )
        path = next(iter(steps.values()))
    kept = read_kept_step(path)
    if not kept.parameters:
        raise ArgumentError(f"{path} holds no parameters, which were too large to keep; give a checkpoint instead")
    return path, kept


def kept_batch(kept: KeptStep) -> tuple[Any, ...] | None:
    """The step's batch with arrays in place of its tensors; None where it is not of the kind ``(inputs..., label)``."""
    if kept.keywords or len(kept.batch) < 2:
        return None
    return tuple(_arrays(item) for item in kept.batch)


def _read(path: Path) -> Mapping[str, Any]:
    if not path.is_file():
        raise ArgumentError(f"checkpoint={str(path)!r} is not a file")
    if path.suffix == ".npz":
        return kept_step(path)[1].parameters
    if path.suffix not in (".ckpt", ".safetensors"):
        raise ArgumentError(f"checkpoint={str(path)!r} must be a .ckpt, .safetensors or .npz file (a kept step)")
    try:
        loaded: Mapping[str, Any] = mindspore.load_checkpoint(str(path), format=path.suffix[1:])
    except (ValueError, TypeError, RuntimeError, OSError) as error:
        raise AmpdebugError(f"MindSpore cannot read {path}: {str(error).strip().splitlines()[0]}") from error
    return loaded


def _array(value: Any) -> np.ndarray[Any, Any]:
    if isinstance(value, KeptArray):
        return value.widened()
    return to_numpy(value) if isinstance(value, (Tensor, Parameter)) else np.asarray(value)


def _arrays(value: Any) -> Any:
    if isinstance(value, KeptArray):
        return _array(value)
    if isinstance(value, (tuple, list)):
        return type(value)(_arrays(item) for item in value)
    if isinstance(value, dict):
        return {key: _arrays(item) for key, item in value.items()}
    return value
