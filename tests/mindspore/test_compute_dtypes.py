"""The dtype each cell really computes in, read from the operators: PyNative mode, graphs, ``@ms.jit`` steps."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.graph import api

from ampdebug import Cell, open_run, watch
from ampdebug.hooks._cells import places
from ampdebug.hooks._graph_operators import name_scopes
from ampdebug.hooks._precision_seen import PrecisionSeen

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
from nets import ConvNet, Found, Transformer, build, call_all, images, set_mode, tokens, weights

pytestmark = pytest.mark.own_process

HALF, SINGLE = "float16", "float32"
WAYS = ("pynative", "graph", "jit", "cell")


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)  # MindSpore leaves rewritten_network/ and rank_0/ where it runs
    yield
    set_mode("pynative")


class Steps:
    """Some steps of a functional loop, in each of the ways MindSpore runs one.

    ``graph``: ``value_and_grad`` in GRAPH_MODE; ``jit``: a compiled step in PyNative mode.
    """

    def __init__(self, net: nn.Cell, way: str) -> None:
        set_mode("graph" if way == "graph" else "pynative")
        self.net = net
        self.optimizer = optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        loss_fn = nn.CrossEntropyLoss()

        def forward(x, y):
            return loss_fn(net(x).astype(ms.float32), y)

        gradient = ms.value_and_grad(forward, None, optimizer.parameters)

        def step(x, y):
            loss, grads = gradient(x, y)
            optimizer(grads)
            return loss, grads

        self._step = ms.jit(step) if way == "jit" else step
        self.seen: list[bytes] = []

    def run(self, batches: list[Any], watching: Any = None) -> list[bytes]:
        """Trains; returns the bits of all losses and gradients."""
        for x, y in batches:
            loss, grads = self._step(x, y)
            self.seen += [value.asnumpy().tobytes() for value in (loss, *grads)]
            if watching is not None:
                watching.step(loss=loss)
        return self.seen


def cells_of(net: nn.Cell, batches: list[Any], way: str, out: Path) -> dict[str, Cell]:
    """Trains under the monitor and returns what was recorded of the cells."""
    if way == "cell":  # a train cell in GRAPH_MODE
        set_mode("graph")
        optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9)
        train_cell = nn.TrainOneStepCell(nn.WithLossCell(net, nn.CrossEntropyLoss()), optimizer).set_train()
        with watch(train_cell, out=out):
            call_all(train_cell, batches)
    else:
        steps = Steps(net, way)
        with watch(net, out=out, optimizer=steps.optimizer) as run:
            steps.run(batches, run)
    recorded = open_run(out)
    assert [event.message for event in recorded.events if event.kind == "compute-dtypes-not-seen"] == []
    return {cell.path: cell for cell in recorded.cells}


# --- every level, every way -------------------------------------------------------------------------------------------

# What the levels do, as MindSpore documents it and as the values show (see the test after this one).
_DENSE = {"MatMul": HALF, "BiasAdd": HALF}
_DENSE32 = {"MatMul": SINGLE, "BiasAdd": SINGLE}
EXPECTED: dict[str, dict[str, dict[str, str]]] = {
    "O0": {
        "conv": {"Conv2D": SINGLE},
        "bn": {"BatchNorm": SINGLE},
        "act": {"ReLU": SINGLE},
        "flat": {"": SINGLE},
        "norm": {"LayerNorm": SINGLE},
        "head.0": _DENSE32,
        "head.2": _DENSE32,
    },
    # The boundary says float32 everywhere: O1 casts the outputs of what it converted back.
    "O1": {
        "conv": {"Conv2D": HALF},
        "bn": {"BatchNorm": SINGLE},
        "flat": {"": SINGLE},
        "norm": {"LayerNorm": SINGLE},
        "head.0": _DENSE,
        "head.2": _DENSE,
    },
    # The boundary of bn and norm says float16 at O2: their wrapper casts.
    "O2": {
        "conv": {"Conv2D": HALF},
        "bn": {"BatchNorm": SINGLE},
        "act": {"ReLU": HALF},
        "flat": {"": HALF},
        "norm": {"LayerNorm": SINGLE},
        "head.0": _DENSE,
        "head.2": _DENSE,
    },
    "O3": {
        "conv": {"Conv2D": HALF},
        "bn": {"BatchNorm": HALF},
        "act": {"ReLU": HALF},
        "flat": {"": HALF},
        "norm": {"LayerNorm": HALF},
        "head.0": _DENSE,
        "head.2": _DENSE,
    },
    "auto": {
        "conv": {"Conv2D": HALF},
        "bn": {"BatchNorm": SINGLE},
        "act": {"ReLU": SINGLE},
        "flat": {"": SINGLE},
        "norm": {"LayerNorm": SINGLE},
        "head.0": {"MatMul": HALF, "BiasAdd": SINGLE},
        "head.2": {"MatMul": HALF, "BiasAdd": SINGLE},
    },
    # to_float by hand: the head, but for its last layer; and a level's own flags where there are none.
    "to_float": {
        "conv": {"Conv2D": SINGLE},
        "flat": {"": SINGLE},
        "head.0": _DENSE,
        "head.2": _DENSE32,
    },
}


def converted(level: str) -> nn.Cell:
    if level != "to_float":
        return build(ConvNet, level)
    net = build(ConvNet)
    net.head.to_float(ms.float16)
    net.head[2].to_float(ms.float32)
    return net


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("level", EXPECTED)
def test_every_level_in_every_way_of_running(level: str, way: str, tmp_path: Path) -> None:
    cells = cells_of(converted(level), images(1), way, tmp_path / "run")
    for path, expected in EXPECTED[level].items():
        assert cells[path].compute_dtypes == expected, path
        assert cells[path].compute_source == "operators", path
    for container in ("", "head"):  # they run and have no operators of their own
        assert (cells[container].compute_dtypes, cells[container].compute_source) == ({}, "operators"), container


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3", "auto"])
def test_the_values_agree_with_what_is_said(level: str, tmp_path: Path) -> None:
    # Independent of operators and flags: what came out of a float16 kernel has 10 bits of mantissa, whatever it is cast
    # to afterwards; what came out of a float32 one has more, unless it was cast down.
    net = build(ConvNet, level)
    cells = cells_of(net, images(1), "pynative", tmp_path / "run")
    recorded = open_run(tmp_path / "run")
    seen = recorded.tensors(1)
    checked = 0
    for index, site_id in enumerate(seen.site_ids):
        site = recorded.sites[site_id]
        dtypes = set(cells[site.path].compute_dtypes.values()) if site.path in cells else set()
        if site.kind != "output" or not dtypes or site.cell_type not in ("Conv2d", "Dense", "BatchNorm2d", "LayerNorm"):
            continue
        bits = int(seen.rows[index]["mantissa_bits"])
        if dtypes == {HALF} or seen.dtypes[index] == HALF:
            assert bits <= 10, (site.path, dtypes)
        else:
            assert bits > 10, (site.path, dtypes)
        checked += 1
    assert checked == 5


# --- what the issue names ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["pynative", "graph"])
def test_o1_passes_over_what_is_no_dense(way: str, tmp_path: Path, shared_cases: Path) -> None:
    path = shared_cases / "28-net-o1-has-no-effect" / "net.py"
    spec = importlib.util.spec_from_file_location("net_without_o1", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["net_without_o1"] = module  # O1 looks the class up there
    spec.loader.exec_module(module)
    set_mode(way)
    dtypes = {}
    for cls in (module.Net, module.Control):
        net = module.make_net("O1", cls)
        out = tmp_path / cls.__name__
        with watch(net, out=out) as run:
            net(*module.make_inputs())
            run.step()
        for cell in open_run(out).cells:
            if cell.compute_dtypes:
                assert cell.compute_source == "operators"
                dtypes[cls.__name__, cell.path] = set(cell.compute_dtypes.values())
    assert dtypes == {
        ("Net", ""): {SINGLE},  # ops.matmul
        ("Net", "a"): {SINGLE},  # a subclass of nn.Dense
        ("Net", "b"): {SINGLE},  # mint.nn.Linear
        ("Control", "a"): {HALF},
    }


class HandNorm(nn.Cell):
    """A norm that computes in float32 and scales in what came in, as many networks have it."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = Parameter(Tensor(np.ones(8, np.float32)), name="gain")

    def construct(self, x):
        wide = ops.cast(x, ms.float32)
        normed = wide * ops.rsqrt(ops.square(wide).mean(-1, keep_dims=True) + 1e-6)
        return ops.cast(normed, x.dtype) * ops.cast(self.gain, x.dtype)


