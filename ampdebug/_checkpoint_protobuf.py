"""Reading MindSpore's ``.ckpt``: the messages of checkpoint.proto, straight from the wire format of protocol buffers.

A file is a row of ``Checkpoint`` messages, each with one value, so that it reads as one message with many
(mindspore/train/serialization.py, ``_write_parameter_data``)::

    message Checkpoint { message Value { string tag = 1; TensorProto tensor = 2; MapTensorProto maptensor = 3; }
                         repeated Value value = 1; }
    message TensorProto { repeated int64 dims = 1; string tensor_type = 2; bytes tensor_content = 3; }
    message MapTensorProto { repeated TensorProto tensor = 1; }

A parameter of more than 512 MB is cut into slices: values with the same tag, one after the other, each with the dims of
the whole. A scalar has dims ``[0]``. With ``crc_check`` 17 bytes follow: ``crc_num`` and a CRC-32 in ten bytes. What
the parameters contain is passed over and not read. Wire format: https://protobuf.dev/programming-guides/encoding/
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ampdebug._checkpoint_file import CHUNK, CheckpointFile, Entry, checked
from ampdebug._errors import FormatError

_CRC = b"crc_num"
_TRAILER = len(_CRC) + 10
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_LONGEST_NAME = 1 << 16
_MOST_DIMS = 64

_DTYPES = {
    "Float16": "float16", "Float32": "float32", "Float64": "float64", "BFloat16": "bfloat16", "Bool": "bool",
    **{f"{sign}{bits}": f"{sign}{bits}".lower() for sign in ("Int", "UInt") for bits in (8, 16, 32, 64)},
}  # fmt: skip


class _Reader:
    """Fields of nested messages in a file, by position; nothing past ``end`` is read."""

    def __init__(self, path: Path, stream: BinaryIO, size: int) -> None:
        self.path, self.stream, self.size = path, stream, size

    def bad(self, position: int, what: str) -> FormatError:
        return FormatError(f"{self.path} is no MindSpore checkpoint, or damaged: {what} at byte {position}")

    def varint(self, end: int) -> int:
        begin = self.stream.tell()
        value = 0
        for shift in range(0, 70, 7):
            byte = self.stream.read(1)
            if not byte or self.stream.tell() > end:
                raise self.bad(begin, "a number is cut off")
            value |= (byte[0] & 0x7F) << shift
            if byte[0] < 0x80:
                return value
        raise self.bad(begin, "a number has more than 10 bytes")

    def fields(self, begin: int, end: int) -> Iterator[tuple[int, int, int, int]]:
        """``(number, wire type, position, length)`` of each field; a varint's length is its value."""
        at = begin
        while at < end:
            self.stream.seek(at)
            key = self.varint(end)
            number, wire = key >> 3, key & 7
            if number == 0:
                raise self.bad(at, "a field has number 0")
            if wire == _VARINT:
                value = self.varint(end)
                at = self.stream.tell()
                yield number, wire, at, value
                continue
            if wire == _BYTES:
                length = self.varint(end)
            elif wire in (_FIXED32, _FIXED64):
                length = 4 if wire == _FIXED32 else 8
            else:
                raise self.bad(at, f"a field has wire type {wire}")
            position = self.stream.tell()
            if position + length > end:
                raise self.bad(at, f"a field of {length} bytes ends {position + length - end} bytes too late, cut off")
            yield number, wire, position, length
            at = position + length

    def text(self, position: int, length: int, limit: int) -> str:
        if length > limit:
            raise self.bad(position, f"a name has {length} bytes")
        self.stream.seek(position)
        data = self.stream.read(length)
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self.bad(position, "a name is not UTF-8") from error


