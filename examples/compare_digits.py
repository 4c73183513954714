"""Train a small network on scikit-learn's handwritten digits at several AMP levels, and see which one to take.

    python compare_digits.py [--levels O0 O1 O2 O3 auto] [--modes pynative graph] [--steps N] [--seeds N]

The same without this script's options:

    ampdebug compare compare_digits.py:workload --steps 100 --tolerance 0.01

Needs `pip install ampdebug[demo]`; nothing is downloaded. By default it looks at one level in one mode, to be quick.
"""

import argparse
import os

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings would drown the output

import numpy as np
from mindspore import Tensor, nn, ops
from sklearn.datasets import load_digits

import ampdebug

BATCH = 64
TRAINING = 1500  # of 1797 pictures; the rest tells how well it learned


class Net(nn.Cell):
    """Pictures [N, 1, 8, 8] to 10 logits, float32."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3, pad_mode="same")
        self.bn = nn.BatchNorm2d(16)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc = nn.Dense(16 * 16, 10)

    def construct(self, x):
        x = self.pool(ops.relu(self.bn(self.conv(x))))
        return self.fc(x.reshape(x.shape[0], -1))


def load():
    """The digits: float32 [1797, 1, 8, 8] from 0 to 1, and int32 labels, shuffled the same way each time."""
    pictures, labels = load_digits(return_X_y=True)
    order = np.random.RandomState(0).permutation(len(labels))
    return (pictures[order] / 16).astype(np.float32).reshape(-1, 1, 8, 8), labels[order].astype(np.int32)


PICTURES, LABELS = load()


def batches():
    """An epoch, the same each time."""
    for begin in range(0, TRAINING - BATCH + 1, BATCH):
        yield PICTURES[begin : begin + BATCH], LABELS[begin : begin + BATCH]


def accuracy(net):
    """Part of the pictures it has not seen that it gets right."""
    logits = net(Tensor(PICTURES[TRAINING:])).asnumpy()
    return float((logits.argmax(1) == LABELS[TRAINING:]).mean())


workload = ampdebug.Workload(
    network=Net,
    data=batches,
    loss=nn.CrossEntropyLoss(),
    optimizer=lambda parameters: nn.Momentum(parameters, 0.05, 0.9),
    metric=accuracy,
    name="digits",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", default=["O2"], help="beside O0 (default: O2)")
    parser.add_argument("--modes", nargs="+", default=["graph"], help="pynative, graph or both (default: graph)")
    parser.add_argument("--steps", type=int, default=23, help="of each training (default: 23, one epoch)")
    parser.add_argument("--seeds", type=int, default=2, help="that O0 is run with (default: 2)")
    parser.add_argument("--tolerance", type=float, default=0.02, help="of the accuracy (default: 0.02)")
    parser.add_argument("--out", help="store the result with this run, for ampdebug report RUN --html FILE")
    arguments = parser.parse_args()
    # By name: each run has a process of its own, which loads the workload from here.
    report = ampdebug.compare(
        f"{__file__}:workload",
        levels=arguments.levels,
        modes=arguments.modes,
        steps=arguments.steps,
        seeds=arguments.seeds,
        tolerance=arguments.tolerance,
        out=arguments.out,
        progress=lambda text: print(f"… {text}", flush=True),
    )
    print(f"\n{report}")


if __name__ == "__main__":
    main()
