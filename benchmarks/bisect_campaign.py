"""Faults planted in larger networks, and whether the bisection names exactly them; writes docs/bisect-campaign.md.

    python benchmarks/bisect_campaign.py [--cases N] [--steps N] [--jobs N] [--out FILE]

Five networks (a ResNet-18 and a 4-layer transformer, both narrow; mindcv's resnet, mobilenet and vit on 16 x 16
images), eight cases each: one, two or three operators that overflow, flush to zero or round, at places drawn with fixed
seeds. Whether they are culprits is found out first, without the engine, from networks with explicit casts written by
hand: under the level the whole set must be enough, and in a network otherwise in float32 each of them alone in float16
must be too much. So each one belongs to every sufficient set, and the set is the only answer. A draw that fails this
is drawn anew, and counted.

A probe trains 16 steps and compares logits and gradients with those of float32. What a bisection costs beside its
probes, recording, checks and ranking, is some steps whatever a probe is: ``--steps 1`` shows that.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn

sys.path.insert(0, str(Path(__file__).resolve().parent))

from _faults import PAIRS, SINGLES, TRIPLES, Fault, write_by_hand
from _nets import BasicBlock, Transformer

from ampdebug.hooks._bisection import bisect

ROOT = Path(__file__).resolve().parent.parent
BATCH, SIZE, TOKENS = 8, 16, 8
LEARNING_RATE = 1e-5  # a larger one makes rounding grow to the size of a fault within the steps
LOSS_SCALE = 16.0
DRAWS = 20
TRAINING_STEPS = 16
"""Of one probe, where nothing else is said: the rule for the time is meant for probes that train."""


class NarrowResNet18(nn.Cell):
    """The blocks of a ResNet-18, an eighth as wide."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        blocks, inside = [], width
        for factor, stride in ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1)):
            blocks.append(BasicBlock(inside, factor * width, stride))
            inside = factor * width
        self.blocks = nn.SequentialCell(*blocks)
        self.fc = nn.Dense(inside, 4)

    def construct(self, x: Tensor) -> Tensor:
        x = self.blocks(self.relu(self.bn(self.conv(x))))
        return self.fc(x.mean((2, 3)))


def mindcv_resnet() -> nn.Cell:
    from mindcv.models.resnet import BasicBlock as Block
    from mindcv.models.resnet import ResNet

    return ResNet(Block, [1, 1, 1, 1], num_classes=4)


def mindcv_mobilenet() -> nn.Cell:
    from mindcv.models.mobilenetv1 import MobileNetV1

    return MobileNetV1(alpha=0.25, num_classes=4)


def mindcv_vit() -> nn.Cell:
    from mindcv.models.vit import VisionTransformer

    return VisionTransformer(image_size=SIZE, patch_size=4, embed_dim=32, depth=2, num_heads=2, num_classes=4)


@dataclass(frozen=True, slots=True)
class Net:
    """A network and where faults may go.

    Attributes:
        make: Makes it.
        norms: Paths of normalisations.
        behind: Paths of cells with something to lose behind them.
        wide: Those of them whose output is long enough in its last axis for a softmax.
        limit: Relative error of logits or gradients up to which it is good; some way above what rounding does to it
            without a fault. BatchNorm over few values makes much of it.
        gradients: They count. Not those of mobilenet: its BatchNorms over single pixels make them err by a half in
            float16 without any fault.
        shape: Batch, and height and width of an image (or length of a text).
        words: Its input are numbers of words, not images.
    """

    make: Callable[[], nn.Cell]
    norms: tuple[str, ...]
    behind: tuple[str, ...]
    wide: tuple[str, ...]
    limit: float
    gradients: bool = True
    shape: tuple[int, int] = (BATCH, SIZE)
    words: bool = False


