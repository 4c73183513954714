"""Compare AMP levels of a model of mindcv, and check what float16 does to its outputs.

    python compare_mindcv.py [--levels O0 O2 auto] [--modes pynative graph] [--steps N]

Needs mindcv: `pip install --no-deps mindcv==0.3.0` and `pip install tqdm pyyaml`. The model is a small ResNet and the
data are random, so that it is quick; put your own in their place. Nothing is downloaded.
"""

import argparse
import importlib.util
import os
import sys
import warnings

os.environ.setdefault("GLOG_v", "3")  # MindSpore's own warnings would drown the output

import numpy as np
from mindspore import nn, ops

import ampdebug

CLASSES = 4
SIZE = 32


def make_network():
    """A ResNet with one block a stage."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mindcv's own: invalid escapes, deprecated initializers
        from mindcv.models.resnet import BasicBlock, ResNet

        return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=CLASSES)


def batches():
    """Two batches of pictures [4, 3, 32, 32], float32, whose mean colour tells the class."""
    random = np.random.RandomState(0)
    for _ in range(2):
        labels = random.randint(0, CLASSES, 4)
        pictures = random.randn(4, 3, SIZE, SIZE) + labels.reshape(-1, 1, 1, 1)
        yield pictures.astype(np.float32), labels.astype(np.int32)


workload = ampdebug.Workload(
    network=make_network,
    data=batches,
    loss=ops.cross_entropy,
    optimizer=lambda parameters: nn.Momentum(parameters, 0.01, 0.9),
    name="mindcv ResNet",
)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", nargs="+", default=["O2"], help="beside O0 (default: O2)")
    parser.add_argument("--modes", nargs="+", default=["pynative"], help="pynative, graph or both (default: pynative)")
    parser.add_argument("--steps", type=int, default=3, help="of each training (default: 3, to be quick)")
    arguments = parser.parse_args()
    if importlib.util.find_spec("mindcv") is None:
        print(
            "mindcv is not installed, so there is nothing to compare: pip install --no-deps mindcv==0.3.0, and "
            "pip install tqdm pyyaml"
        )
        return 0
    report = ampdebug.compare(
        f"{__file__}:workload",
        levels=arguments.levels,
        modes=arguments.modes,
        steps=arguments.steps,
        seeds=2,
        kernels=False,  # compare_digits.py measures them
        progress=lambda text: print(f"… {text}", flush=True),
    )
    print(f"\n{report}\n")
    print(ampdebug.check_inference(f"{__file__}:workload", level="O3"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
