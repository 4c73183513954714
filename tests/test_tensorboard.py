"""Event files: written by us, read back with TensorBoard's own reader and from a TensorBoard that serves them."""

from __future__ import annotations

import errno
import io
import json
import math
import os
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ampdebug
from ampdebug import ArgumentError, Birth, Cell, Run, Site, Step, StoreError, TensorBoardSink, write_tensorboard
from ampdebug._stats import StatsTable

event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")

OUTPUT = Site("output", "block.attn", cell_type="Attention")
ROOT_INPUT = Site("input", "", cell_type="Net")
INNER_INPUT = Site("input", "block.attn", cell_type="Attention")
GRADIENT = Site("gradient", "block.attn.weight")


def measured(*arrays: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    table = StatsTable(kernel="numpy")
    for array in arrays:
        table.add(array)
    return table.rows, table.exponents


def read(logdir: Path) -> Any:
    keep_all = dict.fromkeys(("scalars", "histograms", "images", "tensors", "compressedHistograms"), 0)
    found = event_accumulator.EventAccumulator(str(logdir), size_guidance=keep_all)
    found.Reload()
    return found


def scalars(found: Any, tag: str) -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in found.Scalars(tag)]


def write_small_run(logdir: Path) -> None:
    rng = np.random.default_rng(0)
    with TensorBoardSink(logdir, cells_share=1) as sink:
        sink.describe([Cell("", "Net", ("block.attn",)), Cell("block.attn", "Attention", asked_dtype="float16")])
        for k in (1, 2, 3):
            output = np.array([0.0, 1e-9, 3.0 * k, np.nan if k == 3 else 1.0], np.float32)
            rows, exponents = measured(output, rng.standard_normal(8), output, np.full(4, 2.0**-k, np.float32))
            scalar = Step(k, loss=1 / k, loss_scale=2.0**k, overflow=k == 2, grad_norm=math.inf if k == 2 else 0.5)
            sink.step(scalar, [OUTPUT, ROOT_INPUT, INNER_INPUT, GRADIENT], rows, exponents)


@pytest.fixture(scope="module")
def logdir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logs") / "run"
    write_small_run(path)
    return path


@pytest.fixture(scope="module")
def found(logdir: Path) -> Any:
    return read(logdir)


def test_scalars_of_the_run(found: Any) -> None:
    assert scalars(found, "loss") == [(1, 1.0), (2, 0.5), (3, float(np.float32(1 / 3)))]
    assert scalars(found, "loss-scale") == [(1, 2.0), (2, 4.0), (3, 8.0)]
    assert scalars(found, "overflow") == [(1, 0.0), (2, 1.0), (3, 0.0)]
    assert scalars(found, "grad-norm") == [(1, 0.5), (2, math.inf), (3, 0.5)]


def test_what_is_unknown_is_not_written(found: Any) -> None:
    assert not {"learning-rate", "update-skipped", "nonfinite-gradients"} & set(found.Tags()["scalars"])


def test_scalars_of_the_cells(found: Any) -> None:
    assert scalars(found, "output-absmax/block.attn") == [(1, 3.0), (2, 6.0), (3, 9.0)]
    assert scalars(found, "output-flushed/block.attn") == [(1, 0.25), (2, 0.25), (3, 0.25)]
    assert scalars(found, "output-nonfinite/block.attn") == [(1, 0.0), (2, 0.0), (3, 0.25)]
    assert scalars(found, "gradient-absmax/block.attn.weight") == [(1, 0.5), (2, 0.25), (3, 0.125)]


def test_inputs_only_of_the_network(found: Any) -> None:
    inputs = [tag for tag in found.Tags()["scalars"] if tag.startswith("input-")]
    assert sorted(inputs) == ["input-absmax/(network)", "input-flushed/(network)", "input-nonfinite/(network)"]


def test_exponent_histograms(found: Any) -> None:
    assert sorted(found.Tags()["histograms"]) == ["gradient-exponents/block.attn.weight", "output-exponents/block.attn"]
    events = found.Histograms("gradient-exponents/block.attn.weight")
    assert [event.step for event in events] == [1, 2, 3]
    for event in events:
        value = event.histogram_value
        assert (value.min, value.max, value.num) == (-event.step, -event.step + 1, 4)
        assert (value.bucket_limit, value.bucket) == ([-event.step + 1], [4])
    value = found.Histograms("output-exponents/block.attn")[0].histogram_value  # 1e-9, 1 and 3: exponents -30, 0 and 1
    filled = {limit - 1: count for limit, count in zip(value.bucket_limit, value.bucket, strict=True) if count}
    assert filled == {-30: 1, 0: 1, 1: 1}
    assert (value.min, value.max) == (-30, 2)