class Normed(nn.Cell):
    """Such a norm and a layer after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = HandNorm()
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        return self.head(ops.cast(self.norm(ops.cast(x, ms.float16)), ms.float32))


class Branches(nn.Cell):
    """Takes one of two ways, by what comes in."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Dense(8, 8)
        self.right = nn.Dense(8, 8).to_float(ms.float16)
        self.head = nn.Dense(8, 3)

    def construct(self, x):
        if x.sum() > 0:
            x = self.left(x)
        else:
            x = ops.cast(ops.exp(self.right(x)), ms.float32)
        return self.head(x)


class WithList(nn.Cell):
    """A cell in a plain list, beside one that has a path."""

    def __init__(self) -> None:
        super().__init__()
        self.known = nn.Dense(8, 8)
        self.hidden = [nn.Tanh()]

    def construct(self, x):
        return self.hidden[0](self.known(x))


def rows_of_eight(sign: float, steps: int = 1) -> list[tuple[Tensor, Tensor]]:
    x = sign * np.abs(np.random.RandomState(1).randn(4, 8)).astype(np.float32)
    return [(Tensor(x), Tensor(np.arange(4, dtype=np.int32) % 3))] * steps


@pytest.mark.parametrize("way", ["graph", "jit"])
def test_both_branches_of_a_graph_are_seen(way: str, tmp_path: Path) -> None:
    cells = cells_of(build(Branches), rows_of_eight(1.0), way, tmp_path / "run")
    assert cells["left"].compute_dtypes == _DENSE32
    assert cells["right"].compute_dtypes == _DENSE
    assert cells[""].compute_dtypes["Exp"] == HALF  # its output is never cast
    assert cells["head"].compute_source == "operators"


