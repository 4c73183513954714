"""Keeping operators in float32: against the plain network, against O0, and against networks written by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, mint, nn, ops
from mindspore import dtype as mstype

from ampdebug._sites import OperatorSite
from ampdebug.hooks._checks import Trial, _settled, difference
from ampdebug.hooks._emulate import emulate, local_score, score_sites
from ampdebug.hooks._operators import known_paths
from ampdebug.hooks._protect import Policy, protect
from ampdebug.hooks._recording import align, record_evaluation, renamed
from ampdebug.hooks._state import without_recompute

pytestmark = pytest.mark.own_process


@pytest.fixture(autouse=True)
def pynative() -> None:
    ms.set_context(mode=ms.PYNATIVE_MODE)
    ms.runtime.launch_blocking()  # MindSpore's threads wait by spinning, which is slow where cores are few


class HandSoftmax(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        e = ops.exp(x)
        return e / e.sum(-1, keepdims=True)


class Attention(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.inlet = nn.Dense(8, 16)
        self.position = Parameter(Tensor(np.linspace(-1, 1, 8 * 16).reshape(1, 8, 16).astype(np.float32)))
        self.key, self.query, self.value = nn.Dense(16, 16), nn.Dense(16, 16), nn.Dense(16, 16)
        self.softmax = HandSoftmax()
        self.norm = nn.LayerNorm((16,))
        self.head = nn.Dense(8 * 16, 4)

    def construct(self, x: Tensor) -> Tensor:
        x = self.inlet(x.reshape(x.shape[0], 8, 8)) + self.position
        scores = ops.matmul(self.query(x), self.key(x).swapaxes(-1, -2))
        x = self.norm(x + ops.matmul(self.softmax(scores), self.value(x)))
        return self.head(x.reshape(x.shape[0], -1))


class Pooling(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 4, 3, stride=2, pad_mode="same")
        self.bn = nn.BatchNorm2d(4, beta_init="ones")
        self.pool = ops.ReduceMean()
        self.fc = nn.Dense(16, 4)

    def construct(self, x: Tensor) -> Tensor:
        x = self.bn(self.conv(x)) + 300.0
        x = ops.reshape(x, (x.shape[0], 16, 4))
        return self.fc(self.pool(x, 2))


class Unusual(nn.Cell):
    """In-place operators, views, nested outputs, a cell called twice, joins, branches."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 3)
        self.group = nn.GroupNorm(2, 8)
        self.shared = nn.Dense(8, 8)
        self.norm = nn.LayerNorm((8,))
        self.head = nn.Dense(16, 4)

    def halves(self, x: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        return x * 1.3, {"shifted": x + 0.1}

    def construct(self, x: Tensor) -> Tensor:
        g = ops.relu(self.group(self.conv(x))).mean((2, 3))
        x = x.reshape(x.shape[0], 8, 8)
        for _ in range(2):
            x = self.shared(x)
        y, others = self.halves(self.norm(x))
        y += others["shifted"]
        u, v = ops.split(y, 4, -1)
        w = ops.concat((v * 0.7, u), -1)
        w[:, 0] = g * 0.01
        w = ops.stack((w, x), 1).sum(1)
        h = ops.clamp(mint.add(w, 0.3).astype(w.dtype), -3, 3)
        if self.training:
            h = ops.where(h > 0, h, h * 0.1)
        return self.head(ops.concat((h.mean(1), g), -1))


NETS = [Attention, Pooling, Unusual]


def make(kind: Callable[[], nn.Cell], level: str = "O0") -> nn.Cell:
    ms.set_seed(3)
    net = kind()
    net.set_train()
    return net if level == "O0" else amp.auto_mixed_precision(net, level)


def trial() -> Trial:
    rng = np.random.default_rng(5)
    return Trial((Tensor(rng.normal(size=(5, 1, 8, 8)).astype(np.float32) * 2),), {}, training=True, seed=0)


def fingerprint(net: nn.Cell) -> list[Any]:
    return trial().fingerprint(net)


def warm(kind: Callable[[], nn.Cell], level: str) -> list[Any]:
    for _ in range(5):  # the CPU kernels try out thread numbers in their first launches, which reorders their sums
        seen = fingerprint(make(kind, level))
    return seen


def policy_of(kind: Callable[[], nn.Cell], level: str) -> Policy:
    calls = {}
    for name in ("O0", level):
        net = make(kind, name)
        with record_evaluation(net, known_paths(net)) as recording:
            fingerprint(net)
        calls[name] = recording.calls
    ours = {theirs: site for site, theirs in align(calls[level], calls["O0"]).items()}
    return Policy.of(calls[level], renamed(calls["O0"], ours))


def with_protected(kind: Callable[[], nn.Cell], level: str, policy: Policy, sites: set[OperatorSite]) -> list[Any]:
    net = make(kind, level)
    with protect(net, known_paths(net), policy, sites) as protection:
        seen = fingerprint(net)
    assert not protection.unknown
    return seen


@pytest.mark.parametrize("level", ["O1", "O2", "O3", "auto"])
@pytest.mark.parametrize("kind", NETS)
def test_protecting_nothing_is_plain_and_protecting_everything_is_float32(
    kind: Callable[[], nn.Cell], level: str
) -> None:
    exact, plain = warm(kind, "O0"), warm(kind, level)
    assert difference(exact, plain) > 1e-5, "the level changes nothing here, so the test would show nothing"
    policy = policy_of(kind, level)
    nothing = with_protected(kind, level, policy, set())
    assert difference(plain, nothing) == 0
    everything = with_protected(kind, level, policy, set(policy.outputs))
    if level == "O1":
        # O1's rewriting takes nested calls apart and runs independent ones in another order (`x + 0.1` before
        # `x * 1.3`), so that the gradients of x are added in another order.
        assert difference(exact[:1], everything[:1]) == 0
        assert difference(exact, everything) < 1e-6
    else:
        assert difference(exact, everything) == 0


# --- against networks written by hand -----------------------------------------------------------------------------

F16, F32 = mstype.float16, mstype.float32


def low(x: Tensor) -> Tensor:
    return ops.cast(x, F16)


def high(x: Tensor) -> Tensor:
    return ops.cast(x, F32)


class Written(nn.Cell):
    """``exp -> sum -> div`` with the casts of one protected set, as a user would write them."""

    def __init__(self, body: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(0.5, 1.5, 8).astype(np.float32)), name="weight")
        self.body = body

    def construct(self, x: Tensor) -> Tensor:
        return high(self.body(low(x) * low(self.weight)))


