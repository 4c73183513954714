"""Running a network under an AMP level with some operator sites kept in float32."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from mindspore import Tensor, nn, ops
from mindspore import dtype as mstype

from ampdebug._sites import OperatorCall, OperatorSite, is_cast, is_transparent
from ampdebug.hooks._interpose import Function, interpose
from ampdebug.hooks._operators import dtypes
from ampdebug.hooks._shadow import (
    LOW,
    Mark,
    flat_tensors,
    full_precision,
    map_tensors,
    mark_of,
    rounded,
    set_mark,
    unrounded,
)
from ampdebug.hooks._sites import PathOf, SiteTracker

LOW_DTYPES = {"float16": mstype.float16, "bfloat16": mstype.bfloat16}
_cast = ops.Cast()
_DTYPE_TYPE = type(mstype.float16)


@dataclass(slots=True)
class Policy:
    """What the operators of a network run in, as recorded once under the level and once in float32.

    Attributes:
        outputs: ``{site: {dtypes in: dtypes out}}`` under the level.
        own_low: Sites (casts among them) that give 16-bit floats in the float32 network too: the user's own choice,
            which is neither protected nor lifted.
    """

    outputs: dict[OperatorSite, dict[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    own_low: frozenset[OperatorSite] = frozenset()

    @staticmethod
    def of(level_calls: Iterable[OperatorCall], reference_calls: Iterable[OperatorCall]) -> Policy:
        """From the calls of one forward pass under the level and one of the float32 network."""
        policy = Policy(own_low=frozenset(c.site for c in reference_calls if c.site and _any_low(c.outputs)))
        for call in level_calls:
            if call.site is not None and not call.compiled:
                policy.outputs.setdefault(call.site, {})[call.inputs] = call.outputs
        return policy

    def outputs_of(self, site: OperatorSite, inputs: tuple[str, ...]) -> tuple[str, ...]:
        """Dtypes that come out of a site, under the level, when these go in."""
        seen = self.outputs.get(site)
        if not seen:
            return ()
        known = seen.get(inputs)
        return known if known is not None else next(iter(seen.values()))

    def inputs_of(self, site: OperatorSite, inputs: tuple[str, ...]) -> tuple[str, ...]:
        """Dtypes that go into a site under the level, for a call that hands in these in the float32 network."""
        seen = self.outputs.get(site, {})
        same_length = [known for known in seen if len(known) == len(inputs)]
        return same_length[0] if same_length else next(iter(seen), ())

    def computes_in_float32(self, site: OperatorSite, inputs: tuple[str, ...]) -> bool:
        """The level leaves the site in float32."""
        outputs = self.outputs_of(site, inputs)
        return "float32" in outputs and not _any_low(outputs)


def _any_low(names: Iterable[str]) -> bool:
    return any(name in LOW_DTYPES for name in names)


@contextmanager
def protect(
    network: nn.Cell, path_of: PathOf, policy: Policy, protected: Collection[OperatorSite]
) -> Iterator[Protection]:
    """Runs the network, while the context lasts, with ``protected`` sites in float32; forward and backward.

    Args:
        network: The network under its level.
        path_of: As for ``record_operators``.
        policy: What it runs in by itself.
        protected: The sites to keep in float32. With none of them the network runs exactly as without this context.

    Yields:
        What was met on the way.
    """
    protection = Protection(SiteTracker(network, path_of), policy, frozenset(protected))
    with interpose(protection):
        yield protection


class Protection:
    """The watcher that does it.

    Attributes:
        reached: Protected sites that ran.
        unknown: Sites that ran and that the policy does not know: another branch was taken than when it was recorded.
        tracker: The calls of the network.
    """

    def __init__(self, tracker: SiteTracker, policy: Policy, protected: frozenset[OperatorSite]) -> None:
        self.tracker, self._policy, self._protected = tracker, policy, protected - policy.own_low
        self.reached: set[OperatorSite] = set()
        self.unknown: set[OperatorSite] = set()

    def on_cell(self, cell: Any, args: tuple[Any, ...], kwargs: dict[str, Any], call: Callable[[], Any]) -> Any:
        return self.tracker.run_cell(cell, call)

    def on_compiled(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], call: Callable[[], Any]) -> Any:
        return call()

    def on_operator(self, name: str, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        located = self.tracker.site(name)
        site = None if located is None else located[0]
        if is_cast(name):
            return self._cast(site, function, args, kwargs)
        if site is None:
            return function(*args, **kwargs)
        if is_transparent(name):
            return _move(function, args, kwargs)
        if site not in self._policy.outputs:
            self.unknown.add(site)
        inputs = dtypes((args, kwargs) if kwargs else args)
        if site in self._protected:
            self.reached.add(site)
            if _is_in_place(name):
                return self._protected_in_place(function, args, kwargs)
            return self._protected_call(site, inputs, function, args, kwargs)
        if _is_in_place(name):
            result = function(*args, **kwargs)
            for tensor in flat_tensors(args)[:1]:
                set_mark(tensor, None)  # the marked value is no longer the one it stands for
            return result
        if self._policy.computes_in_float32(site, inputs):
            args = map_tensors(_strong, args)
            kwargs = map_tensors(_strong, kwargs)
        return function(*args, **kwargs)

    def _protected_call(
        self,
        site: OperatorSite,
        inputs: tuple[str, ...],
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        wanted = self._policy.outputs_of(site, inputs)
        with full_precision():
            result = function(*_wide_dtypes(map_tensors(_wide, args)), **_wide_dtypes(map_tensors(_wide, kwargs)))
        index = -1

        def as_wanted(tensor: Tensor) -> Tensor:
            nonlocal index
            index += 1
            if tensor.dtype != mstype.float32:
                return tensor
            name = wanted[index] if index < len(wanted) else ""
            if name in LOW_DTYPES:
                return rounded(tensor, LOW_DTYPES[name])
            set_mark(tensor, Mark(None, strong=True))
            return tensor

        return map_tensors(as_wanted, result)

    @staticmethod
    def _protected_in_place(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Replays the operator on the shadow and copies the rounded result into the tensor that everybody holds."""
        target = args[0]
        with full_precision():
            rest, wide_kwargs = map_tensors(_wide, args[1:]), map_tensors(_wide, kwargs)
            if target.dtype not in LOW:
                result = function(target, *rest, **wide_kwargs)
                set_mark(target, Mark(None, strong=True))
                return result
            shadow = _wide(target) * 1.0  # a copy; Clone has no CPU kernel
            replayed = function(shadow, *rest, **wide_kwargs)
            shadow = replayed if isinstance(replayed, Tensor) else shadow
        low = rounded(shadow, target.dtype)
        target.copy_(low)
        set_mark(target, mark_of(low))
        return target if isinstance(replayed, Tensor) else replayed

    def _cast(
        self, site: OperatorSite | None, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result = function(*args, **kwargs)
        sources = flat_tensors(args)
        if not sources or not isinstance(result, Tensor) or site in self._policy.own_low:
            return result
        source = sources[0]
        mark = mark_of(source)
        if result.dtype in LOW:
            if mark is None and source.dtype == mstype.float32:
                set_mark(result, Mark(lambda _: source, strong=False))
            elif mark is not None and result is not source:
                set_mark(result, _passed_on(source, mark))
        elif result.dtype == mstype.float32 and mark is not None:
            if mark.strong:
                value = mark.value(source, True)
                if value is not mark.value(source, False):
                    set_mark(value, _passed_on(source, mark))
                return value
            if result is not source:
                set_mark(result, _passed_on(source, mark))
        return result


def _passed_on(source: Tensor, mark: Mark) -> Mark:
    return Mark(lambda strong_only: mark.value(source, strong_only), strong=mark.strong)


def _wide(tensor: Tensor) -> Tensor:
    return unrounded(tensor, strong_only=False, widen=True)


def _strong(tensor: Tensor) -> Tensor:
    return unrounded(tensor, strong_only=True, widen=False)


def _wide_dtypes(value: Any) -> Any:
    """``ops.zeros(shape, x.dtype)`` says float16 where the float32 network says float32."""
    if type(value) is _DTYPE_TYPE and value in LOW:
        return mstype.float32
    if type(value) is tuple:
        return tuple(_wide_dtypes(item) for item in value)
    if type(value) is dict:
        return {key: _wide_dtypes(item) for key, item in value.items()}
    return value


def _is_in_place(name: str) -> bool:
    method = name.rpartition(".")[2]
    if method.startswith("__"):
        return method == "__setitem__" or (method[2] == "i" and method in _IN_PLACE_OPERATORS)
    return method.endswith("_") or method.startswith("Inplace") or method in _IN_PLACE_PRIMITIVES


_IN_PLACE_OPERATORS = frozenset({"__iadd__", "__isub__", "__imul__", "__itruediv__", "__imatmul__"})
_IN_PLACE_PRIMITIVES = frozenset({"Assign", "AssignAdd", "AssignSub", "ScatterNdUpdate", "CopyExt"})


class _Operand:
    """A tensor as it was when a movement took it, with the mark it had then."""

    __slots__ = ("mark", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.mark = tensor, mark_of(tensor)

    def read(self, strong_only: bool) -> Tensor:
        tensor = self.tensor
        if self.mark is not None and (self.mark.strong or not strong_only):
            tensor = self.mark.value(tensor, strong_only)
        return _cast(tensor, mstype.float32) if tensor.dtype in LOW else tensor


def _move(function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Runs an operator that computes nothing, and lets what comes out stand for the moved unrounded value."""
    operands = [_Operand(tensor) for tensor in flat_tensors((args, kwargs))]
    result = function(*args, **kwargs)
    outputs = flat_tensors(result)
    marked = any(operand.mark is not None for operand in operands)
    narrowed = any(operand.tensor.dtype == mstype.float32 for operand in operands)
    if not (marked or (narrowed and any(output.dtype in LOW for output in outputs))):
        return result
    strong = any(operand.mark is not None and operand.mark.strong for operand in operands)
    frozen = map_tensors(
        lambda tensor: tensor, (args, kwargs)
    )  # new containers: the user may go on filling the old ones
    moved: dict[bool, list[Tensor]] = {}

    def read(index: int, strong_only: bool) -> Tensor:
        if strong_only not in moved:
            values = iter(operands)
            wide_args, wide_kwargs = map_tensors(lambda _: next(values).read(strong_only), frozen)
            with full_precision():
                moved[strong_only] = flat_tensors(function(*wide_args, **wide_kwargs))
        return moved[strong_only][index]

    for index, output in enumerate(outputs):
        if output.dtype in LOW or output.dtype == mstype.float32:
            set_mark(output, Mark(partial(read, index), strong=strong))
    return result