def test_a_branch_taken_later_is_seen_when_it_is_taken(tmp_path: Path) -> None:
    net = build(Branches)
    first = cells_of(net, rows_of_eight(1.0, 2), "pynative", tmp_path / "first")
    assert first["left"].compute_dtypes == _DENSE32
    assert first["left"].compute_source == "operators"
    # It never ran: only its flag is known.
    assert (first["right"].compute_dtypes, first["right"].compute_source) == ({"": HALF}, "flags")
    batches = rows_of_eight(1.0, 2) + rows_of_eight(-1.0, 2)
    later = cells_of(net, batches, "pynative", tmp_path / "later")
    assert later["right"].compute_dtypes == _DENSE
    assert later["right"].compute_source == "operators"


def products(cell: Cell) -> dict[str, str]:
    return {name: dtype for name, dtype in cell.compute_dtypes.items() if "mul" in name.lower()}


@pytest.mark.parametrize("way", ["pynative", "graph"])
def test_one_operator_at_two_precisions_shows_both(way: str, tmp_path: Path) -> None:
    cells = cells_of(build(Normed), rows_of_eight(1.0), way, tmp_path / "run")
    assert sorted(products(cells["norm"]).values()) == [HALF, SINGLE]
    assert any(name.endswith(f"({HALF})") for name in products(cells["norm"]))
    assert not any("cast" in name.lower() for name in cells["norm"].compute_dtypes)


