"""ampdebug: see what mixed precision does to every layer of a MindSpore training run.

Measure while training (this needs MindSpore)::

    monitor = ampdebug.AMPMonitor("runs/exp1")              # a mindspore Callback
    model.train(3, data, callbacks=[monitor])

    with ampdebug.watch(net, optimizer=opt, out="runs/exp2") as run:    # a functional loop
        ...

Read afterwards, anywhere::

    run = ampdebug.open_run("runs/exp1")
    print(run)                                              # the cells that deserve a look, then a summary
    ampdebug.write_tensorboard(run, "runs/tb")
    ampdebug.write_html(run, "exp1.html")                   # one page, to read or to mail

Ask what is wrong::

    print(ampdebug.check(net, x, y, loss_fn=loss_fn))       # one instrumented step, before the real training
    print(ampdebug.diagnose("runs/exp1"))                   # a recorded run, or a log of any common framework

This page is the whole public interface; modules whose name starts with an underscore may change.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from ampdebug._errors import (
    AmpdebugError,
    AmpdebugWarning,
    ArgumentError,
    FormatError,
    NoObservationsError,
    RunExistsError,
    StoreError,
)
from ampdebug._records import Birth, Cell, Event, Site, Step

__version__ = "0.1.0"

__all__ = [
    "AMPMonitor",
    "AmpdebugError",
    "AmpdebugWarning",
    "ArgumentError",
    "AuditReport",
    "Birth",
    "BisectResult",
    "Cell",
    "CheckpointReport",
    "ComparisonReport",
    "DeepSpeedScale",
    "Diagnosis",
    "DoctorReport",
    "DynamicScale",
    "Event",
    "Evidence",
    "Finding",
    "FormatError",
    "InferenceReport",
    "LoweringResult",
    "NoObservationsError",
    "Patch",
    "Replay",
    "Report",
    "Run",
    "RunExistsError",
    "ScaleSimulation",
    "Site",
    "StaticScale",
    "Step",
    "StoreError",
    "TensorBoardSink",
    "TensorStats",
    "TorchScale",
    "Trace",
    "Workload",
    "__version__",
    "audit",
    "audit_checkpoint",
    "bisect",
    "build_report",
    "check",
    "check_inference",
    "compare",
    "diagnose",
    "doctor",
    "export",
    "open_run",
    "replay",
    "simulate_scale",
    "summarize",
    "watch",
    "write_html",
    "write_tensorboard",
]

if TYPE_CHECKING:
    from ampdebug._audit import AuditReport
    from ampdebug._bisect_result import BisectResult
    from ampdebug._checkpoint import CheckpointReport, audit_checkpoint
    from ampdebug._compare import ComparisonReport
    from ampdebug._diagnose import Diagnosis, diagnose
    from ampdebug._doctor import DoctorReport, doctor
    from ampdebug._export import export
    from ampdebug._inference import InferenceReport
    from ampdebug._lowering import LoweringResult
    from ampdebug._patch import Patch
    from ampdebug._replay import Replay
    from ampdebug._run import Run, open_run
    from ampdebug._scale import (
        DeepSpeedScale,
        DynamicScale,
        ScaleSimulation,
        StaticScale,
        TorchScale,
        simulate_scale,
    )
    from ampdebug._stats import TensorStats, summarize
    from ampdebug._trace import Trace
    from ampdebug._workload import Workload
    from ampdebug.hooks import AMPMonitor, watch
    from ampdebug.hooks._bisection import bisect
    from ampdebug.hooks._compare import compare
    from ampdebug.hooks._inference import check_inference
    from ampdebug.hooks._level_audit import audit
    from ampdebug.hooks._preflight import check
    from ampdebug.hooks._replay import replay
    from ampdebug.report import Report, TensorBoardSink, build_report, write_tensorboard
    from ampdebug.report.html import write_html
    from ampdebug.rules import Evidence, Finding
else:
    # Loaded at first use, so that the command line starts quickly and MindSpore is imported only by who measures.
    # Hidden from type checkers: a visible __getattr__ makes them accept any misspelt name.
    _LAZY = {
        "AMPMonitor": "ampdebug.hooks",
        "AuditReport": "ampdebug._audit",
        "BisectResult": "ampdebug._bisect_result",
        "CheckpointReport": "ampdebug._checkpoint",
        "ComparisonReport": "ampdebug._compare",
        "DeepSpeedScale": "ampdebug._scale",
        "Diagnosis": "ampdebug._diagnose",
        "DoctorReport": "ampdebug._doctor",
        "DynamicScale": "ampdebug._scale",
        "Evidence": "ampdebug.rules",
        "Finding": "ampdebug.rules",
        "Replay": "ampdebug._replay",
        "LoweringResult": "ampdebug._lowering",
        "InferenceReport": "ampdebug._inference",
        "Patch": "ampdebug._patch",
        "Report": "ampdebug.report",
        "Run": "ampdebug._run",
        "ScaleSimulation": "ampdebug._scale",
        "StaticScale": "ampdebug._scale",
        "TensorBoardSink": "ampdebug.report",
        "TensorStats": "ampdebug._stats",
        "TorchScale": "ampdebug._scale",
        "Trace": "ampdebug._trace",
        "Workload": "ampdebug._workload",
        "audit": "ampdebug.hooks._level_audit",
        "audit_checkpoint": "ampdebug._checkpoint",
        "bisect": "ampdebug.hooks._bisection",
        "build_report": "ampdebug.report",
        "check": "ampdebug.hooks._preflight",
        "check_inference": "ampdebug.hooks._inference",
        "compare": "ampdebug.hooks._compare",
        "diagnose": "ampdebug._diagnose",
        "doctor": "ampdebug._doctor",
        "export": "ampdebug._export",
        "open_run": "ampdebug._run",
        "replay": "ampdebug.hooks._replay",
        "simulate_scale": "ampdebug._scale",
        "summarize": "ampdebug._stats",
        "watch": "ampdebug.hooks",
        "write_html": "ampdebug.report.html",
        "write_tensorboard": "ampdebug.report",
    }

    def __getattr__(name):
        if name not in _LAZY:
            raise AttributeError(f"module 'ampdebug' has no attribute {name!r}")
        try:
            module = importlib.import_module(_LAZY[name])
        except ModuleNotFoundError as error:
            from ampdebug._needs import is_mindspore

            if not is_mindspore(error):
                raise
            raise ModuleNotFoundError(
                f"ampdebug.{name} measures a MindSpore training run and needs MindSpore, which is not installed here: "
                "pip install 'mindspore>=2.10'. Reading a recorded run (ampdebug.open_run, ampdebug report) works "
                "without.",
                name="mindspore",
            ) from error
        value = getattr(module, name)
        globals()[name] = value
        return value

    def __dir__():
        return sorted({*globals(), *__all__} - {"annotations", "importlib", "TYPE_CHECKING"})
