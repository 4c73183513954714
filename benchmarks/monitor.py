"""What watching costs: the step time of a watched loop over that of the bare loop, side by side in one run.

    python benchmarks/monitor.py [--nets cnn,resnet,transformer] [--modes pynative,graph] [--rounds 30] [--json FILE]

Every variant trains its own copy of the same network from the same start. The variants take turns step by step, so that
a machine whose speed drifts slows all of them alike, and each ratio is the median over the rounds of (this variant's
step / the bare step of the same round), once for wall time and once for processor time, which a busy machine disturbs
less. Each network and mode runs in a process of its own. In graph mode every graph is run 40 times before, as far as
``--seconds`` allow, since MindSpore still tunes it then. Variants:

* ``full``      all statistics, every step
* ``every 10``  statistics in one step of ten; the median over windows of ten steps, each the sum of its steps
* ``detached``  watched for two steps, then detached
* ``capture``   all statistics, every step, by buffers instead of callbacks (graph mode; not run by default)
* ``naive``     the usual hook: ``asnumpy()`` and eight numpy reductions a tensor, outputs and gradients only
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import types
from typing import Any

os.environ.setdefault("GLOG_v", "3")

# In its first runs of a graph MindSpore tries each kernel with several numbers of threads.
WARM_UP = 40
NETS = ("cnn", "resnet", "transformer")
MODES = ("pynative", "graph")


def build(name: str) -> Any:
    """A network and a batch for it, the same at every call."""
    import mindspore as ms
    import numpy as np
    from _nets import CNN, ResNet18, Transformer
    from mindspore import Tensor

    ms.set_seed(0)
    np.random.seed(0)  # noqa: NPY002 - MindSpore's initialisers draw from it
    random = np.random.RandomState(0)
    if name == "transformer":
        net, x = Transformer(), Tensor(random.randint(0, 200, (32, 32)).astype(np.int32))
    else:
        net = CNN() if name == "cnn" else ResNet18()
        x = Tensor(random.randn(32 if name == "cnn" else 4, 3, 32, 32).astype(np.float32))
    return net, x, Tensor(random.randint(0, 10, x.shape[0]).astype(np.int32))


class Variant:
    """One training loop."""

    def __init__(self, name: str, net_name: str, level: str, folder: str) -> None:
        from mindspore import amp, nn
        from mindspore.amp import FixedLossScaleManager

        self.name = name
        net, self.x, self.y = build(net_name)
        optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9, loss_scale=1024.0)
        self.cell = amp.build_train_network(
            net,
            optimizer,
            nn.CrossEntropyLoss(),
            level=level,
            loss_scale_manager=FixedLossScaleManager(1024.0, drop_overflow_update=False),
        )
        self.period = 10 if name == "every 10" else 1
        self.warm_up_runs = min(self.period, 2)  # with and without statistics: a graph each
        self.session: Any = None
        self.times: list[tuple[float, float]] = []
        if name in ("full", "every 10", "detached", "capture"):
            from ampdebug.hooks._session import Session

            graph = "capture" if name == "capture" else "callback"
            self.session = Session(
                self.cell, os.path.join(folder, name.replace(" ", "")), every=self.warm_up_runs, graph=graph
            )
            self.session.attach()
        elif name == "naive":
            _naive(self.cell)

    def warm_up(self, number: int) -> None:
        """Runs each graph of this loop once."""
        for _ in range(self.warm_up_runs):
            self.step()
        if self.name == "detached" and number == 1:
            self.session.close()
            self.session = None

    def step(self) -> tuple[float, float]:
        began, used = time.perf_counter(), time.process_time()
        if self.session is not None:
            self.session.begin()
        loss = self.cell(self.x, self.y)
        if self.session is not None:
            self.session.end(loss)
        loss.asnumpy()
        return time.perf_counter() - began, time.process_time() - used


def _naive(cell: Any) -> None:
    """Eight numpy reductions for each output and gradient, where they come by."""
    import mindspore as ms
    import numpy as np
    from mindspore import ops

    kept: list[Any] = []

    def reduce(array: Any) -> Any:
        wide = np.asarray(array, np.float32)
        size = np.abs(wide)
        kept[:] = [
            (
                wide.min(),
                wide.max(),
                size.max(),
                wide.mean(),
                (wide**2).mean(),
                (~np.isfinite(wide)).sum(),
                (wide == 0).sum(),
                ((size < 6.1e-5) & (size > 0)).sum(),
            )
        ]
        return np.zeros(1, np.float32)

    graph = ms.get_context("mode") == ms.GRAPH_MODE
    leaves = [c for _, c in cell.network.cells_and_names() if not list(c.cells())]
    for leaf in leaves:
        if graph:
            emit = ops.Custom(reduce, out_shape=(1,), out_dtype=ms.float32, func_type="pyfunc")
            leaf.construct = types.MethodType(_compiled(leaf.construct, emit), leaf)
        else:
            leaf.register_forward_hook(lambda _cell, _inputs, output: reduce(output.asnumpy()) is None or None)
    for parameter in cell.weights:
        if graph:
            emit = ops.Custom(reduce, out_shape=(1,), out_dtype=ms.float32, func_type="pyfunc")
            parameter.register_hook(_compiled_gradient(emit))
        else:
            parameter.register_hook(lambda gradient: (reduce(gradient.asnumpy()), gradient)[1])


def _compiled(original: Any, emit: Any) -> Any:
    from mindspore import ops

    def construct(self, *args):  # type: ignore[no-untyped-def]
        output = original(*args)
        return ops.depend(output, emit(ops.stop_gradient(output)))

    return construct


def _compiled_gradient(emit: Any) -> Any:
    from mindspore import ops

    def hook(gradient):  # type: ignore[no-untyped-def]
        return ops.depend(gradient, emit(gradient))

    return hook


def measure(net: str, mode: str, level: str, rounds: int, seconds: float, variants: list[str]) -> dict[str, Any]:
    """Runs all variants of one network in one mode, in turns."""
    import mindspore as ms

    from ampdebug._stats import kernel_name

    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    with tempfile.TemporaryDirectory() as folder:
        loops = [Variant(name, net, level, folder) for name in ("bare", *variants)]
        until = time.monotonic() + seconds
        for number in range(WARM_UP if mode == "graph" else 4):
            if number > 4 and time.monotonic() > until:
                break
            for loop in loops:
                loop.warm_up(number)
        for loop in loops:
            if loop.session is not None:
                loop.session.every = loop.period
        bare: list[tuple[float, float]] = []
        until = time.monotonic() + seconds
        done = 0
        while done < rounds and (time.monotonic() < until or done < 10):
            times = {}
            # Another order each round: who runs after whom must not matter.
            for loop in [*loops[done % len(loops) :], *loops[: done % len(loops)]]:
                times[loop.name] = loop.step()
                loop.times.append(times[loop.name])
            bare.append(times["bare"])
            done += 1
        result: dict[str, Any] = {
            "net": net,
            "mode": mode,
            "level": level,
            "rounds": done,
            "bare_ms": statistics.median(wall for wall, _ in bare) * 1e3,
            "kernel": kernel_name(),
            "load": os.getloadavg()[0],
        }
        for loop in loops[1:]:
            result[loop.name] = _ratio(loop, bare, 0)
            result[f"{loop.name} cpu"] = _ratio(loop, bare, 1)
            if loop.session is not None:
                loop.session.close()
    return result


def _ratio(loop: Variant, bare: list[tuple[float, float]], clock: int) -> float:
    mine, base = ([step[clock] for step in times] for times in (loop.times, bare))
    # Any ten steps in a row hold one with statistics.
    width = loop.period
    starts = range(0, len(base) - width + 1, width)
    return statistics.median(sum(mine[at : at + width]) / sum(base[at : at + width]) for at in starts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--level", default="O2")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument(
        "--seconds", type=float, default=90.0, help="time for each network and mode, and for warming up"
    )
    parser.add_argument("--variants", default="full,every 10,detached,naive")
    parser.add_argument("--json", help="write the results to this file, too")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    variants = options.variants.split(",")
    if options.one:
        net, mode = options.one.split(",")
        print(json.dumps(measure(net, mode, options.level, options.rounds, options.seconds, variants)))
        return
    results = []
    print(
        f"{'network':12} {'mode':9} {'bare ms':>9} " + " ".join(f"{name:>13}" for name in variants) + "  rounds  load"
    )
    for net in options.nets.split(","):
        for mode in options.modes.split(","):
            command = [sys.executable, os.path.abspath(__file__), "--one", f"{net},{mode}", "--level", options.level]
            command += ["--rounds", str(options.rounds), "--seconds", str(options.seconds)]
            command += ["--variants", options.variants]
            with tempfile.TemporaryDirectory() as folder:  # MindSpore litters the current folder
                child = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
            if child.returncode:
                raise SystemExit(f"{net}, {mode}: the measuring process failed\n{child.stderr[-3000:]}")
            result = json.loads(child.stdout.strip().splitlines()[-1])
            results.append(result)
            cells = " ".join(f"{result[name]:6.3f} ({result[name + ' cpu']:.2f})" for name in variants)
            print(f"{net:12} {mode:9} {result['bare_ms']:9.1f} {cells}  {result['rounds']:6} {result['load']:5.1f}")
    print(
        f"step time over the bare loop's, wall (processor); statistics by {results[-1]['kernel']}\n"
        "targets: full <= 1.05 (CNNs), 1.10 / 1.15 (transformer, PyNative / graph), every 10 <= 1.02, detached 1.00"
    )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as stream:
            json.dump(results, stream, indent=1)


if __name__ == "__main__":
    main()