def test_an_upcast_by_hand_holds_in_a_graph_and_not_in_pynative_mode(tmp_path: Path) -> None:
    # Under O3 MindSpore casts each operator's inputs in PyNative mode, but only the cell's inputs in a graph.
    dtypes = {}
    for way in ("pynative", "graph"):
        cells = cells_of(build(Normed, "O3"), rows_of_eight(1.0), way, tmp_path / way)
        dtypes[way] = set(products(cells["norm"]).values())
    assert dtypes == {"pynative": {HALF}, "graph": {HALF, SINGLE}}


@pytest.mark.parametrize("way", ["pynative", "graph"])
def test_a_cell_without_a_path_counts_as_its_parents_own_code(way: str, tmp_path: Path) -> None:
    cells = cells_of(build(WithList), rows_of_eight(1.0), way, tmp_path / "run")
    assert cells["known"].compute_dtypes == _DENSE32
    assert cells[""].compute_dtypes == {"Tanh": SINGLE}


@pytest.mark.parametrize("way", ["pynative", "graph", "jit"])
def test_recomputed_cells(way: str, tmp_path: Path) -> None:
    net = build(ConvNet)
    net.head.recompute()
    net.to_float(ms.float16)
    cells = cells_of(net, images(2), way, tmp_path / "run")
    assert cells["head.0"].compute_dtypes == _DENSE
    assert cells["head.0"].compute_source == "operators"


def test_cells_that_are_not_watched_are_not_taken_for_their_parents_code(tmp_path: Path) -> None:
    net = build(ConvNet, "O2")
    steps = Steps(net, "pynative")
    with watch(net, out=tmp_path / "run", optimizer=steps.optimizer, cells=["head"]) as run:
        steps.run(images(1), run)
    cells = {cell.path: cell for cell in open_run(tmp_path / "run").cells}
    assert cells["head"].compute_dtypes == {}
    assert cells["head.0"].compute_dtypes == _DENSE


# --- no harm ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [ConvNet, Transformer])
@pytest.mark.parametrize(
    ("way", "level"), [*(("pynative", level) for level in ("O0", "O1", "O2", "O3", "auto")), ("jit", "O2")]
)
def test_listening_changes_no_bit(way: str, level: str, make: Any, tmp_path: Path) -> None:
    batches = images(3) if make is ConvNet else tokens(3)
    for _ in range(8 if way == "pynative" else 1):  # CPU kernels try out numbers of threads in their first launches
        plain = Steps(build(make, level), way)
        expected = plain.run(batches)
    steps = Steps(build(make, level), way)
    with watch(steps.net, out=tmp_path / "run", optimizer=steps.optimizer) as run:
        seen = steps.run(batches, run)
    assert seen == expected
    assert weights(steps.net) == weights(plain.net)
    sources = {cell.compute_source for cell in open_run(tmp_path / "run").cells if not cell.path.endswith("blocks")}
    assert sources == {"operators"}


def entry_points() -> list[object]:
    """What listening replaces, as it stands now."""
    import mindspore.ops.auto_generate.gen_ops_prim as primitives
    import mindspore.ops.functional_overload as overloads

    owners: list[Any] = [primitives, overloads, Tensor, nn.Cell, api._JitExecutor, type(api._pynative_executor)]
    return [value for owner in owners for value in vars(owner).values() if callable(value)]


def test_everything_is_put_back_after_the_first_step_and_after_an_exception(tmp_path: Path) -> None:
    net = build(ConvNet)  # an exception inside a to_float cell would leave MindSpore in float16
    found = Found(net)
    steps = Steps(net, "pynative")
    steps.run(images(1))
    plain = entry_points()
    with watch(net, out=tmp_path / "a", optimizer=steps.optimizer) as run:
        assert entry_points() != plain
        steps.run(images(1), run)
        inside = [value for value in entry_points() if value not in plain]
        assert not any(getattr(value, "__module__", "") == "ampdebug.hooks._interpose" for value in inside)
        steps.run(images(1), run)
    assert entry_points() == plain
    found.check()
    failing = watch(net, out=tmp_path / "b", optimizer=steps.optimizer)
    with pytest.raises(ValueError, match="Conv2D"), failing:
        steps.run([(Tensor(np.ones((2, 5), np.float32)), images(1)[0][1])])
    assert entry_points() == plain


