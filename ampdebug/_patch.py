"""The change to the user's own source that makes the answer of a bisection so."""

from __future__ import annotations

import difflib
import html
import importlib.util
import os
import sysconfig
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ampdebug._errors import AmpdebugError
from ampdebug._sites import OperatorSite

Verify = Callable[[Mapping[str, str], Mapping[str, str]], tuple["bool | None", str]]
"""Runs the network from changed sources. Takes ``{path: text now}`` and ``{path: new text}``; returns whether it passes
(None: could not be tried) and what was measured, or why not."""


@dataclass(frozen=True, slots=True)
class PatchSite:
    """An operator that must stay in float32, and the file its line is in.

    Attributes:
        site: The site as the user's own code has it (not as O1 rewrites it).
        file: Full path; ``""`` where unknown.
    """

    site: OperatorSite
    file: str


@dataclass(frozen=True, slots=True)
class Patch:
    """A change to source files. ``str()`` is the unified diff after one line on what was verified.

    Attributes:
        diff: The unified diff, which ``git apply`` and ``patch -p1`` take. Paths are relative to the current folder
            where the file is below it.
        files: ``{full path: new text}``.
        before: ``{full path: the text the patch was made from}``.
        verified: True: the changed source was run under the level and passed the search's own criterion. False: it was
            run and did not. None: it was not run.
        reason: What was measured, or why it was not.
        left_out: What the patch does not protect, one sentence each.
        notes: What to know about what it does.
    """

    diff: str
    files: Mapping[str, str]
    before: Mapping[str, str]
    verified: bool | None
    reason: str
    left_out: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        word = {True: "verified", False: "NOT verified", None: "not verified"}[self.verified]
        lines = [f"{word}: {self.reason}"]
        lines += [f"left out: {sentence}" for sentence in self.left_out]
        lines += [f"note: {note}" for note in self.notes]
        return "\n".join(lines) + ("\n\n" + self.diff if self.diff else "")

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"

    def write(self, *, backup: bool = True) -> tuple[str, ...]:
        """Writes the changed files.

        Args:
            backup: Keep what was there as ``FILE.orig``.

        Returns:
            Their paths.

        Raises:
            AmpdebugError: A file is not what the patch was made from, or a backup would replace an older one of
                another content. Nothing is written then.
        """
        for path, text in self.before.items():
            if not os.path.exists(path) or _read(path) != text:
                raise AmpdebugError(f"{path} has changed since the patch was made; make it again with result.patch()")
            kept = Path(path + ".orig")
            if backup and kept.exists() and _read(str(kept)) != text:
                raise AmpdebugError(f"{kept} exists and is another file; move it away or write(backup=False)")
        for path, text in self.files.items():
            if backup:
                Path(path + ".orig").write_bytes(Path(path).read_bytes())
            # Beside the file first: a full disk must not leave half of it.
            fresh = Path(path + ".ampdebug-new")
            fresh.write_text(text, encoding="utf-8", newline="")
            fresh.chmod(Path(path).stat().st_mode & 0o7777)
            os.replace(fresh, path)
        return tuple(self.files)


def build_patch(sites: Sequence[PatchSite], *, level: str, verify: Verify | None, unverified: str = "") -> Patch:
    """Writes float32 into the user's source around operators.

    Args:
        sites: The operators.
        level: The level the network runs under; O2 and O3 need other code than O1 and auto.
        verify: Runs the result; None leaves the patch unverified.
        unverified: Why, then.

    Returns:
        The patch. Where a value may have to leave a function in float32, that version is tried too if the one that
        casts back everywhere does not pass.

    Raises:
        AmpdebugError: libcst is not installed.
    """
    if importlib.util.find_spec("libcst") is None:
        raise AmpdebugError("a patch is written with libcst, which is not installed: pip install 'ampdebug[fix]'")
    first = _written(sites, level, round_borders=True)
    if not first.files:
        return _with(first, None, "nothing of your own source can be changed; result.apply(net) protects whole cells")
    if verify is None:
        return _with(first, None, unverified or "it was not run (verify=False)")
    passed, reason = verify(first.before, first.files)
    if passed is False:
        second = _written(sites, level, round_borders=False)
        if second.files != first.files:
            passed_second, reason_second = verify(second.before, second.files)
            if passed_second:
                return _with(second, True, reason_second)
    return _with(first, passed, reason)


def _with(patch: Patch, verified: bool | None, reason: str) -> Patch:
    return Patch(patch.diff, patch.files, patch.before, verified, reason, patch.left_out, patch.notes)


def _written(sites: Sequence[PatchSite], level: str, *, round_borders: bool) -> Patch:
    from ampdebug._patch_match import Target
    from ampdebug._patch_rewrite import rewrite_source

    by_file: dict[str, list[OperatorSite]] = {}
    left_out, notes = [], []
    for item in sites:
        problem = _problem(item)
        if problem:
            left_out.append(problem)
        else:
            by_file.setdefault(item.file, []).append(item.site)
    files, before, diffs = {}, {}, []
    for path, own in sorted(by_file.items()):
        text = _read(path)
        targets = [Target(int(s.line.rpartition(":")[2]), s.operator, s.index, s.path) for s in dict.fromkeys(own)]
        changed = rewrite_source(text, targets, level=level, round_borders=round_borders)
        name = os.path.basename(path)
        left_out += [f"{name}:{t.line} {t.operator} in {t.path or '(root)'}: {why}" for t, why in changed.missed]
        notes += [f"{name}, {note}" for note in changed.notes]
        if changed.code != text:
            files[path], before[path] = changed.code, text
            diffs.append(unified_diff(path, text, changed.code))
    unique = tuple(dict.fromkeys(left_out))
    if unique:
        notes.append("what is left out stays as it is; result.apply(net) protects it, with whole cells")
    return Patch("".join(diffs), files, before, None, "", unique, tuple(notes))


def _problem(item: PatchSite) -> str:
    """Why a site cannot be patched at all; empty if it can."""
    what = f"{item.site.operator} in {item.site.path or '(root)'}"
    if not item.file or ":" not in item.site.line:
        return f"{what}: it has no line of your source"
    if is_library(item.file):
        return f"{item.site.line} {what}: {item.file} is a library's file, not yours"
    return "" if os.path.exists(item.file) else f"{item.site.line} {what}: {item.file} is not a file"


def is_library(path: str) -> bool:
    """The file belongs to an installed package or to Python itself."""
    parts = Path(path).parts
    if "site-packages" in parts or "dist-packages" in parts:
        return True
    standard = sysconfig.get_paths()["stdlib"]
    return path.startswith(standard + os.sep)


def unified_diff(path: str, before: str, after: str) -> str:
    """A diff with ``a/`` and ``b/`` paths; a missing last newline is marked as patch tools expect it."""
    here = os.path.relpath(path)
    name = path.lstrip(os.sep) if here.startswith("..") else here
    lines: Iterable[str] = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


def _read(path: str) -> str:
    with open(path, encoding="utf-8", newline="") as file:
        return file.read()
