"""Inference checks of small networks with known faults."""

from __future__ import annotations

import json
import math
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, amp, nn, ops

import ampdebug
from ampdebug._cli import main
from ampdebug._errors import AmpdebugError, ArgumentError, NoObservationsError
from ampdebug._target import load_workload
from ampdebug.hooks._inference import check_inference, inference_target
from ampdebug.hooks._state import seeded

pytestmark = pytest.mark.own_process

NETS = f"{Path(__file__).with_name('compare_nets.py')}"


class Two(nn.Cell):
    """Two outputs; ``gain`` decides whether the second leaves float16."""

    def __init__(self, gain: float = 1.0) -> None:
        super().__init__()
        self.first = nn.Dense(4, 3)
        self.second = nn.Dense(4, 5)
        self.gain = gain

    def construct(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), ops.exp(self.second(x)) * self.gain


def made(gain: float = 1.0) -> Two:
    with seeded(3):
        return Two(gain)


def batches() -> list[np.ndarray]:
    return [np.random.default_rng(k).normal(size=(6, 4)).astype(np.float32) for k in range(2)]


def test_errors_are_those_of_the_two_networks() -> None:
    report = check_inference(made(), None, batches())
    low = amp.auto_mixed_precision(made(), "O3").set_train(False)
    exact = made().set_train(False)
    for index, found in enumerate(report.outputs):
        one, two = (
            np.concatenate([net(Tensor(x))[index].asnumpy().ravel() for x in batches()]).astype(np.float64)
            for net in (exact, low)
        )
        assert found.max_error == np.abs(one - two).max() > 0
        assert found.mean_error == pytest.approx(np.abs(one - two).mean())
        assert found.relative_error == pytest.approx(np.linalg.norm(one - two) / np.linalg.norm(one))
    assert report.ok
    assert report.outputs[0].top1_agreement == 1.0
    assert {layer.path for layer in report.layers} == {"first", "second", ""}
    assert sum(layer.share for layer in report.layers) == pytest.approx(1.0)
    assert not report.emulated


def test_a_network_is_copied() -> None:
    net = made().set_train(True)
    before = net.first.weight.asnumpy().copy()
    check_inference(net, None, batches()[0], rank=False)
    assert net.training
    assert net.first.weight.asnumpy().tobytes() == before.tobytes()
    assert net(Tensor(batches()[0]))[0].dtype == ms.float32


def test_an_overflow_is_found_with_its_layer(tmp_path: Path) -> None:
    report = check_inference(lambda: made(70000.0), None, batches(), out=tmp_path)
    assert not report.ok
    assert report.outputs[1].nonfinite > 0
    assert "not in float16" in report.problems[0]
    assert report.layers[0].overflows
    with ampdebug.open_run(tmp_path) as run:
        (stored,) = run.results("inference")
    assert stored == report.to_dict()
    json.dumps(stored, allow_nan=False)


def test_the_checkpoint_is_what_runs(tmp_path: Path) -> None:
    trained = made()
    trained.first.weight.set_data(Tensor(np.full((3, 4), 1e5, np.float32)))
    path = tmp_path / "net.ckpt"
    ms.save_checkpoint(trained, str(path))
    assert check_inference(made, None, batches(), rank=False).ok
    report = check_inference(made, path, batches(), rank=False)
    assert report.outputs[0].nonfinite > 0
    assert str(path) in str(report)


def test_bfloat16_is_emulated_and_said_to_be() -> None:
    report = check_inference(made(), None, batches(), dtype="bfloat16")
    assert report.emulated
    assert "it was emulated by rounding" in str(report)
    half = check_inference(made(), None, batches(), rank=False)
    ratio = report.outputs[0].mean_error / half.outputs[0].mean_error
    assert 3 < ratio < 20  # three bits less: a factor of 8
    # 70000 is no trouble there.
    assert (
        check_inference(lambda: made(70000.0), None, batches(), dtype="bfloat16", rank=False).outputs[1].nonfinite == 0
    )


def test_a_workload_brings_data_and_metric() -> None:
    report = inference_target(f"{NETS}:plain", None, batches=2)
    assert report.batches == 2
    assert report.metric_float32 == pytest.approx(report.metric, abs=0.1)
    assert report.criterion.startswith("metric >= ")
    assert report.name == f"{NETS}:plain"
    bare = inference_target(f"{NETS}:plain", None, batches=1, use_metric=False)
    assert math.isnan(bare.metric)
    assert bare.criterion.startswith("relative error")


def test_labels_are_left_out() -> None:
    pairs = [(x, np.zeros(6, np.int32)) for x in batches()]
    assert (
        check_inference(made(), None, pairs, rank=False).outputs
        == check_inference(made(), None, lambda: iter(batches()), rank=False).outputs
    )


def test_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ms.save_checkpoint(compare_plain(), str(tmp_path / "net.ckpt"))
    command = [
        "inference",
        f"{NETS}:plain",
        "--checkpoint",
        str(tmp_path / "net.ckpt"),
        "--batches",
        "1",
        "--no-metric",
    ]
    assert main([*command, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["verdict"], data["batches"], data["level"], data["dtype"]) == ("within", 1, "O3", "float16")
    assert main([*command, "--tolerance", "1e-9"]) == 1
    assert "NOT within the tolerance" in capsys.readouterr().out
    assert main(["inference", f"{NETS}:plain", "--checkpoint", "none.ckpt"]) == 2
    assert "checkpoint='none.ckpt' is not a file" in capsys.readouterr().err


def compare_plain() -> nn.Cell:
    net: nn.Cell = load_workload(f"{NETS}:plain").network()
    return net


class Grumpy(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        if x.dtype == ms.float16:
            raise RuntimeError("Unsupported op [X] on CPU")
        return ops.exp(x)


class Outer(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Dense(4, 4)
        self.inner = Grumpy()

    def construct(self, x: Tensor) -> Tensor:
        return self.inner(self.inlet(x))


def test_a_level_that_does_not_run_is_an_error_with_its_reason() -> None:
    with pytest.raises(AmpdebugError, match=r"MindSpore cannot run Outer at O3: RuntimeError: Unsupported op \[X\]"):
        check_inference(Outer, None, batches())


def test_arguments() -> None:
    for options, message in (
        ({"tolerance": -1.0}, "tolerance=-1.0: must be a number of at least 0"),
        ({"batches": 0}, "batches=0: must be at least 1"),
        ({"better": "more"}, "better='more': must be"),
        ({"dtype": "int8"}, "dtype='int8': must be"),
        ({"level": "O9"}, "level='O9': must be one of"),
    ):
        with pytest.raises(ArgumentError) as caught:
            check_inference(made(), None, batches(), **options)  # type: ignore[arg-type]
        assert message in str(caught.value)
    for data, message in (
        (None, "data is missing"),
        ([], "data gives no batch"),
        ([3], "batch 0 of data is a int"),
        (7, "data is a int"),
        ({"x": 1}, "data is a dict"),
    ):
        with pytest.raises(ArgumentError) as caught:
            check_inference(made(), None, data)
        assert message in str(caught.value)
    ms.set_context(mode=ms.GRAPH_MODE)
    try:
        with pytest.raises(NoObservationsError, match="GRAPH_MODE"):
            check_inference(made(), None, batches())
    finally:
        ms.set_context(mode=ms.PYNATIVE_MODE)
