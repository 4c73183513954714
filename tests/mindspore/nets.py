"""Small networks, train cells and loops that the tests of the monitor share.

The classes stand at the top of a module because O1 rewrites source: it cannot rewrite a class defined in a function.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import mindspore as ms
import mindspore.dataset
import numpy as np
from mindspore import Tensor, amp, nn, ops
from mindspore.graph import api

from ampdebug import open_run

LEVELS = ("O0", "O1", "O2", "O3", "auto")
MODES = ("pynative", "graph")

Batches = tuple[tuple[Tensor, Tensor], ...]


def set_mode(mode: str) -> None:
    """``"pynative"`` or ``"graph"``."""
    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)


# --- networks ---------------------------------------------------------------------------------------------------------


class ConvNet(nn.Cell):
    """Convolution, BatchNorm, pooling, LayerNorm, Dense: 2 x 6 x 6 images, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 4, 3)
        self.bn = nn.BatchNorm2d(4)
        self.act = nn.ReLU()
        self.pool = nn.MaxPool2d(2, 2)
        self.flat = nn.Flatten()
        self.norm = nn.LayerNorm((36,))
        self.head = nn.SequentialCell(nn.Dense(36, 8), nn.Tanh(), nn.Dense(8, 3))

    def construct(self, x):
        x = self.pool(self.act(self.bn(self.conv(x))))
        return self.head(self.norm(self.flat(x)))


class Attention(nn.Cell):
    """One head of causal self-attention; the mask puts -inf where it must not look."""

    def __init__(self, width: int = 8, length: int = 4) -> None:
        super().__init__()
        self.query = nn.Dense(width, width)
        self.key = nn.Dense(width, width)
        self.value = nn.Dense(width, width)
        self.softmax = nn.Softmax(-1)
        mask = np.triu(np.full((length, length), -np.inf, np.float32), 1)
        self.mask = Tensor(mask)

    def construct(self, x):
        score = ops.matmul(self.query(x), self.key(x).transpose(0, 2, 1)) * 0.35
        return ops.matmul(self.softmax(score + self.mask.astype(score.dtype)), self.value(x))


class Transformer(nn.Cell):
    """Embedding, two blocks in a CellList, a head: integer tokens [batch, 4] below 11, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.blocks = nn.CellList([Attention(), Attention()])
        self.norm = nn.LayerNorm((8,))
        self.head = nn.Dense(8, 3)

    def construct(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x).mean(1))


class Mlp(nn.Cell):
    """Dense, ReLU, Dense: 5 numbers, 3 classes."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Dense(5, 6)
        self.act = nn.ReLU()
        self.second = nn.Dense(6, 3)

    def construct(self, x):
        return self.second(self.act(self.first(x)))


class Exact(Mlp):
    """An :class:`Mlp` in which nothing is ever rounded, with :func:`exact` batches, an L1 loss and SGD.

    MindSpore tries several ways of splitting a CPU kernel over threads in its first calls; the last bits of the results
    differ between them. So a run in which one graph takes over from another can't be compared bit by bit, unless every
    number in it is exact.
    """

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.RandomState(1)
        self.first.weight.set_data(Tensor((rng.randint(-4, 5, (6, 5)) / 8).astype(np.float32)))
        self.first.bias.set_data(Tensor(np.full(6, 0.5, np.float32)))
        self.second.weight.set_data(Tensor((rng.randint(0, 2, (3, 6)) * 2 - 1).astype(np.float32)))
        self.second.bias.set_data(Tensor(np.zeros(3, np.float32)))
        self.second.weight.requires_grad = self.second.bias.requires_grad = False


# --- train cells, as users write them ---------------------------------------------------------------------------------


class ScaleCell(nn.TrainOneStepWithLossScaleCell):
    """The stock cell with an overflow check that runs on the CPU."""

    def get_overflow_status(self, status, compute_output):
        return ops.logical_not(amp.all_finite(compute_output))


# --- data, seeds, copies ----------------------------------------------------------------------------------------------
# The same tensors for whoever asks for the same batches: MindSpore's CPU kernels give other last bits for the same
# values at another alignment in memory, so that two bare runs on fresh tensors already differ now and then.


def images(steps: int = 3, batch: int = 4, seed: int = 0) -> Batches:
    """Batches for :class:`ConvNet`."""
    return _batches(steps, batch, (2, 6, 6), seed)


def vectors(steps: int = 3, batch: int = 4, seed: int = 0) -> Batches:
    """Batches for :class:`Mlp`."""
    return _batches(steps, batch, (5,), seed)


@functools.cache
def _batches(steps: int, batch: int, shape: tuple[int, ...], seed: int) -> Batches:
    rng = np.random.RandomState(seed)
    return tuple(
        (Tensor(rng.randn(batch, *shape).astype(np.float32)), Tensor(rng.randint(0, 3, batch).astype(np.int32)))
        for _ in range(steps)
    )


@functools.cache
def tokens(steps: int = 3, batch: int = 4, seed: int = 0) -> Batches:
    """Batches for :class:`Transformer`."""
    rng = np.random.RandomState(seed)
    return tuple(
        (Tensor(rng.randint(0, 11, (batch, 4)).astype(np.int32)), Tensor(rng.randint(0, 3, batch).astype(np.int32)))
        for _ in range(steps)
    )


