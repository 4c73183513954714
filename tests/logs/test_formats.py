"""Every row of the two tables: its samples say what they should, and no line is of two formats."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ampdebug.logs import BY_NAME, FORMATS, GENERIC
from ampdebug.logs._markers import MARKERS
from ampdebug.logs._scan import WORDS

DOCS = Path(__file__).parents[2] / "docs" / "log-formats.md"

# Read off the sample lines by eye, not by the patterns: (format, number of the sample) -> fields.
EXPECTED = {
    ("mindformers", 0): {
        "epoch": 1,
        "epoch_step": 12,
        "epoch_steps": 500,
        "loss": 10.618,
        "lr": 9.5e-06,
        "overflow": False,
        "scale": 65536.0,
        "grad_norm": 1.4355,
    },
    ("mindformers", 1): {
        "epoch": 1,
        "epoch_step": 12,
        "epoch_steps": 500,
        "loss": 10.618,
        "overflow": True,
        "scale": 32768.0,
        "grad_norm": math.nan,
    },
    ("mindformers", 2): {
        "epoch": 1,
        "epoch_step": 116,
        "epoch_steps": 125,
        "loss": 2.22,
        "lr": 2.4499998e-06,
        "overflow": False,
        "scale": 16384.0,
    },
    ("mindyolo", 0): {
        "epoch": 2,
        "epoch_step": 600,
        "epoch_steps": 1600,
        "loss": math.nan,
        "lr": 0.0954166650772095,
    },
    ("mindocr", 0): {
        "epoch": 1,
        "epoch_step": 900,
        "epoch_steps": 1500,
        "loss": math.nan,
        "lr": 0.00015,
    },
    ("yolox", 0): {
        "epoch": 1,
        "epoch_step": 10,
        "epoch_steps": 1848,
        "lr": 0.000123,
        "loss": 12.3456,
        "overflow": False,
        "scale": 1024.0,
    },
    ("mindone", 0): {
        "epoch": 1,
        "epoch_step": 23,
        "lr": 1e-05,
        "loss": 0.512345,
        "scale": 4096.0,
        "optimizer_step": 22,
    },
    ("mindcv", 0): {
        "epoch": 1,
        "epoch_step": 500,
        "epoch_steps": 10009,
        "loss": 6.784029,
        "lr": 0.04,
    },
    ("loss-monitor", 0): {
        "epoch": 1,
        "epoch_step": 100,
        "loss": 0.3456789,
    },
    ("bert", 0): {
        "epoch": 0,
        "step": 12,
        "loss": 10.4722,
        "overflow": False,
        "scale": 131072.0,
    },
    ("face-recognition", 0): {
        "epoch": 0,
        "step": 100,
        "loss": 17.25,
        "overflow": False,
        "scale": 1024.0,
        "lr": 0.00066,
    },
    ("bert-benchmark", 0): {
        "epoch": 0,
        "step": 12,
        "loss": 10.47,
        "overflow": False,
        "scale": 131072.0,
    },
    ("bert-benchmark", 1): {
        "epoch": 1,
        "step": 12,
        "loss": 10.47,
        "overflow": False,
        "scale": 131072.0,
    },
    ("pangu-alpha", 0): {
        "rank": 0,
        "epoch": 0,
        "step": 5182,
        "loss": 3.98,
        "overflow": True,
        "scale": 65536.0,
    },
    ("pangu-alpha", 1): {
        "rank": 3,
        "epoch": 0,
        "step": 5182,
        "overflow": False,
        "scale": 65536.0,
    },
    ("centerface", 0): {
        "epoch": 1,
        "step": 20,
        "loss": 3.11,
        "overflow": False,
        "scale": 1024.0,
    },
    ("face-detection", 0): {
        "rank": 0,
        "step": 21,
        "loss": 2.31,
        "overflow": False,
        "scale": 1024.0,
        "lr": 0.001,
    },
    ("dlinknet", 0): {
        "rank": 0,
        "epoch": 1,
        "epoch_step": 20,
        "loss": 0.41,
        "scale": 1024.0,
        "overflow": False,
    },
    ("megatron", 0): {
        "step": 120,
        "lr": 6.68e-06,
        "loss": 2.311234,
        "scale": 65536.0,
        "grad_norm": 1.021,
        "skipped": 0,
        "nan_losses": 0,
        "overflow": False,
    },
    ("deepspeed", 0): {
        "step": 10,
        "skipped_total": 6,
        "lr": 9.65e-06,
    },
    ("hf-trainer", 0): {
        "loss": 1.9007,
        "grad_norm": 2.3141672611236572,
        "lr": 1.53e-07,
    },
    ("hf-trainer", 1): {
        "loss": 1.9007,
        "grad_norm": 2.314,
        "lr": 1.53e-07,
    },
    ("fairseq", 0): {
        "epoch": 2,
        "epoch_step": 20,
        "epoch_steps": 3680,
        "loss": 6.019,
        "optimizer_step": 3699,
        "lr": 0.00041,
        "grad_norm": 0.628,
        "scale": 65536.0,
    },
    ("fairseq-json", 0): {
        "epoch": 2,
        "loss": 6.019,
        "step": 3699,
        "lr": 0.00041,
        "grad_norm": 0.628,
        "scale": 65536.0,
    },
    ("swin", 0): {
        "epoch": 0,
        "epoch_step": 400,
        "epoch_steps": 1251,
        "lr": 0.001,
        "loss": 6.7308,
        "grad_norm": 1.1636,
        "scale": 131072.0,
    },
    ("metric-logger", 0): {
        "epoch": 0,
        "epoch_step": 20,
        "epoch_steps": 1251,
        "lr": 1.2e-05,
        "loss": 6.9077,
        "scale": 65536.0,
        "grad_norm": 1.0211,
    },
    ("nanogpt", 0): {
        "step": 120,
        "loss": 3.2145,
    },
    ("mmengine", 0): {
        "epoch": 1,
        "epoch_step": 100,
        "epoch_steps": 3125,
        "lr": 0.1,
        "grad_norm": 3.1416,
        "loss": 2.0611,
    },
    ("mmengine", 1): {
        "step": 100,
        "lr": 0.01,
        "loss": 2.0611,
    },
    ("mmcv", 0): {
        "epoch": 1,
        "epoch_step": 50,
        "epoch_steps": 7330,
        "lr": 0.001978,
        "loss": 2.5,
        "grad_norm": 8.1,
    },
    ("insightface", 0): {
        "loss": 21.1234,
        "lr": 0.001,
        "epoch": 0,
        "step": 20,
        "scale": 65536.0,
    },
    ("wenet", 0): {
        "epoch": 7,
        "epoch_step": 100,
        "loss": 1.234567,
        "lr": 0.00055784,
        "grad_norm": 2.345678,
        "rank": 2,
    },
    ("lightning", 0): {
        "epoch": 0,
        "epoch_step": 45,
        "epoch_steps": 100,
        "loss": 2.31,
    },
    ("progress-bar", 0): {
        "step": 501,
        "loss": math.nan,
        "lr": 1e-05,
    },
    ("maskrcnn-benchmark", 0): {
        "step": 180,
        "loss": 2.3776,
        "lr": 0.023,
    },
    ("maskrcnn-benchmark", 1): {
        "step": 179,
        "loss": 2.378,
        "lr": 0.023,
    },
    ("lightning", 1): {"epoch": 3, "epoch_step": 10, "epoch_steps": 100, "loss": math.nan},
    ("lightning", 2): {"epoch": 0, "epoch_step": 100, "epoch_steps": 10000, "loss": 10.9},
    ("lightning", 3): {"epoch": 0, "epoch_step": 8, "epoch_steps": 32, "loss": 2.31},
    ("progress-bar", 1): {"step": 10, "loss": 2.3123},
    ("timm", 0): {"epoch": 0, "epoch_step": 50, "epoch_steps": 1251, "loss": 6.93, "lr": 1e-6},
    ("torchvision-example", 0): {"epoch": 0, "epoch_step": 10, "epoch_steps": 5005, "loss": 6.9345},
    ("mnist-example", 0): {"epoch": 1, "epoch_step": 640, "epoch_steps": 60000, "loss": 2.300039},
    ("mnist-example", 1): {"epoch": 0, "epoch_step": 25600, "epoch_steps": 1000000, "loss": 6.2383},
    ("cifar-tutorial", 0): {"epoch": 1, "epoch_step": 2000, "loss": 2.173},
    ("ultralytics", 0): {"epoch": 1, "epoch_step": 8, "epoch_steps": 8, "loss": 1.234 + 2.345 + 1.123},
    ("ultralytics", 1): {"epoch": 0, "epoch_step": 16, "epoch_steps": 16, "loss": 0.04325 + 0.05127 + 0.01872},
    ("keras", 0): {"epoch_step": 120, "epoch_steps": 1563, "loss": 2.3012},
    ("keras", 1): {"epoch_step": 120, "epoch_steps": 1563, "loss": 2.3012},
    ("tacotron2", 0): {"step": 6312, "loss": 0.451234, "grad_norm": 0.312345},
    ("tensorflow", 0): {"step": 100, "loss": 2.3012},
    ("tensorflow", 1): {"step": 100, "loss": 2.3012},
    ("clu", 0): {"step": 100, "loss": 2.3012, "lr": 0.1},
    ("paddleclas", 0): {"epoch": 1, "epoch_step": 10, "epoch_steps": 5005, "loss": 7.01234, "lr": 1e-4},
    ("paddledetection", 0): {"epoch": 0, "epoch_step": 20, "epoch_steps": 1000, "loss": 3.4512, "lr": 0.000333},
    ("paddlenlp", 0): {"step": 10, "loss": 2.31234, "lr": 1e-5, "scale": 32768.0},
    ("espnet", 0): {"epoch": 1, "epoch_step": 100, "loss": 92.2, "grad_norm": 12.3, "scale": 65536.0, "lr": 1e-5},
    ("icefall", 0): {"epoch": 1, "epoch_step": 100, "rank": 0, "loss": 0.5123, "lr": 0.025, "scale": 8.0},
    ("json-lines", 0): {"step": 10, "loss": 2.3, "scale": 65536.0, "grad_norm": 1.0, "overflow": False},
    ("json-lines", 1): {"step": 10, "loss": 2.3, "grad_norm": 1.1, "lr": 1e-5},
    ("json-lines", 2): {"epoch": 1, "epoch_step": 50, "loss": math.nan, "grad_norm": 8.1, "lr": 0.0019},
    ("generic", 1): {"epoch": 1, "epoch_step": 100, "epoch_steps": 600, "loss": 2.1234, "scale": 65536.0},
    ("generic", 2): {"step": 120, "loss": 2.3123, "scale": 16384.0, "overflow": True},
    ("generic", 3): {"step": 10, "loss": 2.3123, "scale": 65536.0, "overflow": True},
    ("generic", 0): {
        "step": 1200,
        "loss": 2.3117,
        "lr": 0.0003,
        "grad_norm": 0.91,
        "scale": 32768.0,
    },
}

SAMPLES = [(row.name, place, text) for row in (*FORMATS, GENERIC) for place, text in enumerate(row.sample)]


@pytest.mark.parametrize(("name", "place", "text"), SAMPLES)
def test_sample_says_what_it_should(name: str, place: int, text: str) -> None:
    row = BY_NAME[name]
    line = text.encode()
    assert row.trigger in line
    fields = row.read(line)
    assert fields is not None
    expected = EXPECTED[name, place]
    assert set(fields) == set(expected)
    for key, value in expected.items():
        got = fields[key]
        assert got == value or (got != got and value != value), (key, got, value)


@pytest.mark.parametrize(("name", "place", "text"), SAMPLES)
def test_no_line_is_of_two_formats(name: str, place: int, text: str) -> None:
    line = text.encode()
    others = [row.name for row in FORMATS if row.name != name and row.trigger in line and row.read(line)]
    assert others == []


def test_a_line_of_two_formats_would_be_noticed() -> None:
    both = " ".join((BY_NAME["mindcv"].sample[0], BY_NAME["nanogpt"].sample[0])).encode()
    assert len([row for row in FORMATS if row.trigger in both and row.read(both)]) == 2


@pytest.mark.parametrize("marker", MARKERS, ids=lambda m: f"{m.kind}-{m.trigger.decode()}")
def test_marker_samples(marker: object) -> None:
    for text in marker.samples:  # type: ignore[attr-defined]
        line = text.encode()
        assert marker.trigger in line  # type: ignore[attr-defined]
        assert marker.read(line) is not None, text  # type: ignore[attr-defined]
    for text in marker.not_samples:  # type: ignore[attr-defined]
        assert marker.read(text.encode()) is None, text  # type: ignore[attr-defined]


def test_every_sample_holds_a_word_that_the_search_looks_for() -> None:
    texts = [text for _, _, text in SAMPLES] + [text for marker in MARKERS for text in marker.samples]
    missed = [text for text in texts if not any(word in text.encode() for word in WORDS)]
    assert missed == []


def test_every_format_is_documented() -> None:
    manual = DOCS.read_text(encoding="utf-8")
    assert [row.name for row in (*FORMATS, GENERIC) if f"`{row.name}`" not in manual] == []


@pytest.mark.parametrize(
    "line",
    [
        "",
        "Validation Top_1_Accuracy: 71.2000%, Top_5_Accuracy: 90.5000%, time: 21.477769s",
        "Epoch 2/30, Step 600/1600, step time: 626.57 ms",
        "epoch: [1/20], loss: 2.345, epoch time: 12.3 s",
        "{'eval_loss': 1.2, 'eval_runtime': 3.4, 'epoch': 1.0}",
        "{'train_runtime': 12.3, 'train_loss': 0.5, 'epoch': 3.0}",
        "step 250: train loss 3.1021, val loss 3.1544",
        "Eval result: epoch 1, metrics: {'loss': 1.2}",
    ],
)
def test_lines_of_other_meaning_are_no_steps(line: str) -> None:
    raw = line.encode()
    assert [row.name for row in FORMATS if row.trigger in raw and row.read(raw)] == []


def test_mindformers_without_a_scaler_knows_no_overflow() -> None:
    line = b"{ Epoch:[  1/  2], step:[   12/  500], loss: 10.618, overflow cond: False, loss_scale: False"
    fields = BY_NAME["mindformers"].read(line)
    assert fields is not None
    assert "overflow" not in fields
    assert "scale" not in fields


def test_megatron_vanished_loss() -> None:
    row = BY_NAME["megatron"]
    head = b" iteration 7/ 10 | consumed samples: 1 | elapsed time per iteration (ms): 8.0 | "
    tail = b"number of nan iterations:   0 |"
    nan = row.read(head + b"loss scale: 1.0 | grad norm: nan | number of skipped iterations:   0 | " + tail)
    assert nan is not None
    assert math.isnan(nan["loss"])
    assert nan["overflow"] is False
    skipped = row.read(head + b"loss scale: 65536.0 | number of skipped iterations:   1 | " + tail)
    assert skipped is not None
    assert "loss" not in skipped
    assert skipped["overflow"] is True
