"""AMPMonitor in `Model.train`: one more callback.

python model_train.py        (needs pip install ampdebug[demo]; writes below ./runs)
"""

import os
import time
from pathlib import Path

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings would drown the output

import mindspore as ms
import mindspore.dataset
import numpy as np
from mindspore import nn
from mindspore.train import LossMonitor, Model
from sklearn.datasets import load_digits

import ampdebug

SCALE = 1024.0


class Net(nn.Cell):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(1, 16, 3)
        self.bn = nn.BatchNorm2d(16)
        self.relu = nn.ReLU()
        self.pool = nn.MaxPool2d(2, 2)
        self.head = nn.Dense(16 * 4 * 4, 10)

    def construct(self, x):
        x = self.pool(self.relu(self.bn(self.conv(x))))
        return self.head(x.reshape(x.shape[0], -1))


def main():
    ms.set_seed(0)
    pictures, labels = load_digits(return_X_y=True)
    pictures = (pictures / 16).astype(np.float32).reshape(-1, 1, 8, 8)
    data = mindspore.dataset.NumpySlicesDataset((pictures, labels.astype(np.int32)), ["x", "y"], shuffle=True)
    data = data.batch(64, drop_remainder=True)

    net = Net()
    model = Model(
        net,
        nn.CrossEntropyLoss(),
        # The optimizer divides by the same number that the manager multiplies with: nothing in MindSpore checks that.
        nn.Momentum(net.trainable_params(), 0.05, 0.9, loss_scale=SCALE),
        amp_level="O2",
        loss_scale_manager=ms.FixedLossScaleManager(SCALE, drop_overflow_update=False),
    )
    out = Path("runs") / time.strftime("model-train-%Y%m%d-%H%M%S")
    # First in the list: LossMonitor raises at a NaN loss, and callbacks behind it would miss that step.
    model.train(2, data, callbacks=[ampdebug.AMPMonitor(out, every=5), LossMonitor(14)])

    with ampdebug.open_run(out) as run:
        print(run)


if __name__ == "__main__":
    main()