_RESNET_NORMS = ("bn1", *(f"layer{i}.0.bn{j}" for i in (1, 2, 3) for j in (1, 2)))
_MOBILENET_NORMS = ("features.1", *(f"features.{i}.{j}" for i in range(3, 10) for j in (1, 4)))
_TRANSFORMER_BEHIND = tuple(f"blocks.{i}.{name}" for i in range(4) for name in ("v", "out", "up", "down"))
_VIT_BEHIND = tuple(f"blocks.{i}.{name}" for i in range(2) for name in ("attn.proj", "mlp.fc1", "mlp.fc2"))
_OWN_NORMS = ("bn", *(f"blocks.{i}.bn{j}" for i in range(6) for j in (1, 2)))
NETS = {
    "ResNet-18": Net(NarrowResNet18, _OWN_NORMS, _OWN_NORMS, _OWN_NORMS[:5], 0.3),
    "transformer": Net(
        lambda: Transformer(width=32, heads=2),
        tuple(f"blocks.{i}.ln{j}" for i in range(4) for j in (1, 2)),
        _TRANSFORMER_BEHIND,
        _TRANSFORMER_BEHIND,
        0.05,
        shape=(BATCH, TOKENS),
        words=True,
    ),
    "mindcv resnet": Net(mindcv_resnet, _RESNET_NORMS, _RESNET_NORMS, _RESNET_NORMS[:1], 0.3),
    "mindcv mobilenet": Net(
        mindcv_mobilenet, _MOBILENET_NORMS, _MOBILENET_NORMS, _MOBILENET_NORMS[:2], 0.2, gradients=False, shape=(16, 32)
    ),
    "mindcv vit": Net(
        mindcv_vit,
        tuple(f"blocks.{i}.norm{j}" for i in range(2) for j in (1, 2)),
        _VIT_BEHIND,
        _VIT_BEHIND,
        0.05,
    ),
}
SHAPES = (("O2", (1,)), ("O2", (1,)), ("O2", (1, 1)), ("O3", (2,)), ("O2", (2,)), ("O3", (3,)), ("O2", (1, 2)))
"""Of the cases of each network: level, and how many operators each fault has; the eighth is one of two."""
LAST_SHAPES = (("O2", (1, 1, 1)), ("O2", (3,)))
CASES = len(NETS) * (len(SHAPES) + 1)


