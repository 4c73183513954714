"""The judge of the audit on records made by hand: reasons, casts, chains, findings, the difference of two."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from ampdebug import ArgumentError
from ampdebug._audit import AuditReport, judge_audit
from ampdebug._audit_records import NOTHING_ASKED, AuditedCell, AuditedStep, Request
from ampdebug._audit_told import show_bytes
from ampdebug._stats import summarize
from ampdebug.rules._operator_records import CellFacts, Operand, Operator, Result, Step

LEVEL = Request("float16", "level", "")
KEPT = Request("float32", "level list", "norm")
PINNED = Request("float32", "to_float", "head")


class Tape:
    """Writes down operator calls; ``call`` gives the operand that stands for a result."""

    def __init__(self, level: str = "O2", request: Request = LEVEL) -> None:
        self.level, self.request = level, request
        self.operators: list[Operator] = []
        self.requests: list[Request] = []

    def call(
        self, name: str, dtype: str, *operands: Operand, request: Request | None = None, path: str = "", **more: Any
    ) -> Operand:
        shape = next((o.shape for o in operands if o.shape), (4,))
        stats = summarize(np.ones(shape, np.float32))
        index = len(self.operators)
        self.operators.append(
            Operator(
                index, name, path, more.get("cell", "Net"), f"net.py:{index + 1}", more.get("text", ""), operands,
                (Result(dtype, shape, stats),), more.get("phase", "network"),
            )
        )  # fmt: skip
        self.requests.append(self.request if request is None else request)
        return Operand(dtype, shape, stats, None, index)

    def audit(self, *cells: AuditedCell, facts: Sequence[CellFacts] = (), **more: Any) -> AuditReport:
        step = Step(self.level, tuple(self.operators), cells=tuple(facts))
        made = AuditedStep("Net", self.level, "pynative", step, tuple(self.requests), cells)
        return judge_audit(replace(made, **more))


def tensor(dtype: str = "float32", source: str = "input 0", shape: tuple[int, ...] = (4,)) -> Operand:
    return Operand(dtype, shape, summarize(np.ones(shape, np.float32)), None, None, source)


def number(value: float) -> Operand:
    return Operand("number", value=value)


def slugs(report: AuditReport) -> list[str]:
    return [finding.slug for finding in report.findings]


def finding(report: AuditReport, slug: str) -> Any:
    return next(f for f in report.findings if f.slug == slug)


# --- who asked --------------------------------------------------------------------------------------------------------


def reason(operand_dtypes: Sequence[str], dtype: str, request: Request = NOTHING_ASKED, name: str = "MatMul") -> str:
    tape = Tape()
    tape.call(name, dtype, *(tensor(d) for d in operand_dtypes), request=request)
    return tape.audit().operators[0].asked_by


@pytest.mark.parametrize(
    ("given", "dtype", "request_", "expected"),
    [
        (["float32", "float32"], "float16", LEVEL, "level"),
        (["float16", "float32"], "float32", KEPT, "level list"),
        (["float16", "float32"], "float32", PINNED, "to_float"),
        (["float16", "float32"], "float32", NOTHING_ASKED, "promoted by a float32 input"),
        (["float16", "float16"], "float16", NOTHING_ASKED, "inputs"),
        (["float32"], "float32", NOTHING_ASKED, "inputs"),
        (["float32", "float32"], "float32", LEVEL, "not converted"),
        (["float32", "float32"], "float16", Request(automatic=True), "level list"),
        (["float16", "float32"], "float16", Request(automatic=True), "level list"),
        (["float16"], "float32", Request(automatic=True), "level list"),
        (["float16", "float32"], "float32", Request(automatic=True), "promoted by a float32 input"),
        ([], "float32", LEVEL, "made here"),
    ],
)
def test_who_asked(given: list[str], dtype: str, request_: Request, expected: str) -> None:
    assert reason(given, dtype, request_) == expected


def test_who_asked_for_a_cast() -> None:
    assert reason(["float32"], "float16", name="Tensor.astype") == "explicit cast"
    assert reason(["float32"], "float16", Request(inserted=True), "Cast") == "level cast"
    assert reason(["float32"], "float16", Request(library=True), "Cast") == "cast in Net"


def test_o1_casts_tell_that_its_list_asked() -> None:
    tape = Tape("O1", NOTHING_ASKED)
    low = tape.call("Cast", "float16", tensor(), request=Request(inserted=True))
    tape.call("MatMul", "float16", low, low)
    tape.call("MatMul", "float16", tape.call("Cast", "float16", tensor()), low)
    rows = tape.audit().operators
    assert [row.asked_by for row in rows] == ["level cast", "level list", "explicit cast", "level list"]


def test_a_movement_follows_its_input_whatever_was_asked() -> None:
    assert reason(["float32"], "float32", LEVEL, "Reshape") == "inputs"


# --- casts ------------------------------------------------------------------------------------------------------------


def test_implicit_casts_and_their_bytes() -> None:
    tape = Tape()
    tape.call("MatMul", "float16", tensor(shape=(3, 5)), tensor(source="fc.weight", shape=(5, 2)))
    (row,) = tape.audit().operators
    assert [(c.operand, c.source, c.before, c.after, c.elements) for c in row.casts] == [
        (0, "input 0", "float32", "float16", 15),
        (1, "fc.weight", "float32", "float16", 10),
    ]
    assert row.cast_bytes == (15 + 10) * (4 + 2)


def test_batchnorm_keeps_parameters_in_float32_without_casts() -> None:
    tape = Tape("O3")
    tape.call("BatchNorm", "float16", tensor("float16"), tensor(source="bn.gamma"), tensor(source="bn.beta"))
    (row,) = tape.audit().operators
    assert row.casts == ()
    assert row.inputs == ("float16",)


def test_an_explicit_cast_moves_bytes_and_a_needless_one_none() -> None:
    tape = Tape()
    tape.call("Cast", "float16", tensor(shape=(10,)))
    tape.call("Cast", "float32", tensor(shape=(10,)))
    assert [row.cast_bytes for row in tape.audit().operators] == [60, 0]


def test_round_trip_through_casts_and_movements() -> None:
    tape = Tape("O1", NOTHING_ASKED)
    made = tape.call("ReLU", "float16", tensor("float16", shape=(8,)))
    up = tape.call("Cast", "float32", made, request=Request(inserted=True))
    moved = tape.call("Reshape", "float32", up)
    down = tape.call("Cast", "float16", moved, request=Request(inserted=True))
    tape.call("MatMul", "float16", down)
    report = tape.audit()
    (trip,) = report.round_trips
    assert trip.dtypes == ("float16", "float32", "float16")
    assert trip.bytes == 8 * 6 * 2
    assert not trip.loses
    assert trip.producer.startswith("relu")
    assert "casts-back-and-forth" in slugs(report)
    assert report.ok


def test_a_shared_cast_is_counted_once() -> None:
    tape = Tape("O1", NOTHING_ASKED)
    up = tape.call("Cast", "float32", tape.call("ReLU", "float16", tensor("float16", shape=(8,))))
    for _ in range(2):
        tape.call("MatMul", "float16", up, request=LEVEL)
    trips = tape.audit().round_trips
    assert sorted(trip.bytes for trip in trips) == [8 * 6, 2 * 8 * 6]
    assert sum(trip.bytes for trip in trips) == tape.audit().cast_bytes


def test_a_trip_through_16_bits_loses_and_one_way_is_none() -> None:
    tape = Tape()
    high = tape.call("Exp", "float32", tensor(), request=KEPT)
    low = tape.call("Cast", "float16", high)
    tape.call("Log", "float32", low, request=KEPT)
    tape.call("MatMul", "float16", low)
    (trip,) = tape.audit().round_trips
    assert trip.loses
    assert trip.dtypes == ("float32", "float16", "float32")


def test_the_users_cast_is_undone_by_the_level() -> None:
    tape = Tape()
    low = tape.call("ReLU", "float16", tensor("float16"))
    wide = tape.call("Tensor.astype", "float32", low)
    tape.call("Exp", "float16", wide)
    told = finding(tape.audit(), "explicit-cast-undone")
    assert "net.py:2" in told.sentence
    assert told.severity == "warning"
    assert "to_float(ms.float32)" in told.action

    by_user = Tape("O1", NOTHING_ASKED)  # cast back by the user too: as it was meant
    wide = by_user.call("Tensor.astype", "float32", by_user.call("ReLU", "float16", tensor("float16")))
    by_user.call("Exp", "float16", by_user.call("Tensor.astype", "float16", wide))
    assert slugs(by_user.audit()) == ["casts-back-and-forth"]

    by_level = Tape()
    low = by_level.call("ReLU", "float16", tensor("float16"))
    by_level.call("Exp", "float16", by_level.call("Cast", "float32", low, request=Request(inserted=True)))
    assert "explicit-cast-undone" not in slugs(by_level.audit())


# --- chains in float32 ------------------------------------------------------------------------------------------------


def test_every_leak_is_found_with_its_first_cell() -> None:
    tape = Tape("O0", NOTHING_ASKED)
    for place in ("a", "b"):
        mixed = tape.call("Mul", "float32", tensor("float16"), tensor(source="constant"), path=place)
        after = tape.call("ReLU", "float32", mixed, path=f"{place}.act")
        tape.call("MatMul", "float32", after, tensor(source="w"), path=f"{place}.fc")
        tape.call("Cast", "float16", mixed, path=place)
    first, second = tape.audit().leaks
    assert (first.path, second.path) == ("a", "b")
    assert first.operators == 3
    assert first.heavy
    assert first.operand == "constant"
    assert first.cells == ("a", "a.act", "a.fc")
    assert finding(tape.audit(), "fp32-leak-keeps-chain-fp32").severity == "warning"


def test_what_follows_from_a_leak_is_no_other_one() -> None:
    tape = Tape("O0", NOTHING_ASKED)
    mixed = tape.call("Mul", "float32", tensor("float16"), tensor(source="constant"))
    tape.call("Add", "float32", tape.call("ReLU", "float32", mixed), tensor("float16"))
    (leak,) = tape.audit().leaks
    assert leak.operators == 3


def test_who_asked_for_float32_leaks_nothing() -> None:
    tape = Tape()
    tape.call("Mul", "float32", tensor("float16"), tensor(), request=KEPT)
    tape.call("Mul", "float32", tensor("float16"), tensor(), request=PINNED)
    assert tape.audit().leaks == ()


# --- findings ---------------------------------------------------------------------------------------------------------


def test_softmax_by_hand() -> None:
    def net(dtype: str, *, whole: bool = True) -> AuditReport:
        tape = Tape()
        request = LEVEL if dtype == "float16" else PINNED
        e = tape.call("Exp", dtype, tensor(dtype), request=request)
        total = tape.call("Tensor.sum", dtype, e if whole else tensor(dtype), request=request)
        tape.call("Tensor.__truediv__", dtype, e, tape.call("Tensor.__add__", dtype, total, request=request))
        return tape.audit()

    assert "softmax-by-hand-in-float16" in slugs(net("float16"))
    assert "softmax-by-hand-in-float16" not in slugs(net("float32"))
    assert "softmax-by-hand-in-float16" not in slugs(net("float16", whole=False))


@pytest.mark.parametrize("root", ["Rsqrt", "Sqrt"])
def test_norm_by_hand(root: str) -> None:
    tape = Tape()
    x = tensor("float16")
    size = tape.call("Tensor.mean", "float16", tape.call("Square", "float16", x))
    small = tape.call("Tensor.__add__", "float16", size, number(1e-3))
    low = tape.call(root, "float16", small)
    tape.call("Tensor.__mul__" if root == "Rsqrt" else "Tensor.__truediv__", "float16", x, low)
    assert "norm-by-hand-in-float16" in slugs(tape.audit())
    # a scale by the root of a number, as in attention, is no norm
    other = Tape()
    root_ = other.call("Sqrt", "float16", other.call("Tensor.mean", "float16", x))
    other.call("Tensor.__truediv__", "float16", x, root_)
    assert "norm-by-hand-in-float16" not in slugs(other.audit())


def test_losses_in_float16() -> None:
    built_in = Tape()
    built_in.call("SoftmaxCrossEntropyWithLogits", "float16", tensor("float16"), path="criterion")
    in_function = Tape("O3", NOTHING_ASKED)
    in_function.call("Tensor.mean", "float16", tensor("float16"), path="(loss)", phase="loss")
    by_hand = Tape()
    by_hand.call("Log", "float16", by_hand.call("Softmax", "float16", tensor("float16")))
    for tape in (built_in, in_function, by_hand):
        assert finding(tape.audit(), "loss-in-float16").severity == "warning"
    wide = Tape("O3", NOTHING_ASKED)
    wide.call("Tensor.mean", "float32", tensor(), path="(loss)", phase="loss")
    assert "loss-in-float16" not in slugs(wide.audit())


def test_constants_that_the_format_does_not_hold() -> None:
    tape = Tape()
    added = tape.call("Tensor.__add__", "float16", tensor("float16"), number(1e-8))
    tape.call("Log", "float16", added)
    tape.call("MaskedFill", "float16", tensor("float16"), number(-1e9))
    tape.call("Reshape", "float16", tensor("float16"), number(100_000))  # a size, not a value
    tape.call("Tensor.__add__", "float16", tensor("float16"), number(1e-4))
    report = tape.audit()
    assert finding(report, "eps-1e-8-is-zero-in-fp16").severity == "warning"
    assert "1e-08 becomes 0" in finding(report, "eps-1e-8-is-zero-in-fp16").evidence[0].text
    infinite = finding(report, "mask-constant-overflows-fp16")
    assert len(infinite.evidence) == 1
    assert "-1e+09 becomes -inf" in infinite.evidence[0].text
    unguarded = Tape()
    unguarded.call("Tensor.__add__", "float16", tensor("float16"), number(1e-8))
    assert finding(unguarded.audit(), "eps-1e-8-is-zero-in-fp16").severity == "note"


def test_cells_that_the_level_promised_and_did_not_convert() -> None:
    tape = Tape("O1", NOTHING_ASKED)
    tape.call("MatMul", "float32", tensor(), tensor(), path="special", cell="MyDense")
    tape.call("MatMul", "float16", tensor("float16"), path="plain", cell="Dense")
    cells = [AuditedCell(p, c, promised=True) for p, c in (("special", "MyDense"), ("plain", "Dense"))]
    told = finding(tape.audit(*cells), "cells-not-converted")
    assert told.where == "special"
    assert "'plain'" not in told.sentence
    # the user's pin is no broken promise
    pinned = Tape("O1", PINNED)
    pinned.call("MatMul", "float32", tensor(), tensor(), path="special", cell="MyDense")
    pinned.call("MatMul", "float16", tensor("float16"), path="plain", cell="Dense", request=NOTHING_ASKED)
    report = pinned.audit(AuditedCell("special", "MyDense", "float32", "to_float", True))
    assert "cells-not-converted" not in slugs(report)


def test_nothing_converted_and_a_lost_pin_come_from_the_rules_of_check() -> None:
    tape = Tape("O1", NOTHING_ASKED)
    tape.call("MatMul", "float32", tensor(), tensor(), path="fc")
    report = tape.audit(AuditedCell("fc", "MyDense", promised=True))
    assert slugs(report) == ["o1-converted-nothing"]
    assert all(row.step is None for row in report.findings[0].evidence)
    lost = Tape()
    lost.call("MatMul", "float16", tensor(), path="fc")
    facts = [CellFacts("fc", "Dense", pinned_then_lost=True, asked="float16")]
    assert "to-float-pin-lost-by-later-amp-call" in slugs(lost.audit(facts=facts))


def test_parameters_of_a_listed_cell_that_are_rounded() -> None:
    tape = Tape()
    low = tape.call("Tensor.astype", "float16", tensor(source="ln.gamma"), request=KEPT, path="ln")
    tape.call("LayerNorm", "float32", tensor("float16"), low, request=KEPT, path="ln")
    report = tape.audit(AuditedCell("ln", "LayerNorm", "float32", "level list", listed=True))
    told = finding(report, "listed-parameters-rounded")
    assert "ln.gamma: float32 → float16" in told.evidence[0].text
    assert told.severity == "note"
    assert "listed-parameters-rounded" not in slugs(tape.audit(AuditedCell("ln", "LayerNorm")))


def test_parameters_kept_in_16_bits() -> None:
    low = AuditedCell("norm", "RMSNorm", parameters=(("norm.weight", "float16"),))
    wide = AuditedCell("fc", "Dense", parameters=(("fc.weight", "float32"), ("fc.table", "int8")))
    mixed = finding(Tape().audit(low, wide), "parameters-kept-in-16-bits")
    assert (mixed.severity, mixed.where) == ("warning", "norm")
    assert "the other 1 are not" in mixed.sentence
    assert finding(Tape().audit(low), "parameters-kept-in-16-bits").severity == "note"
    assert slugs(Tape().audit(wide)) == []


def test_what_the_source_keeps_o1_from_converting() -> None:
    tape = Tape("O1", NOTHING_ASKED)
    report = tape.audit(lints=(("block", "construct of Block names its first argument 'me'."),))
    assert finding(report, "o1-needs-self").where == "block"


def test_a_graph_without_operands_raises_no_false_alarm() -> None:
    operators = tuple(
        Operator(i, name, "fc", "Dense", "", "", (), (Result("float16", shape, None),))
        for i, (name, shape) in enumerate((("MatMul", (4, 2)), ("BiasAdd", (4, 2)), ("LayerNorm", (-1, 2))))
    )
    step = AuditedStep("Net", "O2", "graph", Step("O2", operators), (LEVEL,) * 3, (AuditedCell("fc", "Dense"),))
    report = judge_audit(step)
    assert slugs(report) == ["normalisation-forced-to-fp16"]
    assert [row.asked_by for row in report.operators] == ["level"] * 3
    assert report.cast_bytes == 0
    assert [row.elements for row in report.operators] == [8, 8, 0], "a length that only running shows"


# --- the report -------------------------------------------------------------------------------------------------------


def small(dtype: str = "float16", level: str = "O2") -> AuditReport:
    tape = Tape(level, LEVEL if dtype == "float16" else NOTHING_ASKED)
    h = tape.call("MatMul", dtype, tensor(shape=(2, 3)), tensor(source="fc.weight", shape=(3, 2)), path="fc")
    tape.call("ReLU", dtype, h)
    return tape.audit(
        AuditedCell("", "Net", None if dtype == "float32" else "float16", "level"),
        AuditedCell("fc", "Dense", parameters=(("fc.weight", "float32"),)),
        gradients=((0, dtype),),
        backward=True,
    )


def test_the_table_and_the_numbers_agree() -> None:
    report = small()
    text = str(report)
    assert text.startswith("Audit of Net at O2: no finding.")
    assert "2 operators compute floats: 2 in float16 (100 % of the bytes)." in text
    assert report.dtype_share() == {"float16": {"operators": 2, "bytes": 2 * 6 * 2}}
    row = next(line for line in text.splitlines() if line.startswith("fc"))
    assert row.split() == ["fc", "Dense", "float16", "level", "float16", "72", "B"]
    assert report.cast_bytes == 72


def test_to_dict_is_plain_json_with_every_operator() -> None:
    data = json.loads(json.dumps(small().to_dict(), allow_nan=False))
    assert data["verdict"] == "ok"
    assert len(data["operators"]) == 2
    assert data["operators"][0]["implicit_casts"][1]["source"] == "fc.weight"
    assert {cell["cell"] for cell in data["cells"]} == {"", "fc"}


def test_only_shows_the_operators_of_some_cells() -> None:
    shown = small().only("f*")
    assert "MatMul" in str(shown)
    assert "ReLU" not in str(shown)
    assert [row["operator"] for row in shown.to_dict()["operators"]] == ["MatMul"]
    assert shown.cast_bytes == small().cast_bytes
    with pytest.raises(ArgumentError, match="matches none of the 2 cells"):
        small().only("conv*")


def test_the_difference_of_two_levels() -> None:
    diff = small("float32", "O0").diff(small())
    assert [(c.path, c.before, c.after) for c in diff.cells] == [
        ("", {"float32": 1}, {"float16": 1}),
        ("fc", {"float32": 1}, {"float16": 1}),
    ]
    assert diff.cells[1].operators == (("matmul", "float32", "float16"),)
    assert "From Net at O0 to Net at O2: 2 cells differ, 0 run the same." in str(diff)
    assert small().diff(small()).equal
    json.dumps(diff.to_dict(), allow_nan=False)


def test_a_cell_that_only_one_has() -> None:
    tape = Tape()
    tape.call("MatMul", "float16", tensor(), path="other", cell="Dense")
    (old, added, gone) = small().diff(tape.audit()).cells
    assert (gone.path, gone.before, old.path) == ("other", None, "")
    assert added.path == "fc"
    assert added.after is None
    assert "did not run" in str(small().diff(tape.audit()))


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (1_500_000, "1.5 MB"), (2 * 10**9, "2 GB")]
)
def test_bytes_for_a_reader(count: int, text: str) -> None:
    assert show_bytes(count) == text
