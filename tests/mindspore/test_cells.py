"""Cell paths: the same for one network at every level and under every wrapper; and which cells ``cells=`` picks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mindspore import Model, Tensor, amp, nn
from mindspore.train import Callback

from ampdebug import ArgumentError
from ampdebug.hooks._cells import asked_dtype, cell_type, find_train_cell, places
from ampdebug.hooks._environment import detect_level
from ampdebug.hooks._select import select

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode: test modules can't import each other by themselves
import nets
from nets import LEVELS, build, dataset, images, scale_cell, set_mode

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.chdir(tmp_path)
    yield
    set_mode("pynative")


CONV_NET = {
    "": "ConvNet",
    "conv": "Conv2d",
    "bn": "BatchNorm2d",
    "act": "ReLU",
    "pool": "MaxPool2d",
    "flat": "Flatten",
    "norm": "LayerNorm",
    "head": "SequentialCell",
    "head.0": "Dense",
    "head.1": "Tanh",
    "head.2": "Dense",
}


def types(cell: Any) -> dict[str, str]:
    return {path: place.cell_type for path, place in places(cell).items()}


@pytest.mark.parametrize("level", LEVELS)
def test_paths_and_types_are_the_same_at_every_level_and_in_every_wrapper(level: str) -> None:
    net = build(nets.ConvNet, level)
    assert types(net) == CONV_NET
    with_loss = {**CONV_NET, "(loss)": "CrossEntropyLoss"}
    wrapped = nn.WithLossCell(net, nn.CrossEntropyLoss())
    assert types(wrapped) == with_loss
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    plain = nn.TrainOneStepCell(wrapped, optimizer)
    assert types(plain) == with_loss
    assert types(nn.TrainOneStepCell(net, optimizer)) == CONV_NET
    assert find_train_cell(plain) is plain
    assert find_train_cell(wrapped) is None


class Keep(Callback):
    def on_train_begin(self, run_context: Any) -> None:
        self.network = run_context.original_args().train_network


@pytest.mark.parametrize("level", LEVELS)
def test_paths_and_the_level_under_model(level: str) -> None:
    net = nets.ConvNet()
    optimizer = nn.SGD(net.trainable_params(), 0.1)
    model = Model(net, nn.CrossEntropyLoss(), optimizer, amp_level=level, loss_scale_manager=None)
    keep = Keep()
    model.train(1, dataset(images(1)), callbacks=[keep], dataset_sink_mode=False)
    found = places(keep.network)
    kinds = {path: place.cell_type for path, place in found.items()}
    assert kinds.pop("(loss)") == "CrossEntropyLoss"
    assert kinds == CONV_NET
    assert detect_level(keep.network, found) == level


@pytest.mark.parametrize("level", LEVELS)
def test_the_level_is_read_off_the_network(level: str) -> None:
    net = build(nets.ConvNet, level)
    assert detect_level(net, places(net)) == level
    cell = scale_cell(net)
    assert detect_level(cell, places(cell)) == level


@pytest.mark.parametrize("level", ["O2", "O3"])
def test_the_outer_cell_is_the_wrapper_the_inner_one_the_users(level: str) -> None:
    net = build(nets.ConvNet, level)
    found = places(net)
    assert type(found["bn"].inner) is nn.BatchNorm2d
    assert (found["bn"].outer is not found["bn"].inner) == (level == "O2")
    assert asked_dtype(found["bn"].inner) == ("float32" if level == "O2" else "float16")
    assert asked_dtype(found["conv"].inner) == "float16"


def test_nothing_asked_at_o0() -> None:
    assert {asked_dtype(place.inner) for place in places(build(nets.ConvNet)).values()} == {None}
    net = build(nets.ConvNet)
    net.conv.to_float(nets.ms.float16)
    assert detect_level(net, places(net)) == "manual"


class Twice(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Dense(2, 2)
        self.blocks = nn.CellList([self.one, nn.ReLU(), self.one])
        self.none = None


def test_a_shared_cell_stands_once_with_its_other_paths() -> None:
    found = places(Twice())
    assert list(found) == ["", "one", "blocks", "blocks.1"]
    assert found["one"].aliases == ["blocks.0", "blocks.2"]
    assert found[""].children == ["one", "blocks"]
    assert found["blocks"].children == ["blocks.0", "blocks.1", "blocks.2"]


class NetOpt(nn.Cell):
    """A user's own class whose name ends as O1's do."""

    def construct(self, x):
        return x


def test_a_name_that_only_looks_like_o1() -> None:
    assert cell_type(NetOpt()) == "NetOpt"
    assert detect_level(NetOpt(), places(NetOpt())) == "O0"


@pytest.mark.parametrize(
    ("cells", "picked"),
    [
        (None, list(CONV_NET)),
        ("head.*", ["head.0", "head.1", "head.2"]),
        ("*", list(CONV_NET)),
        ("", [""]),
        ("Dense", ["head.0", "head.2"]),
        (nn.Dense, ["head.0", "head.2"]),
        (nn.Cell, list(CONV_NET)),
        (["conv", nn.LayerNorm, "Tanh"], ["conv", "norm", "head.1"]),
        (("head.[02]",), ["head.0", "head.2"]),
    ],
)
@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_cells_picks_by_path_type_name_and_class(cells: Any, picked: list[str], level: str) -> None:
    assert list(select(places(build(nets.ConvNet, level)), cells)) == picked


def test_an_alias_picks_too() -> None:
    assert list(select(places(Twice()), "blocks.2")) == ["one"]


@pytest.mark.parametrize("cells", ["nosuch", "HEAD.*", nn.Conv1d, ["conv", "nosuch"], 3, [3], [int], int, [], {}])
def test_a_pattern_that_picks_nothing_or_is_none_is_refused(cells: Any) -> None:
    with pytest.raises(ArgumentError, match="cells="):
        select(places(build(nets.ConvNet)), cells)


def test_the_message_names_the_paths() -> None:
    with pytest.raises(ArgumentError) as caught:
        select(places(nets.Mlp()), "nosuch*")
    assert str(caught.value) == (
        "cells='nosuch*' picks no cell of this network; its paths are '', 'first', 'act', 'second' "
        "('' is the network itself)"
    )


def test_a_list_of_scalars_is_no_train_cell() -> None:
    net = nets.Mlp()
    net.optimizer = "adam"  # a name, not an optimizer
    assert find_train_cell(net) is None
    assert np.isfinite(net(Tensor(np.ones((1, 5), np.float32))).asnumpy()).all()
    assert amp.auto_mixed_precision(net, "O3") is not net
    assert list(places(net)) == ["", "first", "act", "second"]
