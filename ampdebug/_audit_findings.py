"""What a user must know of an audited step, as findings; where ``check`` judges the same, its rules are asked."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ampdebug._audit_flow import is_matrix_product
from ampdebug._audit_numbers import by_hand, loss_in_float16, lost_constants, norms_in_graph
from ampdebug._audit_rows import in_loss
from ampdebug._audit_told import Judged, at, count, finding, in_float32, show_bytes, unnumbered
from ampdebug._formats import is_float
from ampdebug._sites import is_cast
from ampdebug.rules._finding import Finding
from ampdebug.rules._operator_cells import level_converted_nothing, norm_in_float16, pin_lost
from ampdebug.rules._operator_finding import counted
from ampdebug.rules._operator_records import LOW

_SEVERITY = {"error": 0, "warning": 1, "note": 2}


def judge_level(judged: Judged) -> tuple[Finding, ...]:
    """All findings, the most severe first.

    A compiled graph tells neither operands nor values, so most rules have nothing to say about one.
    """
    flow = judged.flow
    found: list[Finding] = []
    graph = judged.seen.mode == "graph"
    for rule in (pin_lost,) if graph else (level_converted_nothing, pin_lost, norm_in_float16):
        # What check says of this step, word for word; but an audit has no number of a step to give.
        found += map(unnumbered, rule(flow))
    nothing = any(told.slug == "o1-converted-nothing" for told in found)
    for own in OWN_RULES:
        if not (own is not_converted and nothing) and not (own is norms_in_graph and not graph):
            found += own(judged)
    found.sort(key=lambda told: _SEVERITY[told.severity])
    return tuple(found)  # none is folded under another: an audit lists, it does not explain


def not_converted(judged: Judged) -> Iterator[Finding]:
    """Cells that the level's own rule converts, and whose matrix products ran in float32 all the same."""
    level = judged.seen.level
    promised = {cell.path: cell for cell in judged.seen.cells if cell.promised and cell.asked != "float32"}
    wide = [r for r in judged.rows if is_matrix_product(r.kind) and r.dtype not in ("", *LOW)]
    missed = [r for r in wide if r.path in promised]
    outside = [
        r
        for r in wide
        if level in ("O1", "auto") and r.path not in promised and not in_loss(r.path)
        and r.asked_by in ("", "inputs", "not converted")
    ]  # fmt: skip
    if not missed and not outside:
        return
    listed = missed or outside
    names = ", ".join(dict.fromkeys(f"{r.cell_type} {r.path!r}" if r.path else r.cell_type for r in listed[:6]))
    why = (
        f"the list of level {level} names their class, and they ran in float32"
        if missed
        else f"level {level} converts others, and these ran in float32: its list does not name them"
    )
    yield finding(
        "cells-not-converted",
        f"{count(listed, 'matrix product or convolution', 'matrix products and convolutions')} not converted "
        f"({names}): {why}.",
        severity="warning",
        reason="the dtype of every operator was seen",
        evidence=[f"{at(r)} [{r.dtype}]: {r.text}" for r in (*missed, *outside)],
        action="O1 rewrites only nn cells and primitives of its white list, and only where they are plain attributes "
        "called in construct(self, ...): not subclasses, not calls in comprehensions or cell lists, not ops.matmul or "
        "@. Use the listed cells, amp.custom_mixed_precision, or level auto or O2.",
        where=listed[0].path,
    )


def unusual_self(judged: Judged) -> Iterator[Finding]:
    """Cells in which O1's rewriting of the source finds nothing to rewrite."""
    for path, text in judged.seen.lints:
        yield finding(
            "o1-needs-self",
            text,
            severity="warning",
            reason="the signature of construct was read",
            evidence=(),
            action="Name the first argument of construct 'self'.",
            where=path,
        )


def undone_casts(judged: Judged) -> Iterator[Finding]:
    """The user's own casts to float32 that the level takes back before the operator runs."""
    found = [trip for trip in judged.trips if trip.undone and trip.widened_at]
    if not found:
        return
    first = found[0]
    yield finding(
        "explicit-cast-undone",
        f"{count(found, 'cast to float32 in the source has', 'casts to float32 in the source have')} no effect: "
        f"{first.consumer} is handed the float32 tensor of {first.widened_at}, and the level casts it back before the "
        "operator runs.",
        severity="warning",
        reason="the dtypes on both sides were seen",
        evidence=[f"{t.widened_at}: {' → '.join(t.dtypes)} into {t.consumer}" for t in found],
        action=in_float32(judged.seen),
        where=first.path,
    )


