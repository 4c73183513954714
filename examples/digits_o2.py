"""Watch a mixed-precision training go wrong, find the lines that did it, and fix them.

A small convolution and attention net learns scikit-learn's handwritten digits at level O2 (float16) with a dynamic loss
scale. Its softmax is written by hand, as people do, and forgets to subtract the maximum: no list of MindSpore knows it,
so O2 runs it in float16, where exp(x) is infinite from x = 11.1 on. After some steps the scores get there: the monitor
shows in which cell, the bisection in which lines, and the patched source trains at O2 without a fault, as O0 (float32)
does.

    python digits_o2.py [--out DIR] [--steps N] [--pynative]

Needs `pip install ampdebug[demo]`; nothing is downloaded. Writes below DIR (runs/digits; runs/digits-2 and so on if
that exists already).
"""

import argparse
import importlib.util
import os
import sys
from itertools import chain, count
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings would drown the output

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops
from sklearn.datasets import load_digits

import ampdebug

BATCH = 64
TRAINING = 1500  # of 1797 pictures; the rest tells how well it learned


class HandWrittenSoftmax(nn.Cell):
    """Right in exact arithmetic; in float16 exp(11.1) is already infinite, and inf / inf is NaN."""

    def construct(self, scores):
        weights = ops.exp(scores)
        return weights / weights.sum(-1, keepdims=True)


class Attention(nn.Cell):
    def __init__(self, size):
        super().__init__()
        self.query = nn.Dense(size, size)
        self.key = nn.Dense(size, size)
        self.value = nn.Dense(size, size)
        self.softmax = HandWrittenSoftmax()
        self.scale = 2 * size**-0.5  # sharper than usual

    def construct(self, x):
        scores = ops.matmul(self.query(x), self.key(x).swapaxes(-1, -2)) * self.scale
        return ops.matmul(self.softmax(scores), self.value(x))


class Net(nn.Cell):
    """Pictures [N, 1, 8, 8] to 10 logits, float32: a convolution, then attention among its 16 places."""

    def __init__(self, size=32):
        super().__init__()
        self.conv = nn.Conv2d(1, size, 3, stride=2, pad_mode="same")
        self.bn = nn.BatchNorm2d(size)
        self.relu = nn.ReLU()
        places = np.random.RandomState(1).randn(1, 16, size) * 0.5
        self.place = Parameter(Tensor(places.astype(np.float32)), name="place")
        self.attention = Attention(size)
        self.norm = nn.LayerNorm((size,))
        self.head = nn.Dense(16 * size, 10)

    def construct(self, x):
        x = self.relu(self.bn(self.conv(x)))
        x = x.reshape(x.shape[0], x.shape[1], 16).swapaxes(1, 2) + self.place
        x = self.norm(x + self.attention(x))
        return self.head(x.reshape(x.shape[0], -1))