def test_two_watches_that_overlap_without_being_nested(tmp_path: Path) -> None:
    net = build(ConvNet, "O2")
    steps = Steps(net, "pynative")
    steps.run(images(1))
    plain = entry_points()
    first, second = (watch(net, out=tmp_path / name, optimizer=steps.optimizer) for name in "ab")
    with first as one:
        two = second.__enter__()
        x, y = images(1)[0]
        loss, _ = steps._step(x, y)
        one.step(loss=loss)
    two.step(loss=loss)
    second.__exit__(None, None, None)
    assert entry_points() == plain
    for name in "ab":
        cells = {cell.path: cell for cell in open_run(tmp_path / name).cells}
        assert cells["conv"].compute_dtypes == {"Conv2D": HALF}


def test_scopes_are_put_back(tmp_path: Path) -> None:
    net = build(ConvNet, "O2")
    before = [cell.get_scope() for _, cell in net.cells_and_names()]
    assert set(before) == {None}
    cells_of(net, images(1), "jit", tmp_path / "run")
    assert [cell.get_scope() for _, cell in net.cells_and_names()] == before
    paths, undo = name_scopes(places(net), "7")
    again, undo_again = name_scopes(places(net), "8")  # the second to come knows the cells by the names they bear
    assert again == paths
    assert set(paths.values()) == set(places(net))
    undo_again()
    undo()
    assert [cell.get_scope() for _, cell in net.cells_and_names()] == before


# --- the weaker sources -----------------------------------------------------------------------------------------------


class BrokenExecutor:
    """An executor of another MindSpore: what it hands out is no graph we can read."""

    def __init__(self, answer: Any) -> None:
        self._answer = answer

    def get_func_graph_proto(self, phase: str, kind: str) -> bytes:
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer


class Traced:
    """A traced call: float16 inside, float32 parameters beside it."""

    entries = ((False, "0", HALF, (2, 3)), (False, "1", "int32", (2,)), (True, "", SINGLE, (2, 3)))


@pytest.mark.parametrize("answer", [RuntimeError("no such phase"), b"", b"\xff\xff not a graph"])
def test_an_unreadable_graph_leaves_trace_and_flags(answer: Any) -> None:
    net = converted("to_float")
    said: list[str] = []
    seen = PrecisionSeen(places(net), said.append)
    for _ in range(2):
        undo = seen.compiling()
        seen.compiled(BrokenExecutor(answer), "phase")
        undo()
    assert len(said) == 1
    assert "could not be seen" in said[0]
    assert seen.of("conv", [Traced()]) == ({"": HALF}, "trace")
    assert seen.of("head", [Traced()]) == ({"": HALF}, "flags")  # a container is not judged by what passes through
    assert seen.of("head.0", []) == ({"": HALF}, "flags")  # from head
    assert seen.of("head.2", []) == ({"": SINGLE}, "flags")  # its own first
    assert seen.of("conv", []) == ({}, "")


def test_the_nearest_parents_flag_is_the_last_resort() -> None:
    net = nn.SequentialCell(nn.SequentialCell(nn.Dense(2, 2), nn.Tanh()), nn.Dense(2, 2))
    net.to_float(ms.float16)
    inner = net[0]
    for cell in (inner[0], inner[1]):
        cell.add_flags(fp16=False)
    inner.add_flags(fp16=False)
    inner.bf16 = True
    seen = PrecisionSeen(places(net), pytest.fail)
    assert seen.of("0.0", []) == ({"": "bfloat16"}, "flags")
    assert seen.of("1", []) == ({"": HALF}, "flags")
    assert seen.of("(loss)", []) == ({}, "")