def test_heat_maps_are_images(found: Any) -> None:
    images = ["heat-map/largest-exponent", "heat-map/smallest-exponent", "loss-scale-trace"]
    assert sorted(found.Tags()["images"]) == images
    (event,) = found.Images("heat-map/largest-exponent")
    assert event.step == 3
    assert event.encoded_image_string.startswith(b"\x89PNG")
    assert min(event.width, event.height) > 20


def test_dtypes_are_text(found: Any) -> None:
    assert [tag for tag in found.Tags()["tensors"] if tag.startswith("dtypes")] == ["dtypes/text_summary"]
    (event,) = found.Tensors("dtypes/text_summary")
    text = event.tensor_proto.string_val[0].decode()
    assert "| (network) | Net |" in text
    assert "| block.attn | Attention | float16 |" in text


@pytest.mark.parametrize("other", ["a b", "a:b", "a|b", "a/b", "ä", "a call 1", "a slot 0", "a #1"])
def test_tags_are_unique_and_as_we_made_them(tmp_path: Path, other: str) -> None:
    sites = [
        Site("output", "a_b"),
        Site("output", other),
        Site("output", "a", call=1),
        Site("output", "a", slot="0"),
        Site("output", "a"),
        Site("output", "a", cell_type="Other"),
    ]
    with TensorBoardSink(tmp_path, cells_share=1) as sink:
        for step in (1, 2):
            sink.step(Step(step), sites, *measured(*(np.full(1, k + 1.0) for k in range(len(sites)))))
    found = read(tmp_path)
    tags = [tag for tag in found.Tags()["scalars"] if tag.startswith("output-absmax/")]
    assert sorted(value for tag in tags for _, value in scalars(found, tag)) == [k for k in range(1, 7) for _ in (1, 2)]
    assert scalars(found, f"output-absmax/{other}") == [(1, 2.0), (2, 2.0)]


def test_tags_of_calls_and_slots(tmp_path: Path) -> None:
    sites = [Site("output", "a"), Site("output", "a", call=1), Site("output", "a", call=1, slot="1.mask")]
    with TensorBoardSink(tmp_path, cells_share=1) as sink:
        sink.step(Step(1), sites, *measured(np.ones(1), np.ones(1), np.ones(1)))
    tags = [tag for tag in read(tmp_path).Tags()["scalars"] if tag.startswith("output-flushed/")]
    assert tags == ["output-flushed/a", "output-flushed/a call 1", "output-flushed/a call 1 slot 1.mask"]


def test_all_nan_is_written_and_an_empty_tensor_says_nothing(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path, cells_share=1) as sink:
        sink.step(Step(1, loss=math.nan), [OUTPUT, GRADIENT], *measured(np.full(3, np.nan), np.empty(0)))
    found = read(tmp_path)
    assert math.isnan(scalars(found, "output-absmax/block.attn")[0][1])
    assert scalars(found, "output-nonfinite/block.attn") == [(1, 1.0)]
    assert not [tag for tag in found.Tags()["scalars"] if tag.startswith("gradient-")]
    assert math.isnan(scalars(found, "loss")[0][1])
    assert found.Tags()["histograms"] == []


def test_cells_are_written_as_often_as_their_share_allows(tmp_path: Path) -> None:
    birth = Birth("forward", "block.attn", "Attention", "output", 0, "", True, False, 1, 0, 0, 4, "float16")
    with TensorBoardSink(tmp_path, cells_share=1e-9) as sink:
        for k in range(1, 11):
            step = Step(k, loss=1.0, forward_birth=birth if k in (4, 5, 8) else None)
            sink.step(step, [OUTPUT], *measured(np.ones(2)))
    found = read(tmp_path)
    assert [step for step, _ in scalars(found, "loss")] == list(range(1, 11))
    assert [step for step, _ in scalars(found, "output-absmax/block.attn")] == [1, 4, 8]


def test_no_cells_with_a_share_of_zero(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path, cells_share=0) as sink:
        sink.step(Step(1, loss=1.0), [OUTPUT], *measured(np.ones(2)))
    assert read(tmp_path).Tags()["scalars"] == ["loss"]


