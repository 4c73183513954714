"""A checkpoint on disk: which parameters it holds and where their bytes lie; the values are read in pieces."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from ampdebug._errors import FormatError

CHUNK = 8 << 20
"""Bytes read at a time: a multiple of every item size."""

# What a file is that is not a checkpoint of ours, by its first bytes.
_FOREIGN = (
    (b"PK\x03\x04", "a zip archive, as PyTorch's .pt and numpy's .npz are"),
    (b"\x80\x02", "a pickle, as old PyTorch checkpoints are"),
    (b"\x89HDF", "an HDF5 file"),
    (b"\x93NUMPY", "a numpy array"),
    (b"GGUF", "a GGUF file"),
    # magic numbers of mindspore/core/utils/crypto (AES-GCM, AES-CBC, SM4-CBC), in both byte orders
    *((bytes(order), "an encrypted MindSpore checkpoint; decrypt it first (mindspore.load_checkpoint with dec_key)")
      for last in (0xD8, 0xD9, 0xDA, 0xDB)
      for order in ((0x7F, 0x3A, 0x5E, last), (last, 0x5E, 0x3A, 0x7F))),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Entry:
    """One parameter.

    Attributes:
        name: Its name.
        dtype: ``"float32"``, ``"bfloat16"``, ``"int64"``, …; the file's own word for one we do not know.
        shape: Its shape.
        pieces: ``(offset, bytes)`` in the file, in order; MindSpore cuts large parameters into slices.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[tuple[int, int], ...]

    @property
    def elements(self) -> int:
        """How many."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """In the file."""
        return sum(size for _, size in self.pieces)


@dataclass(frozen=True, slots=True)
class CheckpointFile:
    """A checkpoint's table of contents.

    Attributes:
        path: The file.
        format: ``"ckpt"`` or ``"safetensors"``.
        size: In bytes.
        entries: The parameters, in the file's order; the last of several with one name, as MindSpore loads it.
        metadata: What a safetensors file says of itself.
        repeated: Names that occur more than once.
        crc: Whether the checksum at the end is right; None where there is none.
    """

    path: Path
    format: Literal["ckpt", "safetensors"]
    size: int
    entries: tuple[Entry, ...]
    metadata: tuple[tuple[str, str], ...] = ()
    repeated: tuple[str, ...] = ()
    crc: bool | None = None


ITEMSIZES = {
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1, "uint8": 1, "int16": 2, "uint16": 2,
    "int32": 4, "uint32": 4, "int64": 8, "uint64": 8, "bool": 1,
}  # fmt: skip


def open_checkpoint(path: str | os.PathLike[str]) -> CheckpointFile:
    """Reads the table of contents of a ``.ckpt`` or ``.safetensors`` file; which of them it is, its bytes say.

    Raises:
        FormatError: It is neither, or truncated, or contradicts itself. The message names the place.
        OSError: It cannot be read.
    """
    from ampdebug._checkpoint_protobuf import read_ckpt
    from ampdebug._checkpoint_safetensors import looks_like_safetensors, read_safetensors

    path = Path(path)
    if path.is_dir():
        raise FormatError(f"{path} is a directory; give one checkpoint file")
    with path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        head = stream.read(16)
        if not head:
            raise FormatError(f"{path} is empty")
        for magic, what in _FOREIGN:
            if head.startswith(magic):
                raise FormatError(f"{path} is {what}; this reads MindSpore .ckpt and .safetensors")
        stream.seek(0)
        if looks_like_safetensors(head) or path.suffix == ".safetensors":
            return read_safetensors(path, stream, size)
        return read_ckpt(path, stream, size)


def checked(path: Path, entry: Entry) -> Entry:
    """The entry, if its bytes are as many as its shape and dtype say.

    Raises:
        FormatError: They are not.
    """
    item = ITEMSIZES.get(entry.dtype)
    if item is not None and entry.bytes != entry.elements * item:
        raise FormatError(
            f"{path}: parameter {entry.name!r} of shape {entry.shape} and dtype {entry.dtype} takes "
            f"{entry.elements * item} bytes, and the file has {entry.bytes}: it is truncated or damaged"
        )
    return entry


def is_measured(entry: Entry) -> bool:
    """Its values are floats that can be measured."""
    return entry.dtype in ("float16", "bfloat16", "float32", "float64")


def read_chunks(stream: BinaryIO, path: Path, entry: Entry) -> Iterator[npt.NDArray[Any]]:
    """The values of a parameter in pieces of at most ``CHUNK`` bytes; bfloat16 as the uint16 array of its bits.

    Raises:
        FormatError: The file became shorter meanwhile.
    """
    dtype = np.dtype("<u2" if entry.dtype == "bfloat16" else np.dtype(entry.dtype).newbyteorder("<"))
    held = b""
    for offset, size in entry.pieces:
        stream.seek(offset)
        while size:
            data = stream.read(min(size, CHUNK))
            if not data:
                raise FormatError(f"{path}: the bytes of {entry.name!r} end at {stream.tell()}; the file was cut")
            size -= len(data)
            data, held = held + data, b""
            rest = len(data) % dtype.itemsize
            if rest:  # a short read, or a slice that ends inside an element
                data, held = data[:-rest], data[-rest:]
            if data:
                yield np.frombuffer(data, dtype)
