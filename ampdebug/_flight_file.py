"""One kept training step on disk: the batch, the parameters before it, and what is known of the step.

An ``.npz`` without pickle: every entry is one array in numpy's own format, stored uncompressed, and ``meta`` holds JSON
as bytes. ``docs/replay.md`` describes it. The file is written under another name and renamed, so a file with the right
name is whole; reading checks everything all the same, since a file may come from anywhere.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import struct
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ampdebug._errors import ArgumentError, FormatError, StoreError
from ampdebug._record_rows import from_json, to_json
from ampdebug._records import DTYPE_CODES

npy: Any = np.lib.format  # numpy ships it without types

__all__ = ["KeptArray", "KeptStep", "find_kept_steps", "kept_step_file", "read_kept_step", "write_kept_step"]

FORMAT = "ampdebug-kept-step"
VERSION = 1
PARTIAL = ".partial"
"""What the name of a file ends with until it is whole."""

_NAME = re.compile(r"ampdebug-rank(\d+)-step(\d+)\.npz")
_MAX_DEPTH = 16
# An array's own header (128 and more for many dimensions), twice the archive's, and what the meta data says of it.
_ENTRY_BYTES = 512


@dataclass(frozen=True, slots=True)
class KeptArray:
    """The values of one tensor.

    Attributes:
        values: Of any shape, of a boolean, integer, floating or complex dtype. For bfloat16, which numpy has no dtype
            for, the bits as uint16.
        dtype: Its name, one of ``ampdebug._records.DTYPES``.
    """

    values: npt.NDArray[Any]
    dtype: str

    def widened(self) -> npt.NDArray[Any]:
        """The values in a dtype that numpy has: bfloat16 as float32."""
        if self.dtype != "bfloat16":
            return self.values
        return (self.values.astype(np.uint32) << np.uint32(16)).view(np.float32)  # its bits are the upper half


@dataclass(frozen=True, slots=True)
class KeptStep:
    """What is needed to run one training step again.

    Attributes:
        step: Its number in the run.
        batch: Positional arguments of the step: :class:`KeptArray`, numbers, strings, None, and tuples, lists and dicts
            of these.
        keywords: Names of the last arguments in ``batch``, those that were handed over by name.
        parameters: Parameters and buffers by name; empty where they were too large to keep.
        state_step: The step that ``parameters`` are the values before: ``step`` itself, or an earlier one where they
            come from a copy that is not made every step; None without parameters.
        random: States of random generators before the step, by name.
        facts: Whatever else is known, plain JSON: ``loss``, ``loss_scale``, ``overflow``, ``mode``, ``amp_level``, ...
    """

    step: int
    batch: tuple[Any, ...]
    keywords: tuple[str, ...] = ()
    parameters: Mapping[str, KeptArray] = field(default_factory=dict)
    state_step: int | None = None
    random: Mapping[str, KeptArray] = field(default_factory=dict)
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def file_size(self) -> int:
        """What the file takes at most, in bytes."""
        arrays = [*_arrays(self.batch), *self.parameters.values(), *self.random.values()]
        names = sum(len(name) for name in (*self.parameters, *self.random)) + len(to_json(dict(self.facts), "facts"))
        return sum(array.values.nbytes + _ENTRY_BYTES for array in arrays) + 6 * names + 2048


def _arrays(value: Any) -> Iterator[KeptArray]:
    """The arrays of a batch at any depth."""
    if isinstance(value, KeptArray):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _arrays(item)
    elif isinstance(value, dict):
        yield from _arrays(list(value.values()))


def kept_step_file(directory: str | os.PathLike[str], rank: int, step: int) -> Path:
    """The file that a rank's step has in the directory of its run."""
    return Path(directory) / f"ampdebug-rank{rank}-step{step:06d}.npz"


def find_kept_steps(directory: str | os.PathLike[str], rank: int) -> dict[int, Path]:
    """The kept steps of a rank: ``{step: file}``, ascending. Half-written files are not among them.

    Raises:
        StoreError: The directory can't be read.
    """
    try:
        files = sorted(Path(directory).iterdir())
    except OSError as error:
        raise StoreError(f"cannot read {directory}: {error}") from error
    found = ((_NAME.fullmatch(file.name), file) for file in files)
    return dict(sorted((int(match[2]), file) for match, file in found if match and int(match[1]) == rank))


# --- writing ----------------------------------------------------------------------------------------------------------