@pytest.mark.parametrize("share", [-0.1, 1.5, math.nan])
def test_a_bad_share_is_refused(tmp_path: Path, share: float) -> None:
    with pytest.raises(ArgumentError) as caught:
        TensorBoardSink(tmp_path / "logs", cells_share=share)
    assert f"cells_share={share!r}" in str(caught.value)
    assert "from 0 (leave them out) to 1" in str(caught.value)
    assert not (tmp_path / "logs").exists()


def test_a_second_run_in_one_directory_is_refused(logdir: Path) -> None:
    before = sorted(logdir.iterdir())
    with pytest.raises(ArgumentError) as caught:
        TensorBoardSink(logdir)
    assert f"logdir={str(logdir)!r} already holds event files" in str(caught.value)
    assert "Give a directory of its own to each run" in str(caught.value)
    assert sorted(logdir.iterdir()) == before


def test_appending_replaces_the_steps_written_again(tmp_path: Path) -> None:
    with TensorBoardSink(tmp_path) as sink:
        for k in (1, 2, 3):
            sink.step(Step(k, loss=float(k)))
    with TensorBoardSink(tmp_path, append=True) as sink:
        for k in (3, 4):
            sink.step(Step(k, loss=10.0 * k))
    assert len(list(tmp_path.iterdir())) == 2
    assert scalars(read(tmp_path), "loss") == [(1, 1.0), (2, 2.0), (3, 30.0), (4, 40.0)]


def test_what_was_written_is_readable_before_the_file_is_closed(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    sink.step(Step(1, loss=1.0))
    assert scalars(read(tmp_path), "loss") == [(1, 1.0)]
    sink.close()
    sink.close()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError) as caught:
        TensorBoardSink(tmp_path / "file" / "logs")
    assert f"cannot write TensorBoard files in {str(tmp_path / 'file' / 'logs')!r}" in str(caught.value)