def casts_back_and_forth(judged: Judged) -> Iterator[Finding]:
    """Edges on which a value is cast and cast back."""
    trips = judged.trips
    if not trips:
        return
    lossy = [trip for trip in trips if trip.loses]
    total = sum(trip.bytes for trip in trips)
    first = trips[0]
    loss = f" On {len(lossy)} of them a float32 value passes through 16 bits and loses its last bits." if lossy else ""
    yield finding(
        "casts-back-and-forth",
        f"{count(trips, 'edge casts', 'edges cast')} a value to another dtype and back: {show_bytes(total)} read and "
        f"written in each forward pass for nothing. The largest: {first.producer} to {first.consumer} "
        f"({' → '.join(first.dtypes)}).{loss}",
        severity="note",
        reason="every cast was seen, those on the C++ side by the dtypes around them",
        evidence=[f"{t.producer} to {t.consumer}: {' → '.join(t.dtypes)}, {show_bytes(t.bytes)}" for t in trips],
        action="Keep neighbouring cells in the same dtype, or take out the casts in between. O1 casts what each of its "
        "operators gives back to float32.",
        where=first.path,
    )


def float32_chains(judged: Judged) -> Iterator[Finding]:
    """Chains that a float32 tensor keeps in float32."""
    found = judged.leaks
    if not found:
        return
    first = next((leak for leak in found if leak.heavy), found[0])
    heavy = sum(leak.heavy for leak in found)
    yield finding(
        "fp32-leak-keeps-chain-fp32",
        f"{count(found, 'chain of operators stays', 'chains of operators stay')} in float32 because of a float32 "
        f"tensor: from {first.place} on ({first.operand}), {count(range(first.operators), 'operator', 'operators')}"
        f"{', matrix products among them' if first.heavy else ''}.",
        severity="warning" if heavy else "note",
        reason="the dtypes of all operands were seen",
        evidence=[f"{leak.place}: {leak.operand}; {leak.operators} operators in float32" for leak in found],
        action="Cast the float32 tensor to the other's dtype before (t.astype(x.dtype)), or make the constant in it.",
        where=first.path,
    )


def listed_parameters_rounded(judged: Judged) -> Iterator[Finding]:
    """Parameters of cells that a list keeps in float32, rounded to 16 bits on the way in."""
    listed = {cell.path: cell for cell in judged.seen.cells if cell.listed}
    found = []
    for operator in judged.flow.step.operators:
        if operator.path not in listed or not is_cast(operator.name) or not operator.operands:
            continue
        given = operator.operands[0]
        to = next((r.dtype for r in operator.results), "")
        if to in LOW and given.dtype not in LOW and "." in given.source:
            found.append((operator, given, to))
    if not found:
        return
    operator, given, to = found[0]
    paths = dict.fromkeys(o.path for o, _, _ in found)
    yield finding(
        "listed-parameters-rounded",
        f"{count(list(paths), 'cell that the level keeps', 'cells that the level keeps')} in float32 by its list, such "
        f"as {listed[operator.path].cell_type} {operator.path!r}, round"
        f"{'s' if len(paths) == 1 else ''} {count(found, 'parameter', 'parameters')} to {to} first, the dtype of what "
        "goes in.",
        severity="note",
        reason="the casts were seen",
        evidence=[f"{g.source}: {g.dtype} → {t} in {o.place}" + (f", {counted(g.stats)}" if g.stats else "")
                  for o, g, t in found],
        action="Nothing, where the parameters stay near 1 and 0; else cast the cell's input to float32.",
        where=operator.path,
    )  # fmt: skip


def parameters_in_16_bits(judged: Judged) -> Iterator[Finding]:
    """Parameters that are kept in 16 bits; no level does that, a level casts them at use."""
    all_floats = [(c, n, d) for c in judged.seen.cells for n, d in c.parameters if is_float(d)]
    low = [(c, n, d) for c, n, d in all_floats if d in LOW]
    if not low:
        return
    mixed = len(low) < len(all_floats)
    cell, _, dtype = low[0]
    yield finding(
        "parameters-kept-in-16-bits",
        f"{count(low, 'parameter is', 'parameters are')} kept in {dtype}"
        + (f", the other {len(all_floats) - len(low)} are not" if mixed else " (all of them)")
        + ": a level would keep them in float32 and cast them at use.",
        severity="warning" if mixed else "note",
        reason="the dtypes of all parameters were read",
        evidence=[f"{n} of {c.cell_type} {c.path!r}: {d}" for c, n, d in low],
        action="For training keep float32 weights: an update below half a unit in the last place is lost in 16 bits. "
        "For inference it is fine.",
        where=cell.path,
    )


OWN_RULES: tuple[Callable[[Judged], Iterator[Finding]], ...] = (
    unusual_self,
    not_converted,
    norms_in_graph,
    loss_in_float16,
    by_hand,
    undone_casts,
    lost_constants,
    float32_chains,
    parameters_in_16_bits,
    casts_back_and_forth,
    listed_parameters_rounded,
)