def write_kept_step(path: Path, kept: KeptStep) -> int:
    """Writes a step; there is either the whole file afterwards or none.

    Returns:
        The size of the file in bytes.

    Raises:
        ArgumentError: It holds something that has no form in the file; nothing was written.
        StoreError: The file can't be written. Nothing of it is left, unless the process is killed: then a file whose
            name ends in ``.partial`` is, which readers pass over.
    """
    arrays: list[npt.NDArray[Any]] = []
    meta = {
        "format": FORMAT,
        "version": VERSION,
        "step": kept.step,
        "batch": [_encode(item, arrays, f"batch[{i}]") for i, item in enumerate(kept.batch)],
        "keywords": list(kept.keywords),
        "parameters": {name: _encode(array, arrays, name) for name, array in kept.parameters.items()},
        "state_step": kept.state_step,
        "random": {name: _encode(array, arrays, name) for name, array in kept.random.items()},
        "facts": dict(kept.facts),
    }
    text = to_json(meta, "meta").encode()
    partial = path.with_name(path.name + PARTIAL)
    try:
        try:
            with open(partial, "wb") as file:
                with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
                    _put(archive, "meta", np.frombuffer(text, np.uint8))
                    for number, array in enumerate(arrays):
                        _put(archive, f"array{number}", array)
                file.flush()
                os.fsync(file.fileno())
                size = file.tell()
            os.replace(partial, path)
        except BaseException:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise StoreError(f"cannot write {path}: {error}") from error
    return size


def _put(archive: zipfile.ZipFile, name: str, array: npt.NDArray[Any]) -> None:
    with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
        npy.write_array(entry, array, allow_pickle=False)