def load():
    """The digits: float32 [1797, 1, 8, 8] from 0 to 1, and int32 labels, shuffled the same way each time."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    return (pictures[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order].astype(np.int32)


def workload():
    """The training as a task that the bisection can run: network, batches, loss."""
    pictures, labels = load()
    return ampdebug.Workload(
        network=Net,
        data=[(Tensor(pictures[:BATCH]), Tensor(labels[:BATCH]))],
        loss=nn.CrossEntropyLoss(),
        optimizer=lambda parameters: nn.Adam(parameters, 0.01),
    )


def train(level, out, data, steps, learning_rate):
    """Trains at an AMP level with the monitor on, keeps the first bad step, and says how it went."""
    pictures, labels = data
    ms.set_seed(0)
    net = amp.auto_mixed_precision(Net(), level).set_train()
    optimizer = nn.Adam(net.trainable_params(), learning_rate)
    scaler = amp.DynamicLossScaler(2.0**16, 2, 50)
    loss_function = nn.CrossEntropyLoss()

    def forward(x, y):
        return scaler.scale(loss_function(net(x), y))

    gradient_function = ms.value_and_grad(forward, None, optimizer.parameters)
    batches = np.random.RandomState(1)
    all_well = True
    with ampdebug.watch(net, out=out, optimizer=optimizer, loss_scale=scaler, keep_bad_steps=1) as run:
        for number in range(1, steps + 1):
            chosen = batches.randint(0, TRAINING, BATCH)
            loss, gradients = gradient_function(Tensor(pictures[chosen]), Tensor(labels[chosen]))
            gradients = scaler.unscale(gradients)
            finite = amp.all_finite(gradients)
            if finite:
                optimizer(gradients)
            scaler.adjust(finite)
            step = run.step(loss=scaler.unscale(loss), finite=finite)
            if step is None:  # the monitor has switched itself off and said why
                continue
            turned_bad = all_well and not np.isfinite(step.loss)
            all_well = all_well and not turned_bad
            if turned_bad or number == 1 or number % max(1, steps // 10) == 0:
                note = "   update skipped" if step.update_skipped else ""
                note += "   <- the first loss that is not finite" if turned_bad else ""
                print(
                    f"  step {number:4}   loss {step.loss:8.4f}   loss scale {step.loss_scale:8.0f}{note}", flush=True
                )
    net.set_train(False)
    logits = net(Tensor(pictures[TRAINING:])).asnumpy()
    if np.isfinite(logits).all():
        print(f"  right on {(logits.argmax(1) == labels[TRAINING:]).mean():.1%} of the pictures it has not seen")
    else:
        print("  its outputs for the pictures it has not seen are not finite")


def show(title, out):
    """The report of a run, and its TensorBoard files."""
    print(f"\n{title}\n")
    with ampdebug.open_run(out) as run:
        print(ampdebug.build_report(run))
        ampdebug.write_tensorboard(run, out / "tensorboard")


def find_and_fix(run, mode):
    """Searches what must stay in float32, from the state before the kept bad step of a run.

    Returns:
        Path of a copy of this file with the patch in it, None where there is none that was seen to work.
    """
    ms.set_context(mode=ms.PYNATIVE_MODE)  # operators can be steered there only; the patch is checked in `mode`
    result = ampdebug.bisect(f"{short(__file__)}:workload", run=run, level="O2", out=run)
    print(result)
    if not result.culprits:
        return None
    patch = result.patch(mode=mode)
    print(f"\nThe patch, {patch}")
    if not patch.verified:
        return None
    changed = run / "digits_o2_patched.py"
    for text in patch.files.values():
        changed.write_text(text, encoding="utf-8")
    return changed


def short(path):
    """A path as a person would type it here."""
    path = Path(path)
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def load_module(path):
    """Imports a file."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def fresh(directory):
    """The directory, or the first of DIRECTORY-2, DIRECTORY-3, ... that does not exist: no run is overwritten."""
    numbered = (directory.with_name(f"{directory.name}-{number}") for number in count(2))
    return next(path for path in chain([directory], numbered) if not path.exists())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, default=Path("runs/digits"), help="where the runs go (default: runs/digits)"
    )
    parser.add_argument("--steps", type=int, default=300, help="training steps at each level (default: 300)")
    parser.add_argument("--learning-rate", type=float, default=0.01)
    parser.add_argument("--pynative", action="store_true", help="run in PYNATIVE_MODE; the default is GRAPH_MODE")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be 1 or more")
    ms.set_context(mode=ms.PYNATIVE_MODE if arguments.pynative else ms.GRAPH_MODE)
    out = fresh(arguments.out)
    data = load()

    print(f"1. Level O2: {arguments.steps} steps in float16, dynamic loss scale, monitor on")
    train("O2", out / "O2", data, arguments.steps, arguments.learning_rate)
    show("What the monitor saw at O2:", out / "O2")

    print("\n2. The same training at O0 (float32)")
    train("O0", out / "O0", data, arguments.steps, arguments.learning_rate)
    show("What the monitor saw at O0:", out / "O0")

    kept = list((out / "O2").glob("*step*.npz"))
    if kept:
        print("\n3. Which operators must stay in float32 at O2? Begun in the state before the bad step\n")
        patched = find_and_fix(out / "O2", "pynative" if arguments.pynative else "graph")
        if patched is not None:
            print(f"\n4. Level O2 again, with the patch ({patched})")
            ms.set_context(mode=ms.PYNATIVE_MODE if arguments.pynative else ms.GRAPH_MODE)
            module = load_module(patched)
            module.train("O2", out / "O2-patched", data, arguments.steps, arguments.learning_rate)
            show("What the monitor saw at O2 with the patch:", out / "O2-patched")

    python = short(sys.executable)
    print(
        f"\nCurves of all runs are in {out} (*/tensorboard); to see them:\n"
        f"  {python} -m tensorboard.main --logdir {out}\n"
        f"The tables again, with every cell:\n"
        f"  {python} -m ampdebug report --all {out / 'O2'}"
    )


if __name__ == "__main__":
    main()