@dataclass(frozen=True, slots=True)
class Case:
    """One planted case: which faults (by class) stand at which paths.

    Attributes:
        number: From 0 over the whole campaign; the seed too.
        net: A name of ``NETS``.
        level: ``"O2"`` or ``"O3"``.
        faults: ``{path: class}``.
        steps: Training steps of one probe.
        redrawn: Draws before this one that were no culprits by the networks written by hand.
    """

    number: int
    net: str
    level: str
    faults: dict[str, type[Fault]]
    steps: int
    redrawn: int = 0

    @property
    def expected(self) -> Counter[tuple[str, str]]:
        """``(cell path, operator)`` of every culprit, with its number."""
        return Counter((path, operator) for path, fault in self.faults.items() for operator in fault.culprits)

    def make(self) -> nn.Cell:
        """The network with its faults, the same weights in every call."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # mindcv's own
            ms.set_seed(self.number)
            net = NETS[self.net].make()
        for path, fault in self.faults.items():
            _replace(net, path, fault)
        for index, parameter in enumerate(net.get_parameters()):
            parameter.name = f"{index}.{parameter.name}"  # a cell that moved down bears its old name
        return net.set_train()

    def batches(self) -> list[Tensor]:
        """The input of every step."""
        random = np.random.default_rng(self.number)
        batch, size = NETS[self.net].shape
        if NETS[self.net].words:
            return [Tensor(random.integers(0, 200, (batch, size)).astype(np.int32)) for _ in range(self.steps)]
        shape = (batch, 3, size, size)
        return [Tensor(random.normal(size=shape).astype(np.float32)) for _ in range(self.steps)]


def _replace(net: nn.Cell, path: str, fault: type[Fault]) -> None:
    *above, name = path.split(".")
    parent = net
    for part in above:
        parent = parent[int(part)] if part.isdigit() else getattr(parent, part)
    # A container's own way to replace a cell reads the names of all parameters, which mindcv's do not fit.
    parent._cells[name] = fault(parent._cells[name])
    if isinstance(parent, nn.SequentialCell):
        parent.cell_list = list(parent._cells.values())


def cell_at(net: nn.Cell, path: str) -> Any:
    """The fault at a path, in a network under whatever level."""
    return next(cell for name, cell in net.cells_and_names() if name.replace("_backbone.", "") == path)


def case_of(number: int, redrawn: int = 0, steps: int = TRAINING_STEPS) -> Case:
    """The case with this number, as drawn for the ``redrawn``-th time; a probe trains ``steps`` steps."""
    random = np.random.default_rng([number, redrawn])
    place, index = divmod(number, len(SHAPES) + 1)
    name = list(NETS)[place % len(NETS)]
    level, sizes = (*SHAPES, LAST_SHAPES[place % 2])[index]
    net, faults, used = NETS[name], dict[str, type[Fault]](), set[str]()
    for i, size in enumerate(sizes):
        classes = (SINGLES, PAIRS, TRIPLES)[size - 1]
        fault = classes[(index + place + i + redrawn) % len(classes)]
        places = net.norms if fault.before_norm else net.wide if size == 3 else net.behind
        path = str(random.choice([path for path in places if path not in used]))
        used.add(path)
        faults[path] = fault
    return Case(number, name, level, faults, steps, redrawn)


# --- what a probe measures --------------------------------------------------------------------------------------------


def run(case: Case, net: nn.Cell) -> list[np.ndarray[Any, Any]]:
    """Trains some steps; logits and, where they count, all gradients of each as one row each."""
    batch, _ = NETS[case.net].shape
    targets = np.random.default_rng(case.number).normal(size=(batch, 4)).astype(np.float32)
    parameters = net.trainable_params()
    optimizer = nn.SGD(parameters, LEARNING_RATE, loss_scale=LOSS_SCALE) if case.steps > 1 else None
    kept: list[Tensor] = []

    def forward(x: Tensor) -> Tensor:
        logits = net(x).astype(ms.float32)[:, :4]
        kept.append(logits)
        return ((logits - Tensor(targets)) ** 2).mean() * LOSS_SCALE

    step = ms.value_and_grad(forward, None, parameters)
    rows = []
    for x in case.batches():
        _, gradients = step(x)
        rows.append(kept[-1].asnumpy().ravel().copy())
        flat = np.concatenate([gradient.asnumpy().ravel() for gradient in gradients])
        if NETS[case.net].gradients:
            rows.append(flat)
        if optimizer is not None and len(kept) < case.steps:
            optimizer(gradients)
    return rows


def error(exact: Sequence[np.ndarray[Any, Any]], seen: Sequence[np.ndarray[Any, Any]]) -> float:
    """The largest relative distance of a row from the exact one; NaN where a number is not finite."""
    worst = 0.0
    for wanted, row in zip(exact, seen, strict=True):
        if not np.isfinite(row).all():
            return float("nan")
        wide = wanted.astype(np.float64)
        worst = max(worst, float(np.linalg.norm(row - wide) / np.linalg.norm(wide)))
    return worst


@dataclass(frozen=True, slots=True)
class ByHand:
    """What networks with explicit casts say of a case.

    Attributes:
        exact: The rows of float32.
        limit: Up to here an error is good.
        enough: Error under the level with the casts of the whole set.
        without: Error of a float32 network with one culprit in float16, for each.
    """

    exact: list[np.ndarray[Any, Any]]
    limit: float
    enough: float
    without: tuple[float, ...]

    @property
    def holds(self) -> bool:
        """The set is the only minimal one, with something to spare on both sides of the limit."""
        fails = all(not value <= 1.5 * self.limit for value in self.without)
        return fails and self.enough <= self.limit / 1.5


def by_hand(case: Case) -> ByHand:
    """Measures a case without the engine."""
    exact = run(case, case.make())
    converted = amp.auto_mixed_precision(case.make(), case.level)
    for path, fault in case.faults.items():
        write_by_hand(cell_at(converted, path), range(len(fault.culprits)), level=True)
    without = []
    for path, fault in case.faults.items():
        numbers = range(len(fault.culprits))
        for left_out in numbers:
            net = case.make()
            write_by_hand(cell_at(net, path), set(numbers) - {left_out}, level=False)
            without.append(error(exact, run(case, net)))
    return ByHand(exact, NETS[case.net].limit, error(exact, run(case, converted)), tuple(without))


def valid_case(number: int, steps: int = TRAINING_STEPS) -> tuple[Case, ByHand]:
    """The first draw of a case that holds by hand."""
    for redrawn in range(DRAWS):
        case = case_of(number, redrawn, steps)
        seen = by_hand(case)
        if seen.holds:
            return case, seen
    raise SystemExit(f"case {number}: none of {DRAWS} draws is a fault by the networks written by hand")


# --- the bisection ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Row:
    """What came of one case; ``cost`` is the whole bisection in units of one probe, by CPU time."""

    case: Case
    by_hand: ByHand
    result: Any
    found: Counter[tuple[str, str]]
    cost: float
    seconds: float

    @property
    def exact(self) -> bool:
        """Exactly the planted set, proven."""
        return self.found == self.case.expected and self.result.status == "found" and self.result.sufficient

    @property
    def allowed(self) -> int:
        """Probes by the ranked row of the table for so many units and culprits."""
        return allowed_probes(self.result.units, self.case.expected.total())


def allowed_probes(units: int, culprits: int) -> int:
    """The largest number of probes in the table that the search was designed by, for the next larger row."""
    if culprits == 1:
        return 8 if units <= 50 else 16
    return 30


def solve(case: Case, hand: ByHand) -> Row:
    """Bisects one case."""
    costs: list[float] = []

    def evaluate(net: nn.Cell) -> float:
        begin = time.process_time()
        value = error(hand.exact, run(case, net))
        costs.append(time.process_time() - begin)
        return value

    begin, clock = time.process_time(), time.perf_counter()
    result = bisect(case.make, evaluate, level=case.level, better="lower", threshold=hand.limit)
    total = time.process_time() - begin
    found = Counter((site.path, site.operator) for site in result.sites)
    first = len(costs) - result.probes - len(result.confirmations)
    probe = float(np.median(costs[first : first + result.probes] or costs))
    # What its fix would be measured with holds the network, which cannot be sent from one process to another.
    return Row(case, hand, replace(result, origin=None), found, total / probe, time.perf_counter() - clock)


def solved(number: int, steps: int) -> Row:
    """One case, in whatever process."""
    ms.set_context(mode=ms.PYNATIVE_MODE)
    # Operator by operator: the threads of MindSpore's pipeline wait by spinning, and where cores are few and busy a
    # step of a small network takes many times as long with them.
    ms.runtime.launch_blocking()
    return solve(*valid_case(number, steps))


def shown(value: float) -> str:
    """An error for the table."""
    return "NaN" if np.isnan(value) else f"{value:.2g}"


HEADER = (
    "| case | net | level | planted | units | by hand: all, without one | found | probes | table | cost in probes |"
)


def line(row: Row) -> str:
    """One row of the table."""
    case, hand = row.case, row.by_hand
    planted = ", ".join(f"{fault.kind} ×{len(fault.culprits)} at {path}" for path, fault in case.faults.items())
    least = min(hand.without, key=lambda value: np.inf if np.isnan(value) else value)
    missing, more = case.expected - row.found, row.found - case.expected
    verdict = "exact" if row.exact else f"**missed** {dict(missing)}, more {dict(more)}, {row.result.status}"
    allowed = row.result.probes + 6
    cost = f"{row.cost:.1f} {'≤' if row.cost <= allowed else '>'} {allowed}"
    return (
        f"| {case.number} | {case.net} | {case.level} | {planted} | {row.result.units} | {shown(hand.enough)}, "
        f"{shown(least)} | {verdict} | {row.result.probes} | {row.allowed} | {cost} |"
    )


def report(rows: Sequence[Row]) -> str:
    """The page."""
    exact = sum(row.exact for row in rows)
    within = sum(row.result.probes <= row.allowed for row in rows)
    steps = rows[0].case.steps
    in_time = sum(row.cost <= row.result.probes + 6 for row in rows)
    beside = [row.cost - row.result.probes for row in rows]
    kinds = Counter(fault.kind for row in rows for fault in row.case.faults.values())
    means = {
        size: np.mean([row.result.probes for row in rows if row.case.expected.total() == size])
        for size in sorted({row.case.expected.total() for row in rows})
    }
    text = [
        "# Planted faults: what the bisection finds",
        "",
        "Written by `python benchmarks/bisect_campaign.py`, which says how the faults are planted and how they are "
        "proven to be the only answer by networks with explicit casts, before the engine sees them.",
        "",
        f"- **{exact} of {len(rows)} sets found exactly** and proven (sufficient, each one needed)."
        + (f" Not all: the campaign has {CASES} cases." if len(rows) < CASES else ""),
        f"- Probes within the table for a good ranking in {within} of {len(rows)}; in the mean "
        + ", ".join(f"{mean:.1f} for {size} culprit{'s' * (size > 1)}" for size, mean in means.items())
        + ".",
        f"- Cost at most (probes + 6) probes in {in_time} of {len(rows)}, by CPU time, where a probe trains {steps} "
        f"step{'s' * (steps > 1)}: the most beside the probes themselves is {max(beside):.1f}, the mean "
        f"{np.mean(beside):.1f}.",
        f"- Faults: {', '.join(f'{count} {kind}' for kind, count in sorted(kinds.items()))}; "
        f"{sum(row.case.redrawn for row in rows)} draws were no faults by the networks written by hand and were drawn "
        "anew.",
        "",
        "Good is an error of logits and gradients against float32 up to "
        + ", ".join(f"{net.limit} ({name})" for name, net in NETS.items())
        + '. "By hand": the error under the '
        "level with the whole set in float32, and the smallest error of a float32 network with one of the set in "
        "float16.",
        "",
        HEADER,
        "|" + "---|" * (HEADER.count("|") - 1),
        *map(line, rows),
        "",
    ]
    return "\n".join(text)


def main() -> int:
    """Runs the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", help="numbers, as 0-7,12 (default all 40)")
    parser.add_argument("--steps", type=int, default=TRAINING_STEPS, help="training steps of a probe")
    parser.add_argument("--jobs", type=int, default=1, help="cases side by side, each in a process")
    parser.add_argument(
        "--out", type=Path, default=ROOT / "docs" / "bisect-campaign.md", help="written after each case"
    )
    arguments = parser.parse_args()
    # In an order that leaves no kind out of a page that was cut short.
    numbers = np.random.default_rng(0).permutation(CASES).tolist()
    if arguments.cases:
        parts = [part.split("-") for part in arguments.cases.split(",")]
        numbers = [number for first, *last in parts for number in range(int(first), int((last or [first])[0]) + 1)]
    rows = []
    # MindSpore keeps half a gigabyte of each case: a process for each.
    with multiprocessing.get_context("spawn").Pool(arguments.jobs, maxtasksperchild=1) as pool:
        for row in pool.imap_unordered(functools.partial(solved, steps=arguments.steps), numbers):
            rows.append(row)
            print(line(rows[-1]), f"{rows[-1].seconds:.0f} s", flush=True)
            arguments.out.write_text(report(sorted(rows, key=lambda row: row.case.number)), encoding="utf-8")
    return 0 if all(row.exact for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
