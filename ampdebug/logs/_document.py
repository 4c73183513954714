"""JSON documents (``trainer_state.json``, an exported history): their innermost objects, each as one line."""

from __future__ import annotations

import re
from collections.abc import Iterator

from ampdebug.logs._source import LINE_LIMIT, Block

_BEGIN = re.compile(rb"\s*(?:\{\s*\n|\[\s*\{|\[\s*\n)")
_MORE = re.compile(rb"^[ \t]*[\]}][ \t]*\n\s*(?=[^\s\[\]{},]|\[[^\s\[\]{])", re.MULTILINE)
"""The document has ended, and text follows."""

_OBJECT = re.compile(rb"\{[^{}]{1,%d}\}" % LINE_LIMIT)


class Documents:
    """Turns a document that spans lines into blocks of one object a line.

    Attributes:
        found: The log is such a document.
    """

    def __init__(self) -> None:
        self.found = False
        self._carry = b""
        self._line = 1

    def look(self, head: bytes) -> None:
        """Decide by the first bytes of the log: a configuration printed as JSON, then other lines, is none."""
        self.found = _BEGIN.match(head) is not None and _MORE.search(head) is None

    def lines(self, block: Block) -> Iterator[Block]:
        """The objects of a block, each with the number of the line it begins on."""
        data = self._carry + block.data
        line = self._line if self._carry else block.line
        at = 0
        for match in _OBJECT.finditer(data):
            line += data.count(b"\n", at, match.start())
            at = match.start()
            yield Block(match.group().replace(b"\n", b" ").replace(b"\r", b" "), line)
        rest = data[max(at, len(data) - 2 * LINE_LIMIT) :]
        last = _OBJECT.match(data, at) if at else None
        begin = last.end() if last is not None else len(data) - len(rest)
        self._line = line + data.count(b"\n", at, begin)
        self._carry = data[begin:] if len(data) - begin <= 2 * LINE_LIMIT else b""
        if not self._carry:
            self._line = block.line + block.data.count(b"\n")
