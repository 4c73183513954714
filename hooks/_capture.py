"""Compiled probes for devices without Python callbacks: the graph copies tensors into buffers, read when the step is
done.

On Ascend and GPU a graph cannot call Python (``ops.Custom`` of type ``pyfunc`` runs on the CPU only). There the probes
assign what passes through to parameters of their own, which belong to no cell, and the same statistics are computed
from them afterwards. It costs memory on the device, as much as the watched tensors need, so there is a limit.

The shapes must be known before the buffers can be made, and are known only from compiling. So a graph is compiled
twice: the first time the probes only note what they would see. Of several calls of one cell in a step the last one is
kept.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, ops

from ampdebug.hooks._graph_probe import GraphProbe, guarded_note, leaves, shape_of
from ampdebug.hooks._layout import Layout, fill_seen, observed
from ampdebug.hooks._probes import Sink
from ampdebug.hooks._tensors import see

_WIDTH = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
LIMIT = 2**30
"""Bytes that the buffers of a session may take."""


class Counter:
    """Counts, inside a graph, how often it came by.

    It is never set back: a graph may keep the parameter's memory and miss a value set from outside.
    """

    def __init__(self, parameter: Any) -> None:
        self.parameter = parameter
        self._last = 0

    def take(self) -> int:
        """How far it counted since it was last asked."""
        now = int(self.parameter.asnumpy())
        before, self._last = self._last, now
        return now - before


class Capture:
    """The buffers of one session.

    Args:
        sink: The session.
        limit: Bytes that all buffers together may take, ``LIMIT`` if None; what does not fit is left out and said.
    """

    def __init__(self, sink: Sink, limit: int | None = None) -> None:
        self.sink = sink
        self.limit = LIMIT if limit is None else limit
        self.bytes = 0
        self.left_out: list[str] = []
        self.repeated: set[str] = set()
        self.version = 0
        self._probes: list[CaptureProbe] = []
        self._gradients: dict[str, tuple[Any, Counter]] = {}
        self._made = 0

    def probe(self, path: str, cell_type: str) -> CaptureProbe:
        """A compiled probe for a cell."""
        return CaptureProbe(path, cell_type, self.sink, self)

    def buffer(self, dtype: str, shape: tuple[int, ...], what: str) -> Any | None:
        """A parameter to copy a tensor into; None where the limit is reached."""
        size = _WIDTH[dtype] * int(np.prod(shape, dtype=np.int64))
        if self.bytes + size > self.limit:
            self.left_out.append(what)
            return None
        self.bytes += size
        return self._parameter(Tensor(np.zeros(shape, np.float32), getattr(ms, dtype)))

    def _parameter(self, value: Any) -> Any:
        self._made += 1
        return Parameter(value, name=f"ampdebug.{id(self):x}.{self._made}", requires_grad=False)

    def counter(self) -> Counter:
        """Counts calls: a buffer that was not written in a step holds an older one's values."""
        return Counter(self._parameter(Tensor(0, ms.int32)))

    def learned(self, probe: CaptureProbe) -> None:
        """A probe saw a new layout: graphs are compiled anew, with a buffer for it."""
        if probe not in self._probes:
            self._probes.append(probe)
        self.version += 1

    def gradient_hook(self, parameter: Any) -> Callable[[Any], Any]:
        """A compiled hook for a parameter's gradient."""
        name = parameter.name
        if name not in self._gradients:
            dtype = str(parameter.dtype).lower()
            target = self.buffer(dtype, tuple(parameter.shape), name) if dtype in _WIDTH else None
            self._gradients[name] = (target, self.counter())
        target, counts = self._gradients[name]
        if target is None:
            return lambda gradient: gradient
        counter = counts.parameter

        def hook(gradient):  # type: ignore[no-untyped-def]
            return ops.depend(gradient, (ops.assign(target, gradient), ops.assign_add(counter, 1)))

        return hook

    def collect(self) -> None:
        """Hands what the step left in the buffers to the sink, forward in order of tracing, then the gradients."""
        for probe in self._probes:
            probe.collect()
        for name, (target, counter) in reversed(self._gradients.items()):
            if target is not None and counter.take():
                self.sink.gradient(name, target)


class CaptureProbe(GraphProbe):
    """A compiled probe that copies into buffers."""

    def __init__(self, path: str, cell_type: str, sink: Sink, capture: Capture) -> None:
        super().__init__(path, cell_type, sink)
        self._capture = capture
        self._buffers: list[tuple[Any, ...] | None] = []
        self._counters: list[Counter] = []

    def traced(self, inputs: Any, outputs: Any) -> int:
        known = len(self.layouts)
        super().traced(inputs, outputs)
        for layout in self.layouts[known:]:
            self._buffers.append(self._make(layout))
            self._counters.append(self._capture.counter())
            self._capture.learned(self)
        return 0

    def _make(self, layout: Layout) -> tuple[Any, ...] | None:
        made = []
        for _, slot, dtype, shape in layout.entries:
            if observed(dtype, shape):
                buffer = self._capture.buffer(dtype, shape, f"{self.path} {slot}".strip())
                if buffer is None:
                    return None
                made.append(buffer)
        return tuple(made)

    def construct(self, cell: Any, original: Callable[..., Any]) -> Any:
        """The method to put into ``cell`` in place of ``original``."""
        note = ops.constexpr(guarded_note(self.sink, self.traced))
        usable = [index for index, buffers in enumerate(self._buffers) if buffers]
        buffers: Any = tuple(self._buffers[index] for index in usable)
        counters = tuple(self._counters[index].parameter for index in usable)
        variants = len(usable)
        wanted = [
            [(tuple(shape), dtype) for _, _, dtype, shape in self.layouts[index].entries if observed(dtype, shape)]
            for index in usable
        ]

        @ops.constexpr
        def fits(variant: int, shapes: Any, dtypes: Any) -> bool:
            names = [str(dtype).lower() for dtype in dtypes]
            return [(tuple(shape), name) for shape, name in zip(shapes, names, strict=True)] == wanted[variant]

        def construct(self, *args, **kwargs):  # type: ignore[no-untyped-def]
            output = original(*args, **kwargs)
            note(("tuple", (shape_of(args), shape_of(kwargs))), shape_of(output))
            seen = leaves(args) + leaves(kwargs) + leaves(output)
            shapes = ()
            dtypes = ()
            for leaf in seen:
                shapes = shapes + (leaf.shape,)  # type: ignore[assignment]
                dtypes = dtypes + (leaf.dtype,)  # type: ignore[assignment]
            for variant in range(variants):
                if fits(variant, shapes, dtypes):
                    for index in range(len(seen)):
                        ops.assign(buffers[variant][index], seen[index])
                    ops.assign_add(counters[variant], 1)
            return output

        return types.MethodType(construct, cell)

    def collect(self) -> None:
        """Hands what the last step left in the buffers to the sink."""
        for layout, buffers, counter in zip(self.layouts, self._buffers, self._counters, strict=True):
            calls = counter.take() if buffers else 0
            if buffers and calls:
                if calls > 1:
                    self._capture.repeated.add(self.path)
                inputs, outputs = fill_seen(layout.places, [see(buffer) for buffer in buffers])
                self.sink.graph_call(self.path, self.cell_type, inputs, outputs)