@functools.cache
def exact(steps: int) -> Batches:
    """Batches for :class:`Exact`: small multiples of 1/4."""
    rng = np.random.RandomState(0)
    return tuple(
        (
            Tensor(rng.randint(-1, 2, (4, 5)).astype(np.float32)),
            Tensor((rng.randint(-4, 5, (4, 3)) / 4).astype(np.float32)),
        )
        for _ in range(steps)
    )


def dataset(batches: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """The batches as a MindSpore dataset."""
    rows = [(x.asnumpy(), y.asnumpy()) for x, y in batches]
    source = ms.dataset.GeneratorDataset(rows, ["x", "y"], shuffle=False, num_parallel_workers=1)
    return source


def many(batches: Batches) -> Batches:
    """So many batches that the kernels of PyNative mode have settled, see :class:`Exact`."""
    return batches * 6


def build(make: Callable[[], nn.Cell], level: str = "O0", seed: int = 0) -> nn.Cell:
    """A network with the same weights every time, at an AMP level, in training mode."""
    ms.set_seed(seed)
    net = make()
    if level != "O0":
        net = amp.auto_mixed_precision(net, level)
    return net.set_train()


def number(value: Any) -> float:
    """A one-element tensor as a float."""
    return float(value.asnumpy().reshape(-1)[0]) if isinstance(value, Tensor) else float(value)


def weights(net: nn.Cell) -> dict[str, bytes]:
    """The bits of all parameters and buffers."""
    return {p.name: p.asnumpy().tobytes() for p in net.get_parameters()}


def numbers_of(values: Any) -> list[bytes]:
    """The bits of some floats: NaN equals itself."""
    return [np.float64(v).tobytes() for v in values]


# --- what a network and MindSpore must look like afterwards -----------------------------------------------------------

_PATCHED = (
    (api, "_real_phase"),
    (api._JitExecutor, "_get_generate_name"),
    (api, "_check_recompile"),
    (api._JitExecutor, "compile"),
    (api._CellGraphExecutor, "compile"),
    (api._PyNativeExecutor, "clear_res"),
)


class Found:
    """Remembers what a network looks like and checks that it looks so again."""

    def __init__(self, *roots: Any) -> None:
        self._cells = {id(cell): cell for root in roots for _, cell in root.cells_and_names()}
        self._construct = {key: _overrides(cell) for key, cell in self._cells.items()}
        self._flags = {key: dict(cell.get_flags()) for key, cell in self._cells.items()}
        self._names = [[p.name for p in root.get_parameters()] for root in roots]
        self._roots = roots
        self._functions = [getattr(owner, name) for owner, name in _PATCHED]

    def check(self) -> None:
        """Asserts that everything is as it was."""
        for key, cell in self._cells.items():
            assert _overrides(cell) == self._construct[key], f"{type(cell).__name__} keeps an override"
            assert dict(cell.get_flags()) == self._flags[key], f"{type(cell).__name__} has other flags"
            for hooks in (cell._forward_hook, cell._forward_pre_hook, cell._backward_hook, cell._backward_pre_hook):
                assert not hooks, f"{type(cell).__name__} keeps a hook"
        for root, names in zip(self._roots, self._names, strict=True):
            assert [p.name for p in root.get_parameters()] == names
            assert not [p.name for p in root.get_parameters() if p.hooks()], "a parameter keeps a hook"
        for (owner, name), function in zip(_PATCHED, self._functions, strict=True):
            assert getattr(owner, name) is function, f"{name} is not MindSpore's own"


def _overrides(cell: Any) -> dict[str, Any]:
    watched = ("construct", "_recompute_cell", "compile_and_run", "__call__")
    return {name: cell.__dict__[name] for name in watched if name in cell.__dict__}


# --- loops ------------------------------------------------------------------------------------------------------------


class Loop:
    """A functional loop: ``value_and_grad``, a loss scaler, ``all_finite``."""

    def __init__(
        self,
        net: nn.Cell,
        scaler: Any,
        *,
        jit: bool = False,
        loss_fn: Any = None,
        optimizer: Any = None,
        rate: float = 0.05,
        skip: bool = True,
    ) -> None:
        self.net = net
        self.scaler = scaler
        optimizer = optimizer or nn.Momentum(net.trainable_params(), rate, 0.9)
        self.optimizer = optimizer
        loss_fn = loss_fn or nn.CrossEntropyLoss()

        def forward(x, y):
            return scaler.scale(loss_fn(net(x), y))

        gradient = ms.value_and_grad(forward, None, optimizer.parameters)

        def step(x, y):
            loss, grads = gradient(x, y)
            loss = scaler.unscale(loss)
            grads = scaler.unscale(grads)
            finite = amp.all_finite(grads)
            if skip:
                if finite:
                    loss = ops.depend(loss, optimizer(grads))
            else:
                loss = ops.depend(loss, optimizer(grads))
            scaler.adjust(finite)
            return loss, finite

        self.step = ms.jit(step) if jit else step

    def run(self, batches: Any, run: Any = None) -> list[float]:
        """Trains on the batches; ``run`` is the watch. Returns loss and scale after, step by step."""
        numbers = []
        for x, y in batches:
            loss, finite = self.step(x, y)
            numbers += [number(loss), number(self.scaler.scale_value)]
            if run is not None:
                run.step(loss=loss, finite=finite)
        return numbers


def exact_loop(net: Exact, *, jit: bool = False) -> Loop:
    """The loop in which nothing is rounded."""
    optimizer = nn.SGD(net.trainable_params(), 0.125)
    return Loop(net, amp.StaticLossScaler(8.0), jit=jit, loss_fn=nn.L1Loss("sum"), optimizer=optimizer)


def scale_cell(net: nn.Cell, *, scale: float = 2.0**10, window: int = 2, cls: Any = ScaleCell) -> Any:
    """A train cell with a dynamic loss scale around a network with loss; exact around an :class:`Exact`."""
    if isinstance(net, Exact):
        loss, optimizer = nn.L1Loss("sum"), nn.SGD(net.trainable_params(), 0.125)
    else:
        loss, optimizer = nn.CrossEntropyLoss(), nn.Momentum(net.trainable_params(), 0.05, 0.9)
    update = nn.DynamicLossScaleUpdateCell(scale, 2, window)
    return cls(nn.WithLossCell(net, loss), optimizer, update).set_train()


def call_all(cell: Any, batches: Any) -> list[float]:
    """Calls a train cell on the batches and returns all scalars it gave."""
    numbers = []
    for batch in batches:
        outputs = cell(*batch)
        flat = outputs if isinstance(outputs, tuple) else (outputs,)
        numbers += [number(item) for item in flat if not isinstance(item, (tuple, list))]
    return numbers


# --- reading a run ----------------------------------------------------------------------------------------------------


class MeanInBfloat16(nn.Cell):
    """Gives a scalar in bfloat16."""

    def construct(self, x):
        return x.mean().astype(ms.bfloat16)


class Rows:
    """The statistics of one recorded step, by site."""

    def __init__(self, directory: Path, step: int = 1) -> None:
        run = open_run(directory)
        seen = run.tensors(step)
        self.order: list[tuple[Any, ...]] = []
        self.rows: dict[tuple[Any, ...], Any] = {}
        self.dtypes: dict[tuple[Any, ...], str] = {}
        self.exponents: dict[tuple[Any, ...], Any] = {}
        for index, site_id in enumerate(seen.site_ids):
            site = run.sites[site_id]
            key = (site.kind, site.path, site.call, site.slot)
            assert key not in self.rows, f"{key} was recorded twice in one step"
            self.order.append(key)
            self.rows[key] = seen.rows[index]
            self.dtypes[key] = seen.dtypes[index]
            self.exponents[key] = seen.exponents[index]

    def __getitem__(self, key: tuple[Any, ...]) -> Any:
        return self.rows[key]

    def __contains__(self, key: tuple[Any, ...]) -> bool:
        return key in self.rows

    def paths(self, kind: str = "output") -> Iterator[str]:
        """Cell paths that have a row of a kind."""
        yield from sorted({key[1] for key in self.rows if key[0] == kind})


def reference(array: Any) -> dict[str, float]:
    """The statistics of an array in float64, by numpy alone.

    Raises:
        AssertionError: The array is not floating point.
    """
    array = np.asarray(array)
    assert array.dtype.kind == "f"
    wide = array.astype(np.float64)
    finite = wide[np.isfinite(wide)]
    size = np.abs(finite)
    nothing = float("nan")
    return {
        "count": wide.size,
        "zeros": int((wide == 0).sum()),
        "nan": int(np.isnan(wide).sum()),
        "pos_inf": int(np.isposinf(wide).sum()),
        "neg_inf": int(np.isneginf(wide).sum()),
        "subnormal": int(((size > 2.0**-25) & (size < 2.0**-14)).sum()),
        "flushed": int(((size > 0) & (size <= 2.0**-25)).sum()),
        "exceeding": int((size > 65504).sum()),
        "saturated": int((size == 65504).sum()),
        "min": finite.min() if finite.size else nothing,
        "max": finite.max() if finite.size else nothing,
        "mean": finite.mean() if finite.size else nothing,
        "rms": np.sqrt((finite**2).mean()) if finite.size else nothing,
    }


EXACT = ("count", "zeros", "nan", "pos_inf", "neg_inf", "subnormal", "flushed", "exceeding", "saturated", "min", "max")


def assert_row(row: Any, array: Any) -> None:
    """Asserts that a recorded row is that of ``array``: counts and extremes exactly, sums to float64 rounding."""
    want = reference(array)
    for name in EXACT:
        # + 0: the sign of a zero is nobody's business here
        np.testing.assert_equal(row[name].item() + 0, want[name] + 0, err_msg=name)
    for name in ("mean", "rms"):
        scale = max(abs(want["min"]), abs(want["max"]), 1e-300)
        np.testing.assert_allclose(row[name], want[name], rtol=1e-12, atol=1e-13 * scale, err_msg=name)
