"""What a run looks like: a table for the terminal, event files for TensorBoard, a page of HTML (``report.html``)."""

from __future__ import annotations

from ampdebug.report.table import Report, Row, build_report
from ampdebug.report.tensorboard import TensorBoardSink, write_tensorboard

__all__ = ["Report", "Row", "TensorBoardSink", "build_report", "write_tensorboard"]