class FullDisk(io.BytesIO):
    def write(self, data: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_is_an_error_that_names_the_directory(tmp_path: Path) -> None:
    sink = TensorBoardSink(tmp_path)
    records = sink._file._writer._py_recordio_writer
    records._writer.close()
    records._writer = FullDisk()
    with pytest.raises(StoreError) as caught:
        sink.step(Step(1, loss=1.0))
    assert str(caught.value) == (
        f"cannot write TensorBoard files in {str(tmp_path)!r}: [Errno {errno.ENOSPC}] {os.strerror(errno.ENOSPC)}"
    )
    with pytest.raises(StoreError, match="cannot write TensorBoard files"):
        sink.close()
    sink.close()


# --- a recorded run ---------------------------------------------------------------------------------------------------


def recorded_steps(count: int) -> list[tuple[Step, list[tuple[Site, np.ndarray]]]]:
    bad = Birth("forward", "fc", "Dense", "output", 0, "", True, False, 1, 0, 0, 2, "float16")
    return [
        (
            Step(k, loss=1 / k, forward_birth=bad if k in (33, 34) else None),
            [
                (Site("input", "fc", cell_type="Dense"), np.full(2, k, np.float32)),
                (Site("output", "fc", cell_type="Dense"), np.array([k, np.nan if k in (33, 34) else 1.0], np.float16)),
            ],
        )
        for k in range(1, count + 1)
    ]


def test_a_recorded_run(record: Callable[..., Run]) -> None:
    run = record(recorded_steps(40), cells=[Cell("fc", "Dense", asked_dtype="float16")])
    (path,) = write_tensorboard(run, "logs")
    assert path.parent == Path("logs")
    found = read(path.parent)
    assert [step for step, _ in scalars(found, "loss")] == list(range(1, 41))
    assert scalars(found, "output-absmax/fc") == [(k, float(k)) for k in range(1, 41)]
    assert [step for step, value in scalars(found, "output-nonfinite/fc") if value] == [33, 34]
    assert [event.step for event in found.Histograms("output-exponents/fc")] == list(range(1, 41))
    assert [event.step for event in found.Images("heat-map/smallest-exponent")] == [40]
    (event,) = found.Tensors("dtypes/text_summary")
    assert "| fc | Dense | float16 |  |  |  | float32 → float16 |  |" in event.tensor_proto.string_val[0].decode()


def test_a_long_run_is_sampled_but_no_birth_is_left_out(record: Callable[..., Run]) -> None:
    run = record(recorded_steps(100))
    progress: list[tuple[int, int]] = []
    (path,) = write_tensorboard(run, "logs", cell_steps=5, progress=lambda done, total: progress.append((done, total)))
    found = read(path.parent)
    assert len(scalars(found, "loss")) == 100
    assert [step for step, _ in scalars(found, "output-absmax/fc")] == [1, 26, 33, 51, 75, 100]
    assert progress == [(k, 6) for k in range(7)]


def test_no_numbers_of_the_cells_when_none_are_asked_for(record: Callable[..., Run]) -> None:
    (path,) = write_tensorboard(record(recorded_steps(3)), "logs", cell_steps=0)
    assert read(path.parent).Tags()["scalars"] == ["loss"]
    with pytest.raises(ArgumentError, match="cell_steps=-1 must be 0"):
        write_tensorboard(record([], rank=1), "other", cell_steps=-1)


def test_each_rank_is_a_run_of_its_own(record: Callable[..., Run]) -> None:
    run = record([(Step(1, loss=1.0), ())])
    record([(Step(1, loss=2.0), ())], rank=1)
    paths = write_tensorboard(run, "logs")
    assert [path.parent for path in paths] == [Path("logs/rank0"), Path("logs/rank1")]
    assert [scalars(read(path.parent), "loss") for path in paths] == [[(1, 1.0)], [(1, 2.0)]]


def test_a_damaged_step_is_left_out_and_named(record: Callable[..., Run]) -> None:
    record(recorded_steps(5)).close()
    with sqlite3.connect("run/ampdebug-rank0.sqlite") as connection:
        connection.execute("UPDATE tensors SET data = x'00' WHERE step = 3")
    connection.close()
    with ampdebug.open_run("run") as run:
        (path,) = write_tensorboard(run, "logs")
        assert [step for step, _ in scalars(read(path.parent), "output-absmax/fc")] == [1, 2, 4, 5]
        assert any("step 3" in problem for problem in run.problems)


# --- a TensorBoard that serves it -------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def server(logdir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a TensorBoard on this machine that shows the small run."""
    port = free_port()
    printed = tmp_path_factory.mktemp("server") / "output.txt"
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir.parent), "--host", "127.0.0.1"]
    with printed.open("wb") as stream:
        child = subprocess.Popen(
            [*command, "--port", str(port), "--load_fast", "false", "--reload_interval", "1"],
            stdin=subprocess.DEVNULL,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    address = f"http://127.0.0.1:{port}"
    deadline = time.monotonic() + 90
    try:
        while True:
            assert child.poll() is None, printed.read_text(errors="replace")
            assert time.monotonic() < deadline, printed.read_text(errors="replace")
            try:
                if "run" in fetch(address, "runs"):
                    break
            except (urllib.error.URLError, ConnectionError):
                pass  # not listening yet
            time.sleep(0.2)
        yield address
    finally:
        child.terminate()
        child.wait(20)


def fetch(address: str, route: str, **query: str) -> Any:
    url = f"{address}/data/{route}?{urllib.parse.urlencode(query)}"
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.loads(answer.read())


def test_tensorboard_serves_the_scalars(server: str) -> None:
    tags = fetch(server, "plugin/scalars/tags")["run"]
    assert {"loss", "loss-scale", "output-absmax/block.attn"} <= set(tags)
    points = fetch(server, "plugin/scalars/scalars", run="run", tag="loss-scale")
    assert [(step, value) for _, step, value in points] == [(1, 2.0), (2, 4.0), (3, 8.0)]


def test_tensorboard_serves_the_histograms(server: str) -> None:
    tag = "gradient-exponents/block.attn.weight"
    bars = fetch(server, "plugin/histograms/histograms", run="run", tag=tag)
    assert [step for _, step, _ in bars] == [1, 2, 3]
    for _, step, buckets in bars:
        assert sum(count for *_, count in buckets) == pytest.approx(4)
        assert min(low for low, _, count in buckets if count) >= -step
        assert max(high for _, high, count in buckets if count) <= -step + 1


def test_tensorboard_serves_the_heat_map(server: str) -> None:
    tag = "heat-map/largest-exponent"
    (entry,) = fetch(server, "plugin/images/images", run="run", tag=tag, sample="0")
    with urllib.request.urlopen(f"{server}/data/plugin/images/individualImage?{entry['query']}", timeout=20) as answer:
        assert answer.headers["Content-Type"] == "image/png"
        assert answer.read(8) == b"\x89PNG\r\n\x1a\n"


def test_tensorboard_serves_the_dtypes(server: str) -> None:
    (tag,) = fetch(server, "plugin/text/tags")["run"]
    (entry,) = fetch(server, "plugin/text/text", run="run", tag=tag)
    assert "<td>block.attn</td>" in entry["text"]
    assert "<td>float16</td>" in entry["text"]
