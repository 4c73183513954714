"""What is trained: a network with its data, loss, optimizer and metric, as plain functions that make them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

from ampdebug._errors import ArgumentError


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Workload:
    """A training task that can be begun again and again: everything in it is made anew, and nothing is changed.

    What does not need a part leaves it out: ``network`` and ``data`` are enough to look at a network's outputs. To be
    sent to other processes, the functions must be importable from their module (no lambdas, nothing defined inside a
    function); a workload named as ``module:name`` on the command line is loaded there by its name and may hold
    anything. Equal is only what is the same object: batches of tensors cannot be compared at little cost.

    Attributes:
        network: Makes the network at O0, a ``mindspore.nn.Cell``; called without arguments, with a fixed seed.
        data: Training batches, or a function without arguments that gives them. Each is a tuple ``(inputs..., label)``
            of Tensors or arrays, in the same order at every call.
        loss: A cell or function ``loss(output, label)`` that returns a scalar tensor.
        optimizer: Takes the trainable parameters and returns a ``mindspore.nn.Optimizer``.
        metric: Takes a network and returns a number; the validation set is its own matter.
        better: Which way the metric improves.
        loss_scale: Static loss scale at 16-bit levels; None for a dynamic one that begins at 2**16.
        name: For reports; ``""`` for the name of the network.

    Raises:
        ArgumentError: A part is of another kind; the message names it and says what it must be.

    Example::

        workload = ampdebug.Workload(
            network=LeNet,
            data=train_batches,
            loss=nn.CrossEntropyLoss(),
            optimizer=lambda parameters: nn.SGD(parameters, 0.01),
            metric=accuracy,
        )
    """

    network: Callable[[], Any]
    data: Callable[[], Iterable[Sequence[Any]]] | Sequence[Sequence[Any]]
    loss: Any = None
    optimizer: Callable[[Any], Any] | None = None
    metric: Callable[[Any], float] | None = None
    better: Literal["higher", "lower"] = "higher"
    loss_scale: float | None = None
    name: str = ""

    def __post_init__(self) -> None:
        if _is_made_cell(self.network) or not callable(self.network):
            raise ArgumentError(
                f"network is a {_kind(self.network)}; it must be a function without arguments that makes the network, "
                "such as its class or lambda: Net(10), so that every run can begin with a fresh one"
            )
        if hasattr(self.data, "create_tuple_iterator"):
            raise ArgumentError(
                "data is a dataset; give a function that begins it anew: lambda: dataset.create_tuple_iterator(), from "
                "a dataset that does not shuffle"
            )
        sequence = isinstance(self.data, Sequence) and not isinstance(self.data, (str, bytes))
        if not sequence and not callable(self.data):
            raise ArgumentError(
                f"data is a {_kind(self.data)}; it must be a list of batches or a function without arguments that "
                "gives them, the same at every call"
            )
        if self.loss is not None and not callable(self.loss):
            raise ArgumentError(f"loss is a {_kind(self.loss)}; it must be a cell or function loss(output, label)")
        if self.optimizer is not None and (_is_made_cell(self.optimizer) or not callable(self.optimizer)):
            raise ArgumentError(
                f"optimizer is a {_kind(self.optimizer)}; it must be a function that takes the trainable parameters "
                "and makes the optimizer, such as lambda parameters: nn.SGD(parameters, 0.01)"
            )
        if self.metric is not None and not callable(self.metric):
            raise ArgumentError(
                f"metric is a {_kind(self.metric)}; it must be a function that takes a network and returns a number"
            )
        if self.better not in ("higher", "lower"):
            raise ArgumentError(f"better={self.better!r}: must be 'higher' or 'lower'")
        scale = self.loss_scale
        if scale is not None and (not _is_number(scale) or not 0 < scale < math.inf):
            raise ArgumentError(
                f"loss_scale={scale!r}: must be a positive number, or None for a dynamic one that begins at 2**16"
            )
        if not isinstance(self.name, str):
            raise ArgumentError(f"name={self.name!r}: must be a text")

    def batches(self, steps: int | None = None) -> Iterator[tuple[Any, ...]]:
        """The batches from the first one on.

        Args:
            steps: So many of them; the data begin again where they end. None: each of them once.

        Yields:
            ``(inputs..., label)``, as ``data`` gives them.

        Raises:
            ArgumentError: ``data`` gives no batch, or one that is not a tuple of at least an input and a label.
        """
        if steps is not None and steps < 0:
            raise ArgumentError(f"steps={steps}: must be 0 or more")
        done = 0
        while steps is None or done < steps:
            begun = done
            for batch in itertools.islice(self._begin(), None if steps is None else steps - done):
                if not isinstance(batch, (tuple, list)) or len(batch) < 2:
                    raise ArgumentError(
                        f"batch {done} of data is a {_kind(batch)}"
                        + (f" of {len(batch)}" if isinstance(batch, (tuple, list)) else "")
                        + "; each batch must be a tuple (inputs..., label)"
                    )
                done += 1
                yield tuple(batch)
            if done == begun:
                raise ArgumentError(
                    "data gives no batch"
                    + (f" after {done}; called again it must begin again" if done else "; it must give at least one")
                )
            if steps is None:
                return

    def _begin(self) -> Iterable[Sequence[Any]]:
        batches = self.data if isinstance(self.data, Sequence) else self.data()
        if not isinstance(batches, Iterable):
            raise ArgumentError(f"data() gave a {_kind(batches)}; it must give batches, tuples (inputs..., label)")
        return batches

    def require(self, *parts: str, purpose: str) -> None:
        """Makes sure that parts are given.

        Args:
            parts: Their names, such as ``"loss"``.
            purpose: Who needs them, for the message.

        Raises:
            ArgumentError: One is None.
        """
        unknown = set(parts) - {field.name for field in fields(self)}
        assert not unknown, f"a Workload has no {unknown}"
        missing = [part for part in parts if getattr(self, part) is None]
        if missing:
            raise ArgumentError(
                f"{purpose} needs the workload's {' and '.join(missing)}, which "
                f"{'is' if len(missing) == 1 else 'are'} not given: Workload({', '.join(f'{m}=...' for m in missing)})"
            )


def _is_made_cell(value: Any) -> bool:
    """A cell, not the class of one. By its looks, since this side does not import MindSpore."""
    return not isinstance(value, type) and hasattr(value, "construct")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _kind(value: Any) -> str:
    return type(value).__name__
