"""The recorder: rows in order of execution, and where the first non-finite value was born. No framework here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from ampdebug._recorder import Seen, StepRecorder, Update
from ampdebug._records import DTYPES, Site
from ampdebug._stats import measure_update

NAN, INF = float("nan"), float("inf")


class Register:
    def __init__(self) -> None:
        self.sites: list[Site] = []
        self.shapes: list[Any] = []

    def __call__(self, site: Site, shape: tuple[int, ...] | None) -> int:
        assert site not in self.sites, "a site is registered once"
        self.sites.append(site)
        self.shapes.append(shape)
        return len(self.sites) - 1


def seen(*values: float, dtype: str = "float32") -> Seen:
    array = np.array(values, dtype)
    return Seen(array, dtype, array.shape)


GOOD, BAD, MINUS = seen(1.0, 2.0), seen(1.0, NAN, INF), seen(0.0, -INF)


def recorder(register: Any = None, parents: Any = None, has_children: Iterable[str] = ()) -> StepRecorder:
    made = StepRecorder(register or Register(), parents, has_children)
    made.begin()
    return made


def call(rec: StepRecorder, path: str, inputs: Any, outputs: Any, cell_type: str = "Cell") -> None:
    """One call with lone tensors."""
    one = [("", inputs)] if inputs is not None else []
    rec.cell_call(path, cell_type, one, [("", outputs)])


# --- rows -------------------------------------------------------------------------------------------------------------


def test_rows_sites_and_dtypes_go_together() -> None:
    register = Register()
    rec = recorder(register)
    half = seen(1.0, INF, dtype="float16")
    rec.cell_call("a", "Dense", [("0", GOOD), ("1.mask", Seen(None, "bool", (4, 4)))], [("", half)])
    rec.cell_call("a", "Dense", [("0", GOOD)], [("", GOOD)])
    assert register.sites == [
        Site("input", "a", 0, "0", "Dense"),
        Site("input", "a", 0, "1.mask", "Dense"),
        Site("output", "a", 0, "", "Dense"),
        Site("input", "a", 1, "0", "Dense"),
        Site("output", "a", 1, "", "Dense"),
    ]
    assert register.shapes == [(2,), (4, 4), (2,), (2,), (2,)]
    assert rec.site_ids.tolist() == [0, 1, 2, 3, 4]
    assert [DTYPES[code] for code in rec.dtypes] == ["float32", "bool", "float16", "float32", "float32"]
    assert rec.table.rows["count"].tolist() == [2, 0, 2, 2, 2]
    assert rec.table.rows["pos_inf"].tolist() == [0, 0, 1, 0, 0]
    assert len(rec) == 5


def test_a_new_step_forgets_the_last_and_registers_no_site_twice() -> None:
    register = Register()
    rec = recorder(register)
    for _ in range(3):
        rec.begin()
        call(rec, "a", BAD, BAD)
        rec.gradient("w", "a", BAD)
        assert rec.site_ids.tolist() == [0, 1, 2]
    rec.begin()
    assert len(rec) == len(rec.table) == 0
    assert rec.gradients_seen == set()
    assert not rec.nonfinite_gradients
    assert rec.gradient_norm == 0.0
    assert rec.births(None) == (None, None)


def test_an_unknown_dtype_is_recorded_as_unknown() -> None:
    rec = recorder()
    call(rec, "a", Seen(None, "string", ()), GOOD)
    assert DTYPES[rec.dtypes[0]] == "unknown"


def test_bfloat16_comes_as_bits() -> None:
    rec = recorder()
    bits = (np.array([1.5, -INF, NAN], np.float32).view(np.uint32) >> 16).astype(np.uint16)
    call(rec, "a", None, Seen(bits, "bfloat16", (3,)))
    row = rec.table.rows[0]
    assert (row["count"], row["nan"], row["neg_inf"], row["max"]) == (3, 1, 1, 1.5)


def test_gradient_norm_is_the_global_one() -> None:
    rec = recorder()
    rng = np.random.RandomState(0)
    parts = [rng.randn(7).astype(np.float32), rng.randn(3, 4).astype(np.float16), np.zeros(0, np.float32)]
    for index, part in enumerate(parts):
        rec.gradient(f"w{index}", "", Seen(part, str(part.dtype), part.shape))
    want = np.sqrt(sum((part.astype(np.float64) ** 2).sum() for part in parts))
    assert rec.gradient_norm == pytest.approx(want, rel=1e-12)
    assert rec.gradients_seen == {"w0", "w1", "w2"}
    assert not rec.nonfinite_gradients


@pytest.mark.parametrize(
    ("values", "norm"), [([INF], INF), ([-INF], INF), ([NAN], NAN), ([INF, NAN], NAN), ([NAN, INF], NAN)]
)
def test_the_norm_of_non_finite_gradients(values: list[float], norm: float) -> None:
    rec = recorder()
    for index, value in enumerate(values):
        rec.gradient(f"w{index}", "", seen(1.0, value))
    rec.gradient("last", "", GOOD)
    assert rec.nonfinite_gradients
    np.testing.assert_equal(rec.gradient_norm, norm)


def test_a_reduced_gradient_counts_for_the_check_and_not_for_the_norm() -> None:
    rec = recorder()
    rec.gradient("w", "", GOOD)
    before = rec.gradient_norm
    rec.gradient("w", "", seen(INF), reduced=True)
    assert rec.nonfinite_gradients
    assert rec.gradient_norm == before
    assert rec.births(None)[1] is None or rec.births(None)[1].kind == "reduced_gradient"


def test_update_rows_say_what_changed() -> None:
    register = Register()
    rec = recorder(register)
    before = np.float32([1.0, 1.0, 1024.0, NAN, 2.0])
    after = np.float32([1.0, 1.5, 1024.25, 0.0, INF])
    lost = np.float32([NAN, INF])
    rec.updates(
        [
            Update("w", measure_update(before, after, "float16"), "float32", (5,)),
            Update("lost", measure_update(lost, lost, "float16"), "float32", (2,)),
        ]
    )
    row = rec.table.rows[0]
    # of three finite ones: one unchanged, one moved, one moved by less than half an fp16 ulp (1 at 1024)
    assert (row["count"], row["nan"], row["zeros"], row["flushed"]) == (5, 2, 1, 1)
    assert row["rms"] == pytest.approx(np.sqrt((0.5**2 + 0.25**2) / 3), rel=1e-12)
    assert np.isnan([row["min"], row["max"], row["mean"]]).all()
    row = rec.table.rows[1]
    assert (row["count"], row["nan"], row["zeros"], row["flushed"]) == (2, 2, 0, 0)
    assert np.isnan([row["rms"], row["min"], row["max"], row["mean"]]).all()
    assert register.sites == [Site("update", "w"), Site("update", "lost")]
    assert register.shapes == [(5,), (2,)]


def test_no_updates_no_rows() -> None:
    rec = recorder(Register())
    rec.updates([])
    assert len(rec) == 0


# --- births -----------------------------------------------------------------------------------------------------------


def forward(rec: StepRecorder, loss: float | None = None) -> Any:
    return rec.births(loss)[0]


def test_born_in_a_leaf() -> None:
    rec = recorder(parents={"a": "", "b": ""}, has_children=[""])
    call(rec, "a", GOOD, BAD, "Exp")
    call(rec, "b", BAD, BAD)
    call(rec, "", GOOD, BAD)
    birth = forward(rec)
    assert (birth.path, birth.cell_type, birth.kind, birth.phase) == ("a", "Exp", "output", "forward")
    assert (birth.inputs_finite, birth.own_code, birth.seen_at) == (True, False, "")
    assert (birth.nan, birth.pos_inf, birth.neg_inf, birth.count, birth.dtype) == (1, 1, 0, 3, "float32")


def test_born_in_a_later_call() -> None:
    rec = recorder()
    call(rec, "a", GOOD, GOOD)
    call(rec, "a", GOOD, BAD)
    assert forward(rec).call == 1


def test_born_in_the_code_of_a_parent_between_its_children() -> None:
    rec = recorder(parents={"p": "", "p.a": "p", "p.b": "p"}, has_children=["", "p"])
    call(rec, "p.a", GOOD, GOOD)
    call(rec, "p.b", BAD, BAD, "Tanh")
    call(rec, "p", GOOD, BAD, "Block")
    call(rec, "", GOOD, BAD, "Net")
    birth = forward(rec)
    assert (birth.path, birth.cell_type, birth.seen_at, birth.own_code) == ("p", "Block", "p.b", True)
    assert birth.kind == "input"
    assert birth.inputs_finite is True


def test_born_in_the_code_of_a_parent_after_its_children() -> None:
    rec = recorder(parents={"p": "", "p.a": "p"}, has_children=["", "p"])
    call(rec, "p.a", GOOD, GOOD)
    call(rec, "p", GOOD, BAD, "Block")
    birth = forward(rec)
    assert (birth.path, birth.own_code, birth.seen_at) == ("p", True, "")


def test_born_in_the_code_of_a_grandparent() -> None:
    rec = recorder(parents={"p": "", "p.a": "p"}, has_children=["", "p"])
    call(rec, "p.a", BAD, BAD)
    call(rec, "p", BAD, BAD, "Block")
    call(rec, "", GOOD, BAD, "Net")
    birth = forward(rec)
    assert (birth.path, birth.cell_type, birth.seen_at, birth.own_code) == ("", "Net", "p.a", True)
    assert birth.inputs_finite is True


def test_born_in_a_second_call_of_a_parent_whose_first_was_fine() -> None:
    rec = recorder(parents={"p": "", "p.a": "p"}, has_children=["", "p"])
    call(rec, "p.a", GOOD, GOOD)
    call(rec, "p", GOOD, GOOD)
    call(rec, "p.a", BAD, BAD)
    call(rec, "p", GOOD, BAD, "Block")
    call(rec, "", GOOD, BAD)
    assert forward(rec).path == "p"


def test_the_networks_own_input() -> None:
    rec = recorder(parents={"a": ""}, has_children=[""])
    call(rec, "a", BAD, BAD)
    call(rec, "", BAD, BAD, "Net")
    birth = forward(rec)
    assert (birth.path, birth.kind, birth.inputs_finite, birth.own_code) == ("", "input", False, False)
    assert birth.cell_type == "Net"


def test_only_one_cell_watched_and_its_input_is_bad() -> None:
    rec = recorder()
    call(rec, "tail", BAD, BAD)
    birth = forward(rec)
    assert (birth.path, birth.kind, birth.inputs_finite, birth.own_code) == ("tail", "input", False, False)


def test_the_parent_never_returned() -> None:
    rec = recorder(parents={"a": ""}, has_children=[""])
    call(rec, "a", BAD, BAD)  # an exception ended the step before the network did
    assert forward(rec).inputs_finite is None


def masked(rec: StepRecorder, softmax: Seen, after: Seen) -> None:
    """Attention: the mask is added in the parent's own code, the softmax is handed it."""
    call(rec, "softmax", MINUS, softmax, "Softmax")
    call(rec, "after", softmax, after)
    call(rec, "", GOOD, after)


