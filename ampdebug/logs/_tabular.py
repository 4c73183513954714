"""Tables with a header line: CSV and the like, read by the names of their columns."""

from __future__ import annotations

import math
import re

from ampdebug.logs._format import NUMBER, Fields, LogFormat, number, scale_number
from ampdebug.logs._keys import is_evaluation, meaning


def table_header(line: bytes) -> LogFormat | None:
    """A format made from the header of a table (CSV and the like), None where the line is no such header.

    Args:
        line: ``step,loss,lr``; commas, semicolons or tabs.
    """
    for separator in (b",", b"\t", b";"):
        cells = [cell.strip().strip(b'"') for cell in line.strip().split(separator)]
        if len(cells) < 2 or len(cells) > 400:
            continue
        if any(len(c) > 60 or not re.fullmatch(rb"[A-Za-z_][\w ./\-()%@]{0,59}|", c) for c in cells):
            continue
        names = [cell.decode("ascii", "replace") for cell in cells]
        best: dict[str, tuple[int, int]] = {}
        for place, key in enumerate(names):
            found = None if is_evaluation(key) else meaning(key)
            if found is not None and (found[0] not in best or found[1] < best[found[0]][0]):
                best[found[0]] = (found[1], place)
        if "loss" not in best or not best.keys() & {"step", "iter", "epoch"}:
            continue
        if "step" not in best and "iter" in best:
            best["step"] = best["iter"]
        if "step" not in best:
            best["step"] = best["epoch"]
        best.pop("iter", None)
        best.pop("finite", None)
        wanted = {place: name for name, (_, place) in best.items()}
        value = rb"[^%s\r\n]*" % re.escape(separator)
        parts = [
            rb'\s*"?(?P<%s>%s)?"?\s*' % (wanted[i].encode(), _CELL[wanted[i]]) if i in wanted else value
            for i in range(len(cells))
        ]
        pattern = re.compile(rb"^" + re.escape(separator).join(parts) + rb"\s*$")
        return Table(
            name="table",
            tool="a table with a header: CSV, TSV",
            trigger=separator,
            pattern=pattern,
            sample=(),
            strict=False,
        )
    return None


_CELL = {
    "step": rb"\d{1,15}(?:\.0)?",
    "epoch": rb"\d{1,9}(?:\.\d+)?",
    "rank": rb"\d{1,9}",
    "loss": NUMBER,
    "scale": NUMBER,
    "grad_norm": NUMBER,
    "lr": NUMBER,
    "overflow": rb"[Tt]rue|[Ff]alse|[01](?:\.0)?",
}


class Table(LogFormat):
    """Rows of a table whose header was seen."""

    def read(self, line: bytes) -> Fields | None:
        """The fields of a row, None where the loss and the scale are empty."""
        match = self.pattern.match(line)
        if match is None:
            return None
        texts = match.groupdict()
        fields: Fields = {}
        for name in ("loss", "grad_norm", "lr"):
            text = texts.get(name)
            value = number(text) if text else None
            if value is not None:
                fields[name] = value
        scale = texts.get("scale")
        if scale:
            fields["scale"] = scale_number(scale)
        for name in ("step", "epoch", "rank"):
            text = texts.get(name)
            if text and not (name == "epoch" and b"." in text):
                fields[name] = int(float(text))
        overflow = texts.get("overflow")
        if overflow:
            fields["overflow"] = overflow[:1] in b"tT1"
        if "step" not in fields or ("loss" not in fields and "scale" not in fields):
            return None
        return fields if not math.isinf(fields["step"]) else None
