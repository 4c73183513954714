"""The answer of a bisection kept in a file, so that a later one can be compared with it: "same set as last release".

The file is JSON for a repository: one culprit an entry, sorted, with what stays the same while code moves — the
operator, the cell path, the name of the source file and the text of the line. Line numbers, ranks and scores are not in
it. Where MindSpore, the level or the way of measuring is another one, the answer may be too; the file says which they
were.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampdebug._bisect_result import BisectResult, Unit
from ampdebug._errors import ArgumentError, FormatError

FORMAT = "ampdebug-expect-1"


@dataclass(frozen=True, slots=True, order=True)
class Sensitive:
    """One culprit by what does not change while the code around it does.

    Attributes:
        path: Cell path.
        operator: As in the table: ``"Reshape → ReduceMean"``; the cell type for a whole cell.
        file: Name of the source file, without folders.
        source: Text of the line.
    """

    path: str
    operator: str
    file: str
    source: str

    @staticmethod
    def of(unit: Unit) -> Sensitive:
        """From a unit of an answer."""
        return Sensitive(unit.path, unit.operator, os.path.basename(unit.file), unit.source)

    def __str__(self) -> str:
        where = f" in {self.file}: {self.source}" if self.file else ""
        return f"{self.operator} of {self.path or '(root)'}{where}"


@dataclass(frozen=True, slots=True)
class Expectation:
    """What a bisection is expected to find.

    Attributes:
        level: The level it was searched under.
        status: The kind of answer.
        sensitive: The culprits, sorted; the same one twice if two calls on one line look alike.
    """

    level: str
    status: str
    sensitive: tuple[Sensitive, ...]

    @staticmethod
    def of(result: BisectResult) -> Expectation:
        """From an answer."""
        return Expectation(
            result.level, result.status, tuple(sorted(Sensitive.of(culprit.unit) for culprit in result.culprits))
        )

    @staticmethod
    def read(path: str | os.PathLike[str]) -> Expectation:
        """From a file.

        Raises:
            ArgumentError: There is no such file.
            FormatError: It is not one of these files.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ArgumentError(
                f"expect={os.fspath(path)!r}: there is no such file; --update-expect writes it from this answer"
            ) from None
        except (UnicodeDecodeError, json.JSONDecodeError) as error:
            raise FormatError(f"{os.fspath(path)} is not JSON: {error}") from error
        return _parsed(data, os.fspath(path))

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the file, in one step and with its folder."""
        data = {"format": FORMAT, **asdict(self)}
        target = Path(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        fresh = target.with_name(target.name + ".new")
        fresh.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        os.replace(fresh, target)


@dataclass(frozen=True, slots=True)
class Comparison:
    """An answer beside what was expected. ``str()`` says it in words.

    Attributes:
        added: Culprits that were not expected.
        removed: Expected ones that are none any more.
        other: Differences of another kind, one sentence each: an answer of another kind, another level.
    """

    added: tuple[Sensitive, ...]
    removed: tuple[Sensitive, ...]
    other: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Nothing changed."""
        return not (self.added or self.removed or self.other)

    def __str__(self) -> str:
        if self.same:
            return "the sensitive set is as expected"
        lines = ["the sensitive set changed:", *(f"  {sentence}" for sentence in self.other)]
        lines += [f"  added, must stay in float32 now: {item}" for item in self.added]
        lines += [f"  removed, no longer needed: {item}" for item in self.removed]
        return "\n".join(lines)


def compare_expected(result: BisectResult, path: str | os.PathLike[str]) -> Comparison:
    """Compares an answer with the file of an earlier one.

    Args:
        result: The answer.
        path: The file.

    Raises:
        ArgumentError: There is no such file.
        FormatError: It is not one of these files.
    """
    return difference(Expectation.read(path), Expectation.of(result))


def difference(expected: Expectation, found: Expectation) -> Comparison:
    """What of ``found`` is not as ``expected``."""
    old, new = Counter(expected.sensitive), Counter(found.sensitive)
    other = []
    if expected.level != found.level:
        other.append(f"the level is {found.level}, and the file is of {expected.level}")
    if expected.status != found.status:
        other.append(f"the answer is {found.status!r}, and was {expected.status!r}")
    return Comparison(tuple(sorted((new - old).elements())), tuple(sorted((old - new).elements())), tuple(other))


def _parsed(data: Any, name: str) -> Expectation:
    wanted = f"{name} is not a file of expected operators"
    if not isinstance(data, Mapping) or data.get("format") != FORMAT:
        raise FormatError(f'{wanted}: it lacks \'"format": "{FORMAT}"\'; --update-expect writes such files')
    level, status, sensitive = data.get("level"), data.get("status"), data.get("sensitive")
    if not isinstance(level, str) or not isinstance(status, str) or not isinstance(sensitive, list):
        raise FormatError(f"{wanted}: 'level' and 'status' must be text and 'sensitive' a list")
    items = []
    for item in sensitive:
        if not isinstance(item, Mapping) or {k: type(v) for k, v in item.items()} != dict.fromkeys(
            Sensitive.__dataclass_fields__, str
        ):
            raise FormatError(
                f"{wanted}: an entry of 'sensitive' must have the texts {', '.join(Sensitive.__dataclass_fields__)}"
            )
        items.append(Sensitive(**item))
    return Expectation(level, status, tuple(sorted(items)))