class Automatic(nn.Cell):
    """The same without casts; O3 puts everything in float16."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(0.5, 1.5, 8).astype(np.float32)), name="weight")

    def construct(self, x: Tensor) -> Tensor:
        x = x * self.weight
        e = ops.exp(x).reshape(4, 2, 4)
        s = e.sum(-1, keepdims=True)
        return e / s


def plain_body(x: Tensor) -> Tensor:
    e = ops.exp(x).reshape(4, 2, 4)
    return e / e.sum(-1, keepdims=True)


def exp_body(x: Tensor) -> Tensor:
    e = low(ops.exp(high(x))).reshape(4, 2, 4)
    return e / e.sum(-1, keepdims=True)


def exp_sum_body(x: Tensor) -> Tensor:
    e = ops.exp(high(x)).reshape(4, 2, 4)  # unrounded to the sum, rounded to the division
    s = low(e.sum(-1, keepdims=True))
    return low(e) / s


def exp_div_body(x: Tensor) -> Tensor:
    e = ops.exp(high(x)).reshape(4, 2, 4)  # unrounded to the division, rounded to the sum
    s = low(e).sum(-1, keepdims=True)
    return e / high(s)  # unrounded, since the level itself widens what leaves the network


def all_body(x: Tensor) -> Tensor:
    e = ops.exp(high(x)).reshape(4, 2, 4)
    return e / e.sum(-1, keepdims=True)


@pytest.mark.parametrize(
    ("operators", "body"),
    [
        (set(), plain_body),
        ({"Exp"}, exp_body),
        ({"Exp", "Tensor.sum"}, exp_sum_body),
        ({"Exp", "Tensor.__truediv__"}, exp_div_body),
        ({"Exp", "Tensor.sum", "Tensor.__truediv__"}, all_body),
    ],
)
def test_a_protected_set_equals_the_network_written_by_hand(
    operators: set[str], body: Callable[[Tensor], Tensor]
) -> None:
    assert_equals_by_hand(Automatic, operators, body)


def assert_equals_by_hand(
    automatic: Callable[[], nn.Cell], operators: set[str], body: Callable[[Tensor], Tensor]
) -> None:
    rng = np.random.default_rng(1)
    x = Tensor(rng.normal(size=(4, 8)).astype(np.float32) * 3)
    run = Trial((x,), {}, training=True, seed=0)
    for _ in range(5):
        by_hand = run.fingerprint(Written(body))

    recordings = []
    for level in ("O3", "O0"):
        net = automatic() if level == "O0" else amp.auto_mixed_precision(automatic(), level)
        with record_evaluation(net, known_paths(net)) as recording:
            run.fingerprint(net)
        recordings.append(recording.calls)
    policy = Policy.of(*recordings)
    net = amp.auto_mixed_precision(automatic(), "O3")
    sites = {site for site in policy.outputs if site.operator in operators}
    assert {site.operator for site in sites} == operators
    with protect(net, known_paths(net), policy, sites) as protection:
        protected = run.fingerprint(net)
    assert protection.reached == sites
    assert difference(by_hand, protected) == 0
    if operators:
        plain = run.fingerprint(amp.auto_mixed_precision(automatic(), "O3"))
        assert difference(by_hand, plain) > 0, "nothing was at stake"


class Of(nn.Cell):
    """A body without casts; O3 puts everything in float16."""

    def __init__(self, body: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = Parameter(Tensor(np.linspace(0.5, 1.5, 8).astype(np.float32)), name="weight")
        self.body = body
        self.exp = Exp()
        self.nested = Nested()

    def construct(self, x: Tensor) -> Tensor:
        return self.body(self, x * self.weight)


class Exp(nn.Cell):
    def construct(self, x: Tensor) -> Tensor:
        return ops.exp(x)


class Nested(nn.Cell):
    def construct(self, x: Tensor) -> tuple[Tensor, dict[str, list[Tensor]]]:
        return ops.exp(x), {"others": [x, ops.tanh(x) * 2.0]}


def added_in_place(self: Of, x: Tensor) -> Tensor:
    y = ops.exp(x)
    y += x
    return y * 0.3


def added_by_hand(x: Tensor) -> Tensor:
    y = ops.exp(high(x)) + high(x)  # unrounded into the sum, rounded into the product
    return low(y) * 0.3


def set_in_place(self: Of, x: Tensor) -> Tensor:
    y = ops.exp(x)
    y[:, 0] = x[:, 1] * 3.0
    return y / 7.0


def set_by_hand(x: Tensor) -> Tensor:
    column = high(x[:, 1:2] * 3.0)
    return ops.concat((column, ops.exp(high(x))[:, 1:]), -1) / 7.0


def views(self: Of, x: Tensor) -> Tensor:
    u, v = ops.split(ops.exp(x), 4, -1)
    return u.swapaxes(0, 1).sum(1) - v.sum(0)


def views_by_hand(x: Tensor) -> Tensor:
    e = ops.exp(high(x))
    return e[:, :4].swapaxes(0, 1).sum(1) - e[:, 4:].sum(0)


def nested(self: Of, x: Tensor) -> Tensor:
    e, more = self.nested(x)
    return e / more["others"][1]


def nested_by_hand(x: Tensor) -> Tensor:
    return ops.exp(high(x)) / high(ops.tanh(x) * 2.0)


def twice(self: Of, x: Tensor) -> Tensor:
    return self.exp(self.exp(x) * 0.1)


def twice_by_hand(x: Tensor) -> Tensor:
    return ops.exp(high(low(ops.exp(high(x))) * 0.1))


def branches(self: Of, x: Tensor) -> Tensor:
    for i in range(3):
        if float(x.mean()) > -100 and i % 2 == 0:
            x = ops.exp(x * 0.1)
        else:
            x = ops.tanh(x)
    return x


def branches_by_hand(x: Tensor) -> Tensor:
    x = low(ops.exp(high(x * 0.1)))
    return ops.exp(high(ops.tanh(x) * 0.1))


def masked(self: Of, x: Tensor) -> Tensor:
    return ops.where(x > 0, x, -1e6) / 1000.0  # a constant that float16 does not hold


def masked_by_hand(x: Tensor) -> Tensor:
    return ops.where(x > 0, high(x), -1e6) / 1000.0


@pytest.mark.parametrize(
    ("body", "operators", "by_hand"),
    [
        (added_in_place, {"Exp", "Tensor.__iadd__"}, added_by_hand),
        (set_in_place, {"Exp", "Tensor.__setitem__", "Tensor.__truediv__"}, set_by_hand),
        (views, {"Exp", "Tensor.sum", "Tensor.__sub__"}, views_by_hand),
        (nested, {"Exp", "Tensor.__truediv__"}, nested_by_hand),
        (twice, {"Exp"}, twice_by_hand),
        (branches, {"Exp"}, branches_by_hand),
        (masked, {"Select", "Tensor.__truediv__"}, masked_by_hand),
    ],
)
def test_in_place_views_nesting_shared_cells_and_branches_by_hand(
    body: Callable[[Any, Tensor], Tensor], operators: set[str], by_hand: Callable[[Tensor], Tensor]
) -> None:
    assert_equals_by_hand(lambda: Of(body), operators, by_hand)


def test_a_cast_of_the_users_own_still_rounds() -> None:
    class Careful(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(ops.tanh(x).astype(mstype.float16)).astype(mstype.float32) * 3.0

    exact, policy = warm(Careful, "O0"), policy_of(Careful, "O3")
    assert difference(exact, with_protected(Careful, "O3", policy, set(policy.outputs))) == 0


class Recomputed(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.attention.softmax.recompute()
        self.attention.norm.recompute()

    def construct(self, x: Tensor) -> Tensor:
        return self.attention(x)


def test_recompute_is_switched_off_without_a_change_in_numbers() -> None:
    exact = warm(Recomputed, "O0")
    net = make(Recomputed)
    assert without_recompute(net) == ["attention.softmax", "attention.norm"]
    assert without_recompute(net) == []
    assert difference(exact, fingerprint(net)) == 0

    def free() -> nn.Cell:
        free_net = Recomputed()
        without_recompute(free_net)
        return free_net

    policy = policy_of(free, "O3")
    assert difference(exact, with_protected(free, "O3", policy, set(policy.outputs))) == 0


# --- emulation ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [Attention, Pooling])
def test_emulation_stays_near_the_real_level(kind: Callable[[], nn.Cell]) -> None:
    level, net = "O3", make(kind)
    policy = policy_of(kind, level)
    exact, real = warm(kind, "O0"), warm(kind, level)
    with emulate(net, known_paths(net), policy, mstype.float16, frozenset()):
        emulated = fingerprint(net)
    assert 0.3 < difference(exact[:1], emulated[:1]) / difference(exact[:1], real[:1]) < 3
    net = make(kind)
    with emulate(net, known_paths(net), policy, mstype.float16, frozenset(policy.outputs)):
        assert difference(exact, fingerprint(net)) == 0


def test_bfloat16_can_be_emulated_without_its_kernels() -> None:
    policy = policy_of(Attention, "O3")
    exact, net = warm(Attention, "O0"), make(Attention)
    with emulate(net, known_paths(net), policy, mstype.bfloat16, frozenset()):
        coarse = fingerprint(net)
    net = make(Attention)
    with emulate(net, known_paths(net), policy, mstype.float16, frozenset()):
        fine = fingerprint(net)
    assert difference(exact[:1], coarse[:1]) > 2 * difference(exact[:1], fine[:1])  # 8 bits against 11


# --- scores -----------------------------------------------------------------------------------------------------------


def test_a_local_score_against_numpy() -> None:
    exact = np.array([1e5, 1e-9, 1.0 + 2**-12, -3.0, np.inf, 0.0], np.float32)
    with np.errstate(over="ignore"):
        rounded = exact.astype(np.float16).astype(np.float32)
    seen = local_score(exact, rounded)
    assert (seen.elements, seen.overflowed, seen.flushed) == (6, 1, 1)
    assert seen.absmax == 1e5
    assert seen.error == 2**-12
    assert seen.score == np.inf
    assert local_score(exact[1:4], rounded[1:4]).score == 0.0


def test_the_score_predicts_what_rounding_does_to_the_loss() -> None:
    """The loss is a sum, so that the score of a lone rounded site is the norm of its rounding errors."""

    class One(nn.Cell):
        def construct(self, x: Tensor) -> Tensor:
            return ops.exp(x)

    x = np.linspace(-2, 2, 7).astype(np.float16).astype(np.float32)  # exact in float16: only the output rounds
    net = One()
    site = OperatorSite("", "Exp", "", 0)
    with record_evaluation(net, known_paths(net)) as recording:
        net(Tensor(x))
    assert recording.calls[0].site is not None
    site = recording.calls[0].site
    policy = Policy({site: {("float16",): ("float16",)}})
    scores = score_sites(net, known_paths(net), policy, mstype.float16, lambda: net(Tensor(x)).sum())
    wide = np.exp(x.astype(np.float64))
    assert scores[site].score == pytest.approx(np.linalg.norm(wide.astype(np.float16) - wide), rel=0.02)
    assert not scores[site].overflowed


def test_an_overflow_scores_infinite() -> None:
    class Scaled(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.softmax = HandSoftmax()

        def construct(self, x: Tensor) -> Tensor:
            return self.softmax(x * 0.5)

    policy = policy_of(Scaled, "O3")
    net = make(Scaled)
    x = Tensor(np.linspace(-4, 24, 8).astype(np.float32))  # exp(12) is beyond 65504
    scores = score_sites(net, known_paths(net), policy, mstype.float16, lambda: net(x).sum())
    infinite = {site.operator for site, score in scores.items() if np.isinf(score.score)}
    assert infinite == {"Exp", "Tensor.sum", "Tensor.__truediv__"}
    exp = next(score for site, score in scores.items() if site.operator == "Exp")
    assert exp.overflowed == int((np.exp(np.linspace(-4, 24, 8) / 2) > 65504).sum())
    assert exp.absmax == pytest.approx(np.exp(12), rel=1e-5)


# --- the checks -------------------------------------------------------------------------------------------------------


def test_a_pass_is_repeated_until_it_settles_and_not_for_ever() -> None:
    def settled(values: list[float]) -> tuple[float, float, int]:
        left = iter(values)
        last, spread = _settled(lambda: [np.array([next(left)])])
        return float(last[0][0]), spread, len(values) - len(list(left))

    assert settled([1.0, 1.0, 5.0]) == (1.0, 0.0, 2)
    assert settled([4.0, 2.0, 3.0, 3.0, 9.0]) == (3.0, 0.0, 4)
    last, spread, passes = settled([float(2 ** (i % 2)) for i in range(50)])
    assert spread > 0
    assert passes == 7
    assert last == 1.0