def attention() -> StepRecorder:
    return recorder(parents={"log": "", "softmax": "", "after": "", "exp": ""}, has_children=[""])


@pytest.mark.parametrize("loss", [0.5, None, NAN, INF])
def test_a_mask_that_did_its_work_is_no_birth(loss: float | None) -> None:
    rec = attention()
    masked(rec, GOOD, GOOD)
    assert forward(rec, loss) is None


def test_a_mask_that_hides_a_whole_row_makes_softmax_the_birthplace() -> None:
    rec = attention()
    masked(rec, seen(NAN, 1.0), BAD)
    birth = forward(rec, NAN)
    assert (birth.path, birth.kind, birth.inputs_finite) == ("softmax", "output", False)


def test_a_mask_beside_an_unrelated_birth_is_not_the_birth() -> None:
    rec = attention()
    masked(rec, GOOD, GOOD)
    call(rec, "exp", GOOD, BAD, "Exp")
    assert forward(rec, NAN).path == "exp"


def test_log_of_zero_is_the_birth_of_the_nan_that_comes_of_it() -> None:
    rec = attention()
    masked(rec, GOOD, GOOD)
    call(rec, "log", GOOD, MINUS, "Log")
    call(rec, "after", MINUS, BAD)
    assert (forward(rec, NAN).path, forward(rec, NAN).neg_inf) == ("log", 1)
    rec = attention()
    call(rec, "log", GOOD, MINUS, "Log")
    call(rec, "after", BAD, BAD)  # the parent's own code made NaN of the -inf
    assert forward(rec, 0.5).path == "log"