def read_ckpt(path: Path, stream: BinaryIO, size: int) -> CheckpointFile:
    """Reads the table of contents.

    Args:
        path: For messages.
        stream: The open file.
        size: Its bytes.

    Raises:
        FormatError: It is no such file, or truncated, or contradicts itself.
    """
    reader = _Reader(path, stream, size)
    end = size
    crc: bool | None = None
    if size > _TRAILER:
        stream.seek(size - _TRAILER)
        trailer = stream.read(_TRAILER)
        if trailer.startswith(_CRC):
            end = size - _TRAILER
            crc = _checksum(stream, end) == int.from_bytes(trailer[len(_CRC) :], "big")
    found: list[Entry] = []
    for number, wire, position, length in reader.fields(0, end):
        if number != 1 or wire != _BYTES:
            raise reader.bad(position, f"field {number} stands where a parameter should")
        entry = _value(reader, position, position + length)
        if found and found[-1].name == entry.name and entry.dtype != "maptensor":
            last = found[-1]
            if (last.dtype, last.shape) != (entry.dtype, entry.shape):
                raise reader.bad(position, f"two slices of {entry.name!r} differ in dtype or shape")
            found[-1] = Entry(entry.name, entry.dtype, entry.shape, (*last.pieces, *entry.pieces))
        elif not (found and found[-1].name == entry.name):
            found.append(entry)
    if not found:
        raise FormatError(f"{path} holds no parameter")
    entries: dict[str, Entry] = {}
    repeated = []
    for entry in found:
        if entry.name in entries:
            repeated.append(entry.name)
        entries[entry.name] = checked(path, _scalar(entry))
    return CheckpointFile(path, "ckpt", size, tuple(entries.values()), repeated=tuple(dict.fromkeys(repeated)), crc=crc)


def _checksum(stream: BinaryIO, end: int) -> int:
    stream.seek(0)
    value = 0
    left = end
    while left:
        data = stream.read(min(left, CHUNK))
        if not data:
            break
        value = zlib.crc32(data, value)
        left -= len(data)
    return value


def _scalar(entry: Entry) -> Entry:
    # MindSpore writes dims [0] for a scalar, and for nothing else that has content.
    if entry.shape == (0,) and entry.bytes:
        return Entry(entry.name, entry.dtype, (), entry.pieces)
    return entry


def _value(reader: _Reader, begin: int, end: int) -> Entry:
    name: str | None = None
    tensor: tuple[int, int] | None = None
    has_map = False
    for number, wire, position, length in reader.fields(begin, end):
        if wire != _BYTES:
            raise reader.bad(position, f"field {number} of a parameter has wire type {wire}")
        if number == 1:
            name = reader.text(position, length, _LONGEST_NAME)
        elif number == 2:
            tensor = (position, position + length)
        elif number == 3:
            has_map = True
    if name is None:
        raise reader.bad(begin, "a parameter has no name")
    if tensor is None:
        if not has_map:
            raise reader.bad(begin, f"parameter {name!r} has no value")
        return Entry(name, "maptensor", (), ())
    return _tensor(reader, name, *tensor)


def _tensor(reader: _Reader, name: str, begin: int, end: int) -> Entry:
    dims: list[int] = []
    dtype = ""
    content: tuple[int, int] | None = None
    for number, wire, position, length in reader.fields(begin, end):
        if number == 1 and wire == _VARINT:
            dims.append(length)
        elif number == 1 and wire == _BYTES:  # packed
            reader.stream.seek(position)
            while reader.stream.tell() < position + length:
                dims.append(reader.varint(position + length))
        elif number == 2 and wire == _BYTES:
            dtype = reader.text(position, length, 64)
        elif number == 3 and wire == _BYTES:
            content = (position, length)
        if len(dims) > _MOST_DIMS:
            raise reader.bad(begin, f"{name!r} has more than {_MOST_DIMS} dimensions")
    if any(dim >= 1 << 63 for dim in dims):
        raise reader.bad(begin, f"{name!r} has a negative dimension")
    if not dtype or content is None:
        raise reader.bad(begin, f"{name!r} has no {'dtype' if not dtype else 'content'}")
    return Entry(name, _DTYPES.get(dtype, dtype), tuple(dims), (content,))
