"""A train cell of one's own that finds overflows and moves its loss scale: `ampdebug.watch` around the loop.

Each call of the cell is a step. What it returns is told apart by type and value, in whatever order it comes.

python train_cell.py        (needs pip install ampdebug[demo]; writes below ./runs)
"""

import os
import time
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings would drown the output

import mindspore as ms
import numpy as np
from mindspore import Tensor, amp, nn, ops
from sklearn.datasets import load_digits

import ampdebug


class TrainStep(nn.TrainOneStepWithLossScaleCell):
    """As many projects have it; the stock one asks an NPU for its overflow flag, this one looks at the gradients."""

    def get_overflow_status(self, status, gradients):
        return ops.logical_not(amp.all_finite(gradients))


def main():
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(0)
    pictures, labels = load_digits(return_X_y=True)
    pictures, labels = (pictures / 16).astype(np.float32), labels.astype(np.int32)

    net = nn.SequentialCell(nn.Dense(64, 32), nn.ReLU(), nn.LayerNorm((32,)), nn.Dense(32, 10))
    net = amp.auto_mixed_precision(net, "O2")
    step = TrainStep(
        nn.WithLossCell(net, nn.CrossEntropyLoss()),
        nn.Momentum(net.trainable_params(), 0.1, 0.9),
        # far too high on purpose: the first steps overflow until it has come down
        nn.DynamicLossScaleUpdateCell(loss_scale_value=2**24, scale_factor=2, scale_window=50),
    ).set_train()

    out = Path("runs") / time.strftime("train-cell-%Y%m%d-%H%M%S")
    chosen = np.random.RandomState(0)
    with ampdebug.watch(step, out=out):
        for _ in range(60):
            batch = chosen.randint(0, len(labels), 64)
            step(Tensor(pictures[batch]), Tensor(labels[batch]))

    with ampdebug.open_run(out) as run:
        print(run)


if __name__ == "__main__":
    main()
