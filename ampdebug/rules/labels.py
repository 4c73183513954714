"""Rule: a class label beyond the number of classes, where the program ended with an error that says so."""

from __future__ import annotations

from collections.abc import Iterator

from ampdebug.logs._markers import MARKERS
from ampdebug.rules._facts import Facts
from ampdebug.rules._finding import Evidence, Finding, rows, show_mark


def out_of_range(facts: Facts) -> Iterator[Finding]:
    """The log, or a watched loop, ends with an index error of a loss function."""
    marks = facts.marks("range-error")
    raised = [event for event in facts.history.events if event.kind == "training-raised" and _told(event.message)]
    if not marks and not raised:
        return
    last = facts.logged[-1] if facts.logged else None
    said = marks[0].detail.strip() if marks else _told(raised[0].message)
    sure = "GatherD" not in said and "OneHot" not in said
    yield Finding(
        "label-ge-num-classes",
        f"The program ended in the loss function: {said[:160]}. A class label is not below the number of classes that "
        "the network puts out; where nothing checks (Ascend, GPU without assertions) it reads foreign memory instead.",
        "error",
        "high" if sure else "medium",
        "the error names the label" if sure else "the operator that raised is what a loss picks its classes with",
        last.step.step if last is not None else None,
        last.step.step if last is not None else None,
        "the labels",
        (
            *(show_mark(mark) for mark in marks[:3]),
            *(Evidence(f"the training ended with {event.message[:300]}", event.step) for event in raised[:1]),
            *rows([last], 1),
        ),
        "Compare labels.max() with the last layer's width: a background class that was not counted, labels from 1, an "
        "ignore value (255, -100) that the loss was not told of.",
        "" if sure else "ampdebug.check(net, *inputs, loss_fn=...): it compares the labels with the outputs",
        (),
        ("loss-nan-cause-unknown", "nan-permanent-params-corrupted"),
    )


def _told(message: str) -> str:
    """The part of an exception's text that says so, ``""`` where it is about something else."""
    line = message.encode()
    found = (marker.pattern.search(line) for marker in MARKERS if marker.kind == "range-error")
    return next((match["text"].decode(errors="replace").strip() for match in found if match), "")