def test_minus_inf_up_to_the_loss() -> None:
    rec = attention()
    masked(rec, GOOD, GOOD)
    call(rec, "log", GOOD, MINUS, "Log")
    call(rec, "", GOOD, MINUS)
    assert forward(rec, -INF).path == "log"
    assert forward(rec, 0.5) is None


def test_a_recurrent_cell_whose_own_code_broke_in_the_first_call() -> None:
    rec = recorder(parents={"p": "", "p.a": "p"}, has_children=["", "p"])
    call(rec, "p.a", BAD, BAD)
    call(rec, "p", GOOD, BAD, "Cell")
    call(rec, "p.a", BAD, BAD)
    call(rec, "p", BAD, BAD, "Cell")
    call(rec, "", GOOD, BAD)
    birth = forward(rec)
    assert (birth.path, birth.inputs_finite, birth.own_code) == ("p", True, True)


def test_a_swallowed_nan_is_still_a_birth() -> None:
    rec = recorder()
    call(rec, "log", GOOD, BAD)
    call(rec, "relu", BAD, GOOD)
    assert forward(rec, 0.5).path == "log"


def test_born_backward() -> None:
    rec = recorder()
    call(rec, "a", GOOD, GOOD)
    rec.gradient("good", "a", GOOD)
    rec.gradient("bad", "a", BAD)
    rec.gradient("worse", "a", BAD)
    forward_birth, birth = rec.births(0.5)
    assert forward_birth is None
    assert (birth.phase, birth.path, birth.kind, birth.nan) == ("backward", "bad", "gradient", 1)
    assert birth.inputs_finite is None  # what went in was not observed


def test_backward_with_output_gradients() -> None:
    rec = recorder()
    rec.output_gradient("b", "Dense", 0, "", GOOD)
    rec.output_gradient("a", "Exp", 0, "", GOOD)
    rec.gradient("a.w", "a", BAD)
    birth = rec.births(0.5)[1]
    assert (birth.path, birth.inputs_finite) == ("a.w", True)
    rec.begin()
    rec.output_gradient("b", "Dense", 0, "", GOOD)
    rec.output_gradient("a", "Exp", 0, "", BAD)
    rec.gradient("a.w", "a", BAD)
    birth = rec.births(0.5)[1]
    assert (birth.path, birth.cell_type, birth.kind, birth.inputs_finite) == ("a", "Exp", "output_gradient", True)


def test_gradients_are_victims_of_a_non_finite_forward_pass() -> None:
    rec = recorder()
    call(rec, "a", GOOD, BAD)
    rec.gradient("w", "a", BAD)
    forward_birth, birth = rec.births(NAN)
    assert forward_birth.path == "a"
    assert (birth.path, birth.inputs_finite) == ("w", False)


def test_backward_began() -> None:
    rec = recorder()
    assert not rec.backward_began
    rec.gradient("w", "", GOOD)
    assert rec.backward_began
