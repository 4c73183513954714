"""Reading ``.safetensors``: eight bytes of length, a JSON header, and the bytes of all tensors.

Format: https://github.com/huggingface/safetensors#format. A header that does not describe every byte exactly once is
refused, as that page asks: offsets in order, no gaps, no overlaps, sizes that fit shape and dtype.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from ampdebug._checkpoint_file import CheckpointFile, Entry, checked
from ampdebug._errors import FormatError

_LIMIT = 100_000_000  # the format's own bound of the header
_DTYPES = {
    "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64", "BOOL": "bool", "I8": "int8",
    "U8": "uint8", "I16": "int16", "U16": "uint16", "I32": "int32", "U32": "uint32", "I64": "int64", "U64": "uint64",
}  # fmt: skip


def looks_like_safetensors(head: bytes) -> bool:
    """By the first bytes: a small number, then a JSON object."""
    return len(head) > 8 and int.from_bytes(head[:8], "little") <= _LIMIT and head[8:9] == b"{"


def read_safetensors(path: Path, stream: BinaryIO, size: int) -> CheckpointFile:
    """Reads the table of contents.

    Args:
        path: For messages.
        stream: The open file, at its beginning.
        size: Its bytes.

    Raises:
        FormatError: It is no such file, or truncated, or contradicts itself.
    """

    def bad(what: str) -> FormatError:
        return FormatError(f"{path} is no safetensors file, or damaged: {what}")

    head = stream.read(8)
    length = int.from_bytes(head, "little")
    if len(head) < 8:
        raise bad(f"it has {len(head)} bytes, and the length of the header takes 8")
    if length > _LIMIT:
        raise bad(f"its header would have {length} bytes, more than the {_LIMIT} that the format allows")
    if 8 + length > size:
        raise bad(f"its header has {length} bytes, and the file ends after {size - 8}: it is cut off")
    header = _header(stream.read(length), bad)
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise bad("its __metadata__ does not map names to texts")
    entries = [_entry(name, told, 8 + length, bad) for name, told in header.items()]
    _covers(sorted(entries, key=lambda entry: entry.pieces[0]), 8 + length, size, bad)
    return CheckpointFile(
        path, "safetensors", size, tuple(checked(path, entry) for entry in entries), tuple(metadata.items())
    )


def _header(data: bytes, bad: Any) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        made = dict(pairs)
        if len(made) < len(pairs):
            raise bad("its header says a name twice")
        return made

    try:
        header = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise bad(f"its header is not JSON ({str(error)[:80]})") from error
    if not isinstance(header, dict):
        raise bad("its header is not a JSON object")
    return header


def _entry(name: str, told: Any, begin: int, bad: Any) -> Entry:
    if not isinstance(told, dict):
        raise bad(f"the header says nothing of {name[:80]!r}")
    dtype, shape, offsets = told.get("dtype"), told.get("shape"), told.get("data_offsets")
    if not isinstance(dtype, str):
        raise bad(f"{name[:80]!r} has no dtype")
    if not _sizes(shape):
        raise bad(f"the shape of {name[:80]!r} is not a list of numbers from 0 on")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise bad(f"data_offsets of {name[:80]!r} are not two numbers in order")
    piece = (begin + offsets[0], offsets[1] - offsets[0])
    return Entry(name, _DTYPES.get(dtype, dtype), tuple(shape), (piece,))


def _sizes(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def _covers(entries: list[Entry], begin: int, size: int, bad: Any) -> None:
    at = begin
    for entry in entries:
        offset, length = entry.pieces[0]
        if offset != at:
            raise bad(
                f"{'a gap' if offset > at else 'an overlap'} of {abs(offset - at)} bytes before {entry.name[:80]!r}"
            )
        at += length
        if at > size:
            raise bad(f"the bytes of {entry.name[:80]!r} end {at - size} bytes after the file, which is cut off")
    if at != size:
        raise bad(f"{size - at} bytes at the end belong to no parameter")