def _encode(value: Any, arrays: list[npt.NDArray[Any]], where: str, depth: int = 0) -> dict[str, Any]:
    if depth > _MAX_DEPTH:
        raise ArgumentError(f"{where} is nested more than {_MAX_DEPTH} deep")
    if isinstance(value, KeptArray):
        if value.dtype not in DTYPE_CODES or value.values.dtype.kind not in "biufc":
            raise ArgumentError(
                f"{where} is of dtype {value.dtype} ({value.values.dtype}), which has no form in the file"
            )
        arrays.append(
            value.values if value.values.dtype.isnative else value.values.astype(value.values.dtype.newbyteorder("="))
        )
        return {"array": len(arrays) - 1, "dtype": value.dtype}
    if isinstance(value, (tuple, list)):
        items = [_encode(item, arrays, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": items}
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ArgumentError(f"{where} is a dict whose keys are not all strings")
        return {"dict": {key: _encode(item, arrays, f"{where}[{key!r}]", depth + 1) for key, item in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        # JSON has no NaN: a float is kept as its bits say it.
        return {"float": _float_text(value)} if isinstance(value, float) else {"value": value}
    raise ArgumentError(f"{where} is a {type(value).__name__}; tensors, arrays, numbers, strings and None can be kept")


def _float_text(value: float) -> str:
    # There are many NaN, and the text of a float tells only that it is one.
    return f"nan:{struct.pack('>d', value).hex()}" if math.isnan(value) else value.hex()


# --- reading ----------------------------------------------------------------------------------------------------------


def read_kept_step(path: str | os.PathLike[str]) -> KeptStep:
    """Reads a step back. Nothing in the file is executed or unpickled, nor more memory taken than the file is long.

    Raises:
        StoreError: It can't be opened.
        FormatError: It is truncated, damaged, foreign or of a newer version; the message says which.
    """
    path = Path(path)
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size
            with zipfile.ZipFile(file) as archive:
                entries = _entries(archive, size)
                return _parse(archive, entries)
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error}") from error
    except zipfile.BadZipFile as error:
        raise FormatError(f"{path} is truncated, damaged or no .npz file: {error}") from error
    except (_Damage, ValueError, NotImplementedError, EOFError, RuntimeError, OverflowError) as error:
        raise FormatError(f"{path} is no kept step of ampdebug, or is damaged: {error}") from error


class _Damage(Exception):
    """What is wrong with the file being read."""


def _entries(archive: zipfile.ZipFile, size: int) -> dict[str, zipfile.ZipInfo]:
    entries: dict[str, zipfile.ZipInfo] = {}
    for entry in archive.infolist():
        if entry.compress_type != zipfile.ZIP_STORED or entry.file_size != entry.compress_size or entry.flag_bits & 1:
            raise _Damage(f"entry {entry.filename!r} is compressed or encrypted; ampdebug stores arrays as they are")
        if entry.filename in entries:
            raise _Damage(f"entry {entry.filename!r} is there twice")
        entries[entry.filename] = entry
    # Entries that overlap could claim any amount of memory.
    if sum(entry.file_size for entry in entries.values()) > size:
        raise _Damage("its entries add up to more than the file")
    return entries


def _parse(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo]) -> KeptStep:
    raw = _load(archive, entries, "meta")
    meta = from_json(raw.tobytes().decode("utf-8"))
    if not isinstance(meta, dict) or meta.get("format") != FORMAT:
        raise _Damage("its 'meta' is not that of a kept step")
    version = meta.get("version")
    if version != VERSION:
        raise _Damage(f"it has format version {version!r}, and this ampdebug reads version {VERSION}")
    used: set[int] = set()

    def array(node: Any) -> KeptArray:
        if not isinstance(node, dict) or set(node) != {"array", "dtype"} or node["dtype"] not in DTYPE_CODES:
            raise _Damage(f"{str(node)[:80]} stands where an array belongs")
        number = node["array"]
        if type(number) is not int or number in used:
            raise _Damage(f"array {number!r} is named twice, or is no number")
        used.add(number)
        values = _load(archive, entries, f"array{number}")
        name = "uint16" if node["dtype"] == "bfloat16" else node["dtype"]
        if values.dtype != np.dtype(name):
            raise _Damage(f"array {number} holds {values.dtype} where {node['dtype']} was said")
        return KeptArray(values, node["dtype"])

    def decode(node: Any, depth: int = 0) -> Any:
        if not isinstance(node, dict) or depth > _MAX_DEPTH + 1:
            raise _Damage("the batch is not laid out as it should be")
        if "array" in node:
            return array(node)
        if len(node) == 1:
            ((kind, value),) = node.items()
            if kind == "value" and (value is None or isinstance(value, (bool, int, str))):
                return value
            if kind == "float" and isinstance(value, str):
                return _float(value)
            if kind in ("tuple", "list") and isinstance(value, list):
                items = [decode(item, depth + 1) for item in value]
                return tuple(items) if kind == "tuple" else items
            if kind == "dict" and isinstance(value, dict):
                return {key: decode(item, depth + 1) for key, item in value.items()}
        raise _Damage(f"{str(node)[:80]} is no part of a batch")

    step, batch, keywords = meta.get("step"), meta.get("batch"), meta.get("keywords")
    parameters, state_step, random = meta.get("parameters"), meta.get("state_step"), meta.get("random")
    facts = meta.get("facts")
    if type(step) is not int or not isinstance(batch, list) or not isinstance(facts, dict):
        raise _Damage("'step', 'batch' or 'facts' is missing or of the wrong kind")
    if not isinstance(keywords, list) or not all(isinstance(name, str) for name in keywords):
        raise _Damage("'keywords' is not a list of names")
    if len(keywords) > len(batch) or not (state_step is None or type(state_step) is int):
        raise _Damage("'keywords' or 'state_step' does not fit")
    if not isinstance(parameters, dict) or not isinstance(random, dict):
        raise _Damage("'parameters' or 'random' is missing")
    return KeptStep(
        step,
        tuple(decode(node) for node in batch),
        tuple(keywords),
        {name: array(node) for name, node in parameters.items()},
        state_step,
        {name: array(node) for name, node in random.items()},
        facts,
    )


def _load(archive: zipfile.ZipFile, entries: dict[str, zipfile.ZipInfo], name: str) -> npt.NDArray[Any]:
    entry = entries.get(f"{name}.npy")
    if entry is None:
        raise _Damage(f"it has no array {name!r}")
    data = archive.read(entry)  # checks the CRC
    stream = io.BytesIO(data)
    try:
        version = npy.read_magic(stream)
        if version == (1, 0):
            shape, fortran, dtype = npy.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, fortran, dtype = npy.read_array_header_2_0(stream)
        else:
            raise ValueError(f"array format {version}")
    except Exception as error:  # numpy parses the header as Python source; that can fail in any way
        raise _Damage(f"array {name!r} has no readable header: {error}") from error
    if dtype.hasobject:
        raise _Damage(f"array {name!r} holds pickled Python objects, which are never loaded")
    if dtype.kind not in "biufc" or not dtype.isnative:
        raise _Damage(f"array {name!r} is of dtype {dtype}")
    if any(side < 0 for side in shape):
        raise _Damage(f"array {name!r} has shape {shape}")
    # The header may claim any shape: believe it only if the bytes are there.
    count = math.prod(shape)
    if count * dtype.itemsize != len(data) - stream.tell():
        raise _Damage(f"array {name!r} has {len(data) - stream.tell()} bytes and needs {count * dtype.itemsize}")
    flat = np.frombuffer(data, dtype, count, stream.tell())
    return flat.reshape(shape, order="F" if fortran else "C")


def _float(text: str) -> float:
    if not text.startswith("nan:"):
        return float.fromhex(text)
    data = bytes.fromhex(text.removeprefix("nan:"))
    if len(data) != 8:
        raise ValueError(f"{text!r} is no NaN")
    value: float = struct.unpack(">d", data)[0]
    return value
