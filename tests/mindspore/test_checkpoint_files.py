"""Checkpoints that MindSpore itself wrote, read without it and compared with what it loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.train import serialization

import ampdebug
from ampdebug import summarize
from ampdebug._checkpoint_file import open_checkpoint

pytestmark = pytest.mark.own_process

Format = Literal["ckpt", "safetensors"]
FORMATS: tuple[Format, ...] = ("ckpt", "safetensors")


def parameters() -> list[dict[str, Any]]:
    rng = np.random.RandomState(0)
    arrays = {
        "fc.weight": Tensor(rng.randn(6, 5).astype(np.float32)),
        "half": Tensor(rng.randn(7).astype(np.float16)),
        "brain": Tensor(np.array([1.0, -2.5, 3e38, 1e-30], np.float32)).astype(ms.bfloat16),
        "wide": Tensor(rng.randn(3), ms.float64),
        "scalar": Tensor(2.5, ms.float32),
        "step": Tensor([7], ms.int64),
        "flags": Tensor([True, False]),
        "bad": Tensor(np.array([np.nan, np.inf, 1e5], np.float32)),
    }
    return [{"name": name, "data": Parameter(value, name=name)} for name, value in arrays.items()]


@pytest.mark.parametrize("format", FORMATS)
def test_what_mindspore_saved_is_what_is_read(tmp_path: Path, format: Format) -> None:
    path = str(tmp_path / f"net.{format}")
    saved = {entry["name"]: entry["data"] for entry in parameters()}
    ms.save_checkpoint(parameters(), path, format=format)
    report = ampdebug.audit_checkpoint(path)
    loaded = ms.load_checkpoint(path, format=format)
    assert {row.name for row in report.parameters} == set(loaded) == set(saved)
    for row in report.parameters:
        tensor = loaded[row.name]
        assert (row.dtype, row.shape) == (str(tensor.dtype).lower(), tuple(tensor.shape)), row.name
        if row.dtype == "bfloat16":
            assert row.stats is not None
            exact = tensor.astype(ms.float32).asnumpy()
            assert (row.stats.min, row.stats.max) == (exact.min(), exact.max())
        elif row.dtype.startswith("float"):
            assert row.stats == summarize(tensor.asnumpy())
    slugs = {finding.slug for finding in report.findings}
    assert slugs == {
        "nonfinite-parameters", "low-precision-parameters", "parameters-beyond-float16", "parameters-zero-in-float16"
    }  # fmt: skip


def test_both_formats_hold_the_same(tmp_path: Path) -> None:
    for format in FORMATS:
        ms.save_checkpoint(parameters(), str(tmp_path / f"net.{format}"), format=format)
    report = ampdebug.audit_checkpoint(tmp_path / "net.safetensors", against=tmp_path / "net.ckpt")
    assert report.against is not None
    assert report.against.kind == "equal"
    assert len(report.against.changes) == 6


def test_mindspores_slices_are_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "SLICE_SIZE", 1)  # in kB; 512 MB in earnest
    weight = np.random.RandomState(0).randn(50, 100).astype(np.float32)
    path = str(tmp_path / "large.ckpt")
    ms.save_checkpoint([{"name": "w", "data": Parameter(Tensor(weight), name="w")}], path)
    (entry,) = open_checkpoint(path).entries
    assert len(entry.pieces) > 10
    (row,) = ampdebug.audit_checkpoint(path).parameters
    assert row.stats is not None
    assert (row.shape, row.stats.count) == ((50, 100), 5000)
    assert (row.stats.min, row.stats.max) == (weight.min(), weight.max())


def test_checksum_extras_and_encryption(tmp_path: Path) -> None:
    path = tmp_path / "crc.ckpt"
    ms.save_checkpoint(parameters(), str(path), crc_check=True, append_dict={"epoch": 3, "lr": 0.1, "note": "text"})
    report = ampdebug.audit_checkpoint(path)
    assert "checksum-wrong" not in {f.slug for f in report.findings}
    assert {"epoch": "int64", "lr": "float32", "note": "str"}.items() <= {
        r.name: r.dtype for r in report.parameters
    }.items()
    data = bytearray(path.read_bytes())
    data[data.index(b"fc.weight") + 40] ^= 1
    other = tmp_path / "changed.ckpt"
    other.write_bytes(data)
    assert "checksum-wrong" in {f.slug for f in ampdebug.audit_checkpoint(other).findings}
    ms.save_checkpoint(parameters(), str(tmp_path / "secret.ckpt"), enc_key=b"0123456789abcdef")
    with pytest.raises(ampdebug.FormatError, match="is an encrypted MindSpore checkpoint"):
        ampdebug.audit_checkpoint(tmp_path / "secret.ckpt")


def test_a_trained_network_with_its_optimizer_is_sound(tmp_path: Path) -> None:
    net = nn.SequentialCell(nn.Dense(8, 16), nn.BatchNorm1d(16), nn.Dense(16, 3))
    optimizer = nn.Adam(net.trainable_params(), 1e-3)
    rng = np.random.RandomState(0)

    def loss(x: Any, y: Any) -> Any:
        return ((net(x) - y) ** 2).mean()

    step = ms.value_and_grad(loss, None, optimizer.parameters)
    for _ in range(3):
        optimizer(step(Tensor(rng.randn(16, 8), ms.float32), Tensor(rng.randn(16, 3), ms.float32))[1])
    path = tmp_path / "trained.ckpt"
    ms.save_checkpoint(optimizer, str(path))
    report = ampdebug.audit_checkpoint(path)
    assert report.ok, str(report)
    moments = [row for row in report.parameters if row.is_state]
    assert {row.name.split(".")[0] for row in moments} == {"moment1", "moment2"}
    assert len(moments) == 2 * len(optimizer.parameters)
