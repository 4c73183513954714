"""What a run on disk keeps of a bisection: its result, and the head of its ranking, which the result leaves out."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ampdebug._bisect_result import BisectResult, Unit
from ampdebug._sites import OperatorSite, SiteScore
from ampdebug._store_result import append_result

KIND = "bisect"
_RANKED = 100


class RankingTaker:
    """Keeps the ranking that a bisection made, until its result is there.

    Attributes:
        rows: ``{"rank", "name", "operator", "path", "line", "score", "kind", "why"}`` each, of the first hundred units
            in ranking order; a score that is not finite is text.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def __call__(self, ranking: Sequence[Unit], scores: Mapping[OperatorSite, SiteScore]) -> None:
        """Takes it over."""
        for rank, unit in enumerate(ranking[:_RANKED], start=1):
            own = [scores[site] for site in unit.sites if site in scores]
            best = max(own, key=lambda score: score.score, default=None)
            value = None if best is None else best.score if math.isfinite(best.score) else str(best.score)
            self.rows.append(
                {
                    "rank": rank,
                    "name": unit.name,
                    "operator": unit.operator,
                    "path": unit.path,
                    "line": unit.line,
                    "score": value,
                    "kind": "" if best is None else best.kind,
                    "why": "" if best is None else best.why,
                }
            )


def store_bisection(out: str | os.PathLike[str], result: BisectResult, ranking: RankingTaker, task: str) -> Path:
    """Adds a result to the run in a directory, which is made if need be.

    Args:
        out: The directory, see ``append_result``.
        result: The result.
        ranking: What was ranked for it.
        task: What was searched, for a reader: the name of the workload or of the network.

    Returns:
        The file.
    """
    return append_result(out, KIND, {**result.to_dict(), "task": task, "ranking": ranking.rows})
