"""Third-party networks from mindcv 0.3.0 under the monitor: every cell recorded, every number unchanged."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn

import ampdebug
from ampdebug.hooks._cells import places

pytestmark = [
    pytest.mark.own_process,
    pytest.mark.skipif(
        importlib.util.find_spec("mindcv") is None,
        reason="mindcv is not installed: pip install --no-deps mindcv==0.3.0, and pip install tqdm pyyaml",
    ),
]

SCALE = 1024.0
SIZE = 32


def resnet() -> nn.Cell:
    from mindcv.models.resnet import BasicBlock, ResNet

    return ResNet(BasicBlock, [1, 1, 1, 1], num_classes=4)


def mobilenet() -> nn.Cell:
    # Version 1: version 3 passes too, but its graphs take minutes to compile.
    from mindcv.models.mobilenetv1 import MobileNetV1

    return MobileNetV1(alpha=0.25, num_classes=4)


def vit() -> nn.Cell:
    from mindcv.models.vit import VisionTransformer

    return VisionTransformer(image_size=SIZE, patch_size=8, embed_dim=32, depth=2, num_heads=2, num_classes=4)


NETS: dict[str, Callable[[], nn.Cell]] = {"resnet": resnet, "mobilenet": mobilenet, "vit": vit}


def make(name: str, level: str) -> nn.Cell:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # mindcv's own: invalid escapes, deprecated initializers
        ms.set_seed(3)
        net = NETS[name]()
    net = net if level == "O0" else amp.auto_mixed_precision(net, level)
    return net.set_train()


def batches() -> list[tuple[Tensor, Tensor]]:
    random = np.random.RandomState(4)
    return [
        (Tensor(random.randn(2, 3, SIZE, SIZE).astype(np.float32)), Tensor(random.randint(0, 4, 2), ms.int32))
        for _ in range(2)
    ]


def train_cell(net: nn.Cell) -> nn.Cell:
    optimizer = nn.Momentum(net.trainable_params(), 0.01, 0.9, loss_scale=SCALE)
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    return nn.TrainOneStepCell(nn.WithLossCell(net, loss), optimizer, sens=SCALE).set_train()


def two_steps(cell: nn.Cell) -> list[float]:
    ms.set_seed(5)  # for dropout
    return [float(cell(*batch).asnumpy()) for batch in batches()]


def values(net: nn.Cell) -> dict[str, bytes]:
    return {parameter.name: parameter.asnumpy().tobytes() for parameter in net.get_parameters()}


def cells_that_run(net: nn.Cell) -> set[str]:
    """By MindSpore's own hooks, in PyNative mode: some cells hang in a network and are never called."""
    ran: set[str] = set()
    handles = []

    def hook(path: str) -> Callable[..., None]:
        return lambda cell, inputs, output: ran.add(path)

    for path, place in places(net).items():
        handles.append(place.outer.register_forward_hook(hook(path)))
    net(batches()[0][0])
    for handle in handles:
        handle.remove()
    return ran


# The two convolutional ones take most of the time; O2, where casts and kept norms meet, stands for their other levels.
CASES = [
    pytest.param(name, mode, level, marks=[] if name == "vit" or level == "O2" else [pytest.mark.slow])
    for name in NETS
    for mode in ("pynative", "graph")
    for level in ("O0", "O2", "O3", "auto")
]


@pytest.mark.parametrize(("name", "mode", "level"), CASES)
def test_two_steps(name: str, mode: str, level: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    ms.set_context(mode=ms.PYNATIVE_MODE)
    expected = cells_that_run(make(name, level))
    assert len(expected) > 20

    ms.set_context(mode=ms.GRAPH_MODE if mode == "graph" else ms.PYNATIVE_MODE)
    bare_net = make(name, level)
    bare = two_steps(train_cell(bare_net)), values(bare_net)
    net = make(name, level)
    cell = train_cell(net)
    with ampdebug.watch(cell, out=tmp_path / "run"):
        watched = two_steps(cell), values(net)
    assert watched[0] == bare[0]
    assert {key for key in bare[1] if watched[1][key] != bare[1][key]} == set()

    with ampdebug.open_run(tmp_path / "run") as run:
        assert run.meta["amp_level"] == level
        assert [step.loss for step in run.steps()] == bare[0]
        for step in run.steps():
            seen = seen_in(run, step.step)
            assert expected - seen["output"] == set()
            assert seen["gradient"] == {p.name for p in net.trainable_params()}
            assert step.loss_scale == SCALE
            assert step.parameters_without_gradient == 0
        assert "finite in all 2 steps" in str(ampdebug.build_report(run))


def seen_in(run: ampdebug.Run, step: int) -> dict[str, set[str]]:
    found: dict[str, Any] = {}
    for number in run.tensors(step).site_ids:
        found.setdefault(run.sites[number].kind, set()).add(run.sites[number].path)
    return found
