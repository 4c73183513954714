"""Passes and training steps of a workload, with the loss scale of mixed precision."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mindspore
import numpy as np
import numpy.typing as npt
from mindspore import Tensor, nn, value_and_grad
from mindspore import dtype as mstype
from mindspore.ops import functional as F

from ampdebug._errors import ArgumentError
from ampdebug._scale_policies import DynamicScale, ScalePolicy, StaticScale
from ampdebug._workload import Workload
from ampdebug.hooks._shadow import LOW, flat_tensors, map_tensors
from ampdebug.hooks._state import seeded, to_numpy
from ampdebug.hooks._tensors import FLOATING

Array = npt.NDArray[Any]


@dataclass(slots=True)
class Pass:
    """One forward pass, and a backward pass where there is a loss.

    Attributes:
        outputs: The floating-point outputs of the network, copies, in the order of the nested value.
        loss: The loss without its scale; NaN where there was none.
        gradients: Of all trainable parameters, scaled; as they came out of MindSpore.
        scale: What the loss was multiplied by.
    """

    outputs: list[Array] = field(default_factory=list)
    loss: float = math.nan
    gradients: tuple[Tensor, ...] = ()
    scale: float = 1.0

    @property
    def finite_forward(self) -> bool:
        """Outputs and loss are finite."""
        return math.isfinite(self.loss) and all(np.isfinite(output).all() for output in self.outputs)

    def finite_gradients(self) -> bool:
        """The gradients are finite."""
        return all(np.isfinite(to_numpy(gradient)).all() for gradient in self.gradients)

    def unscaled(self) -> list[Array]:
        """The gradients without the scale, float64."""
        return [to_numpy(gradient).astype(np.float64) / self.scale for gradient in self.gradients]


def tensors(batch: Sequence[Any]) -> tuple[Any, ...]:
    """A batch with its arrays as tensors; whatever else is in it stays as it is."""
    return tuple(Tensor(item) if isinstance(item, np.ndarray) else item for item in batch)


def forward(network: nn.Cell, batch: Sequence[Any]) -> Pass:
    """The outputs for one batch ``(inputs..., label)``."""
    return Pass(outputs=_arrays(network(*tensors(batch)[:-1])))


def forward_and_backward(network: nn.Cell, workload: Workload, batch: Sequence[Any], *, scale: float) -> Pass:
    """Loss and gradients of one batch.

    As MindSpore's own train cells do it, what the network gives goes into the loss in float32.

    Args:
        network: The network, in the mode it is to run in.
        workload: Its loss is used.
        batch: ``(inputs..., label)``.
        scale: The loss is multiplied by it before its gradient is taken.
    """
    parameters = network.trainable_params()
    if not parameters:
        raise ArgumentError("the network has no trainable parameters, so there are no gradients to judge by")
    # A compiled function takes tensors as arguments and gives them back; it can keep nothing for later.
    compiled = mindspore.get_context("mode") == mindspore.GRAPH_MODE
    loss_fn, widened = workload.loss, _widened_in_graph if compiled else _widened

    def scaled(label: Any, *inputs: Any) -> Any:
        outputs = widened(network(*inputs))
        loss = loss_fn(outputs, label)
        return loss * scale, loss, outputs

    *inputs, label = tensors(batch)
    (_, loss, *outputs), gradients = value_and_grad(scaled, None, parameters, has_aux=True)(label, *inputs)
    return Pass(
        outputs=_arrays(outputs),
        loss=float(to_numpy(loss)),
        gradients=tuple(gradients) if isinstance(gradients, (tuple, list)) else (gradients,),
        scale=scale,
    )


def settled_pass(network: nn.Cell, workload: Workload, batch: Sequence[Any], seed: int) -> Pass:
    """Loss and gradients at the largest loss scale that the workload's scaler would settle at.

    With a static scale that is one pass. A dynamic one begins at 2**16 and is halved until the gradients are finite,
    down to 1; where outputs or loss are not finite, no scale helps, and none is tried.

    Args:
        seed: For every pass, so that all of them draw the same.
    """
    policy = scale_policy(workload)
    scale = policy.first()
    while True:
        with seeded(seed):
            done = forward_and_backward(network, workload, batch, scale=scale)
        following = policy.next(scale, overflow=True)
        if not done.finite_forward or done.finite_gradients() or following == scale:
            return done
        scale = following


def scale_policy(workload: Workload) -> ScalePolicy:
    """How the workload's loss scale moves."""
    return DynamicScale() if workload.loss_scale is None else StaticScale(float(workload.loss_scale))


@dataclass(slots=True)
class Training:
    """What some steps of training gave.

    Attributes:
        losses: Of every step, without the scale.
        skipped: Steps whose update was left out, since gradients were not finite.
    """

    losses: list[float] = field(default_factory=list)
    skipped: int = 0


def train(
    network: nn.Cell,
    workload: Workload,
    batches: Iterable[Sequence[Any]],
    *,
    first_scale: float | None = None,
    stop_at_nonfinite_loss: bool = False,
) -> Training:
    """Trains the network with the workload's loss, optimizer and loss scale, in training mode.

    Args:
        network: Its parameters change.
        workload: Loss, optimizer and scale.
        batches: A step each.
        first_scale: Where a dynamic scale begins.
        stop_at_nonfinite_loss: End with the first loss that is not finite: the scale does not enter it, and nothing
            that comes later makes it good.
    """
    network.set_train(True)
    assert workload.optimizer is not None, "the caller requires it"
    optimizer = workload.optimizer(network.trainable_params())
    policy = scale_policy(workload)
    scale = policy.first()
    if first_scale is not None and workload.loss_scale is None:
        scale = first_scale
    result = Training()
    for batch in batches:
        done = forward_and_backward(network, workload, batch, scale=scale)
        result.losses.append(done.loss)
        if stop_at_nonfinite_loss and not math.isfinite(done.loss):
            break
        overflow = not done.finite_gradients()
        if overflow:
            result.skipped += 1
        else:
            optimizer(tuple(_divided(gradient, scale) for gradient in done.gradients))
        scale = policy.next(scale, overflow=overflow)
    return result


def _divided(gradient: Tensor, scale: float) -> Tensor:
    wide = gradient.astype(mstype.float32) if gradient.dtype in LOW else gradient
    return (wide / scale).astype(gradient.dtype)


def _widened(outputs: Any) -> Any:
    return map_tensors(lambda t: t.astype(mstype.float32) if t.dtype in LOW else t, outputs)


def _widened_in_graph(outputs: Any) -> Any:
    return F.mixed_precision_cast(mstype.float32, outputs)


def _arrays(value: Any) -> list[Array]:
    return [to_numpy(tensor) for tensor in flat_tensors(value) if tensor.dtype in FLOATING]
