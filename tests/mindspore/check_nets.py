"""Networks with one fault each, and healthy ones that look like it; what ``ampdebug.check`` is tried on.

Each ``FAULTY`` entry makes ``(net, inputs, loss_fn, optimizer)`` and names the finding that must come first; none of
the ``HEALTHY`` ones may have a finding above severity "note".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, amp, nn, ops

F16, F32 = ms.float16, ms.float32
Made = tuple[Any, ...]
FAULTY: dict[str, tuple[str, Callable[[], Made]]] = {}
HEALTHY: dict[str, Callable[[], Made]] = {}


def faulty(slug: str) -> Callable[[Callable[[], Made]], Callable[[], Made]]:
    def keep(function: Callable[[], Made]) -> Callable[[], Made]:
        FAULTY[function.__name__] = (slug, function)
        return function

    return keep


def healthy(function: Callable[[], Made]) -> Callable[[], Made]:
    HEALTHY[function.__name__] = function
    return function


def normal(*shape: int, seed: int = 0, scale: float = 1.0) -> Any:
    return Tensor((np.random.RandomState(seed).randn(*shape) * scale).astype(np.float32))


def integers(high: int, *shape: int, seed: int = 0) -> Any:
    return Tensor(np.random.RandomState(seed).randint(0, high, shape), ms.int32)


def dense(n: int, m: int, scale: float | None = None, seed: int = 3) -> nn.Dense:
    weight = np.random.RandomState(seed).randn(m, n) * (scale if scale is not None else n**-0.5)
    return nn.Dense(n, m, has_bias=False, weight_init=Tensor(weight.astype(np.float32)))


# --- attention --------------------------------------------------------------------------------------------------------


class Attention(nn.Cell):
    def __init__(self, dim: int = 16, *, fill: float = float("-inf"), gain: float = 1.0, by_hand: bool = False) -> None:
        super().__init__()
        self.q, self.k = dense(dim, dim, gain * dim**-0.5, 1), dense(dim, dim, gain * dim**-0.5, 2)
        self.v = dense(dim, dim)
        self.softmax = nn.Softmax(-1)
        self.dim, self.fill, self.by_hand = dim, fill, by_hand

    def construct(self, x: Any, mask: Any = None) -> Any:
        scores = ops.matmul(self.q(x), self.k(x).swapaxes(-1, -2))
        scores = scores / self.dim**0.5
        if mask is not None:
            scores = ops.masked_fill(scores, mask, self.fill)
        if self.by_hand:
            weights = ops.exp(scores)
            weights = weights / weights.sum(-1, keepdims=True)
        else:
            weights = self.softmax(scores)
        return ops.matmul(weights, self.v(x))


def padding(rows: int = 2, n: int = 6, *, whole: bool = False) -> Any:
    mask = np.zeros((rows, 1, n), bool)
    mask[0, :, 4:] = True
    if whole:
        mask[0] = True
    return Tensor(mask)


@faulty("softmax-row-fully-masked")
def row_masked_by_inf() -> Made:
    return amp.auto_mixed_precision(Attention(), "O2"), (normal(2, 6, 16), padding(whole=True))


@faulty("softmax-row-fully-masked")
def row_masked_by_a_number() -> Made:
    return amp.auto_mixed_precision(Attention(fill=-1e9), "O2"), (normal(2, 6, 16), padding(whole=True))


@faulty("qk-matmul-overflow-before-scaling")
def scores_overflow() -> Made:
    return amp.auto_mixed_precision(Attention(gain=130.0), "O2"), (normal(2, 6, 16),)


@faulty("handwritten-softmax-overflow")
def exponentials_overflow() -> Made:
    return amp.auto_mixed_precision(Attention(gain=4.0, by_hand=True), "O2"), (normal(2, 6, 16, scale=1.5),)


class LogSumExpByHand(nn.Cell):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.proj = dense(16, 10, gain)

    def construct(self, x: Any) -> Any:
        return ops.log(ops.exp(self.proj(x)).sum(-1))


@faulty("handwritten-softmax-overflow")
def logsumexp_without_its_maximum() -> Made:
    return amp.auto_mixed_precision(LogSumExpByHand(3.0), "O2"), (normal(8, 16, scale=2.0),)


@healthy
def logsumexp_in_range() -> Made:
    return amp.auto_mixed_precision(LogSumExpByHand(0.25), "O2"), (normal(8, 16),)


class AddedMask(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.proj = dense(8, 8)

    def construct(self, x: Any, keep: Any) -> Any:
        penalty = keep.logical_not().astype(x.dtype) * np.finfo(np.float32).min
        return ops.softmax(self.proj(x) + penalty, -1)


@faulty("mask-constant-overflows-fp16")
def smallest_float32_in_float16() -> Made:
    keep = np.ones((4, 8), bool)
    keep[:, 6:] = False
    return amp.auto_mixed_precision(AddedMask(), "O3"), (normal(4, 8), Tensor(keep))


@faulty("softmax-row-fully-masked")
def row_masked_in_float32() -> Made:
    return Attention(), (normal(2, 6, 16), padding(whole=True))


@healthy
def causal_mask() -> Made:
    mask = Tensor(np.triu(np.ones((6, 6), bool), 1)[None])
    return amp.auto_mixed_precision(Attention(), "O2"), (normal(2, 6, 16), mask)


@healthy
def padding_mask_that_becomes_inf() -> Made:
    return amp.auto_mixed_precision(Attention(fill=-1e9), "O2"), (normal(2, 6, 16), padding())


@healthy
def padding_mask_at_the_end_of_the_format() -> Made:
    return amp.auto_mixed_precision(Attention(fill=-65504.0), "O3"), (normal(2, 6, 16), padding())


@healthy
def softmax_by_hand_in_range() -> Made:
    return amp.auto_mixed_precision(Attention(by_hand=True), "O2"), (normal(2, 6, 16),)


class AddedInf(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.proj = dense(6, 6)
        self.mask = Tensor(np.triu(np.full((6, 6), -np.inf, np.float32), 1))

    def construct(self, x: Any) -> Any:
        return ops.softmax(self.proj(x) + self.mask, -1)


@healthy
def added_constant_mask() -> Made:
    return amp.auto_mixed_precision(AddedInf(), "O2"), (normal(6, 6),)


# --- normalisation ----------------------------------------------------------------------------------------------------


class LayerNormByHand(nn.Cell):
    def __init__(self, gain: float, eps: float = 1e-5) -> None:
        super().__init__()
        self.proj, self.head, self.eps = dense(16, 16, gain), dense(16, 4), eps

    def construct(self, x: Any) -> Any:
        h = self.proj(x)
        h = h - h.mean(-1, keep_dims=True)
        var = ops.pow(h, 2).mean(-1, keep_dims=True)
        return self.head(h / ops.sqrt(var + self.eps))


@faulty("rmsnorm-square-overflow-output-zero")
def variance_by_hand() -> Made:
    return amp.auto_mixed_precision(LayerNormByHand(200.0), "O2"), (normal(4, 16),)


@faulty("eps-1e-8-is-zero-in-fp16")
def epsilon_of_a_constant_row() -> Made:
    x = normal(4, 16).asnumpy().copy()
    x[1] = 0.0
    return amp.auto_mixed_precision(LayerNormByHand(0.25, 1e-9), "O2"), (Tensor(x),)


@healthy
def layer_norm_by_hand() -> Made:
    return amp.auto_mixed_precision(LayerNormByHand(0.25), "O2"), (normal(4, 16),)


class Normed(nn.Cell):
    def __init__(self, norm: nn.Cell, gain: float = 0.3) -> None:
        super().__init__()
        self.fc1, self.norm, self.fc2 = dense(16, 16, gain), norm, dense(16, 4)

    def construct(self, x: Any) -> Any:
        return self.fc2(ops.gelu(self.norm(self.fc1(x))))


@faulty("normalisation-forced-to-fp16")
def layer_norm_under_o3() -> Made:
    return amp.auto_mixed_precision(Normed(nn.LayerNorm((16,)), 40.0), "O3"), (normal(8, 16) + 3.0,)


@healthy
def layer_norm_under_o3_with_ordinary_inputs() -> Made:
    return amp.auto_mixed_precision(Normed(nn.LayerNorm((16,))), "O3"), (normal(8, 16),)


@healthy
def batch_norm_under_o3_with_ordinary_inputs() -> Made:
    return amp.auto_mixed_precision(Normed(nn.BatchNorm1d(16)), "O3"), (normal(8, 16),)


@faulty("to-float-pin-lost-by-later-amp-call")
def pinned_before_the_level() -> Made:
    net = Normed(nn.LayerNorm((16,)))
    net.fc2.to_float(F32)
    return amp.auto_mixed_precision(net, "O2"), (normal(8, 16),)


@healthy
def pinned_after_the_level() -> Made:
    net = Normed(nn.LayerNorm((16,)))
    converted = amp.auto_mixed_precision(net, "O2")
    net.fc2.to_float(F32)
    return converted, (normal(8, 16),)


@healthy
def layer_norm_under_o2() -> Made:
    return amp.auto_mixed_precision(Normed(nn.LayerNorm((16,))), "O2"), (normal(8, 16),)


@healthy
def batch_norm_under_o2() -> Made:
    return amp.auto_mixed_precision(Normed(nn.BatchNorm1d(16)), "O2"), (normal(8, 16),)


# --- convolution, pooling, streams ------------------------------------------------------------------------------------


class Pooled(nn.Cell):
    def __init__(self, gain: float, *, by_sum: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, has_bias=False, weight_init=Tensor(np.full((8, 3, 3, 3), gain), F32))
        self.fc, self.by_sum = dense(8, 4), by_sum

    def construct(self, x: Any) -> Any:
        h = ops.relu(self.conv(x))
        pooled = h.sum(axis=(2, 3)) / (h.shape[2] * h.shape[3]) if self.by_sum else h.mean((2, 3))
        return self.fc(pooled)


@faulty("reduce-sum-overflow-in-pooling")
def pooling_by_sum() -> Made:
    x = Tensor(np.random.RandomState(0).uniform(0, 3, (1, 3, 96, 96)).astype(np.float32))
    return amp.auto_mixed_precision(Pooled(0.5, by_sum=True), "O2"), (x,)


@faulty("forward-overflow-scale-independent")
def convolution_overflows() -> Made:
    x = Tensor(np.random.RandomState(0).uniform(0, 3, (1, 3, 8, 8)).astype(np.float32))
    return amp.auto_mixed_precision(Pooled(3000.0, by_sum=False), "O2"), (x,)


@healthy
def pooling_by_mean() -> Made:
    x = Tensor(np.random.RandomState(0).uniform(0, 3, (1, 3, 96, 96)).astype(np.float32))
    return amp.auto_mixed_precision(Pooled(0.5, by_sum=False), "O2"), (x,)


class Spread(nn.Cell):
    """Divides by a standard deviation that is a difference of large numbers, or a mean of small squares."""

    def __init__(self, *, by_difference: bool) -> None:
        super().__init__()
        self.dense, self.by_difference = dense(16, 64, 0.02, 1), by_difference

    def construct(self, x: Any) -> Any:
        z = self.dense(x) + 60
        mean = z.mean(-1, keep_dims=True)
        variance = (z * z).mean(-1, keep_dims=True) - mean**2
        if not self.by_difference:
            variance = ops.square(z - mean).mean(-1, keep_dims=True)
        return (z - mean) / ops.sqrt(variance + 1e-4)


@faulty("domain-left-by-rounding")
def variance_by_a_difference() -> Made:
    return amp.auto_mixed_precision(Spread(by_difference=True), "O3"), (normal(8, 16),)


@healthy
def variance_by_squares() -> Made:
    return amp.auto_mixed_precision(Spread(by_difference=False), "O3"), (normal(8, 16),)


@faulty("label-ge-num-classes")
def ignored_label_of_which_the_loss_was_not_told() -> Made:
    labels = integers(5, 2, 8, 8)
    labels[0, 0] = 255
    return amp.auto_mixed_precision(nn.Conv2d(3, 5, 3), "O2"), (normal(2, 3, 8, 8), labels), ops.cross_entropy


class Block(nn.Cell):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.norm, self.fc = nn.LayerNorm((16,)), dense(16, 16, gain)

    def construct(self, x: Any) -> Any:
        return x + self.fc(self.norm(x))


class Stream(nn.Cell):
    def __init__(self, gain: float, *, limit: float | None = None) -> None:
        super().__init__()
        self.blocks = nn.CellList([Block(gain * 2.0**i) for i in range(6)])
        self.norm, self.limit = nn.LayerNorm((16,)), limit

    def construct(self, x: Any) -> Any:
        for block in self.blocks:
            x = block(x)
            if self.limit is not None:
                x = ops.clamp(x, -self.limit, self.limit)
        return self.norm(x)


@faulty("residual-stream-exceeds-fp16")
def stream_grows() -> Made:
    return amp.auto_mixed_precision(Stream(300.0), "O2"), (normal(4, 16),)


@faulty("values-pinned-at-fp16-max")
def stream_clipped() -> Made:
    return amp.auto_mixed_precision(Stream(300.0, limit=65504.0), "O2"), (normal(4, 16),)


class Replaced(nn.Cell):
    def __init__(self, gain: float) -> None:
        super().__init__()
        self.fc = dense(16, 16, gain)

    def construct(self, x: Any) -> Any:
        h = self.fc(x)
        return ops.where(ops.isinf(h), ops.full_like(h, 65504.0), h)


@faulty("values-pinned-at-fp16-max")
def infinities_replaced() -> Made:
    return amp.auto_mixed_precision(Replaced(9000.0), "O2"), (normal(4, 16),)


@healthy
def no_infinity_to_replace() -> Made:
    return amp.auto_mixed_precision(Replaced(0.3), "O2"), (normal(4, 16),)


@healthy
def stream_in_range() -> Made:
    return amp.auto_mixed_precision(Stream(0.2, limit=65504.0), "O2"), (normal(4, 16),)


# --- losses, labels, data ---------------------------------------------------------------------------------------------


class Mlp(nn.Cell):
    def __init__(self, n: int = 16, m: int = 4) -> None:
        super().__init__()
        self.fc1, self.fc2 = dense(n, 32), dense(32, m)

    def construct(self, x: Any) -> Any:
        return self.fc2(ops.gelu(self.fc1(x)))


@faulty("label-ge-num-classes")
def label_too_large() -> Made:
    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), integers(5, 8)), ops.cross_entropy


@faulty("label-ge-num-classes")
def label_too_large_without_a_loss() -> Made:
    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), integers(5, 8))


class WithLoss(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.loss = Mlp(), nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

    def construct(self, x: Any, y: Any) -> Any:
        return self.loss(self.net(x).astype(F32), y)


@faulty("label-ge-num-classes")
def label_too_large_inside_the_network() -> Made:
    return amp.auto_mixed_precision(WithLoss(), "O2"), (normal(8, 16), integers(5, 8))


@faulty("mean-over-zero-valid-labels")
def all_labels_ignored_without_a_loss() -> Made:
    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), Tensor(np.full(8, -100), ms.int32))


@faulty("label-ge-num-classes")
def label_too_large_for_one_hot() -> Made:
    def loss(scores: Any, labels: Any) -> Any:
        return -(ops.one_hot(labels, 4).astype(F32) * ops.log_softmax(scores, -1)).sum(-1).mean()

    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), integers(5, 8)), loss


@faulty("mean-over-zero-valid-labels")
def all_labels_ignored() -> Made:
    return Mlp(), (normal(8, 16), Tensor(np.full(8, -100), ms.int32)), ops.cross_entropy


@faulty("mean-over-zero-valid-labels")
def masked_mean_over_nothing() -> Made:
    def loss(scores: Any, mask: Any) -> Any:
        return ((scores**2).mean(-1) * mask).sum() / mask.sum()

    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), Tensor(np.zeros(8), F32)), loss


@faulty("loss-denominator-overflow-loss-zero")
def count_overflows() -> Made:
    def loss(scores: Any, mask: Any) -> Any:
        mask = mask.astype(F16)
        return ((scores.astype(F16).mean(-1) ** 2) * mask).mean() * 100 / mask.sum()

    return amp.auto_mixed_precision(Mlp(4, 2), "O2"), (normal(70000, 4), Tensor(np.ones(70000), F32)), loss


@healthy
def labels_with_an_ignored_one() -> Made:
    labels = integers(4, 8).asnumpy().copy()
    labels[2] = -100
    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), Tensor(labels)), ops.cross_entropy


@healthy
def labels_with_255() -> Made:
    labels = integers(4, 8).asnumpy().copy()
    labels[2] = 255

    def loss(scores: Any, y: Any) -> Any:
        return ops.cross_entropy(scores, y, ignore_index=255)

    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), Tensor(labels)), loss


class Swallower(nn.Cell):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.conv, self.fc, self.how = nn.Conv2d(1, 4, 3), dense(4, 2), how

    def construct(self, x: Any) -> Any:
        h = self.conv(x)
        if self.how == "maxpool":
            h = ops.max_pool2d(h, 2)
        elif self.how == "clip":
            h = ops.clip_by_value(h, -3.0, 3.0)
        else:
            h = ops.maximum(h, Tensor(0.0, h.dtype))
        return self.fc(h.mean((2, 3)))


def _nan_image() -> Any:
    x = normal(4, 1, 8, 8).asnumpy().copy()
    x[1] = np.nan
    return Tensor(x)


@faulty("nan-input-hidden-by-relu")
def hidden_by_maxpool() -> Made:
    return amp.auto_mixed_precision(Swallower("maxpool"), "O2"), (_nan_image(),)


@faulty("nan-input-hidden-by-relu")
def hidden_by_clip() -> Made:
    return amp.auto_mixed_precision(Swallower("clip"), "O2"), (_nan_image(),)


@faulty("nan-input-hidden-by-relu")
def hidden_by_maximum() -> Made:
    return Swallower("maximum"), (_nan_image(),)


@faulty("nan-from-first-step-after-resume")
def broken_checkpoint() -> Made:
    net = Mlp()
    weight = net.fc1.weight.asnumpy().copy()
    weight[3, 3] = np.nan
    net.fc1.weight.set_data(Tensor(weight))
    return amp.auto_mixed_precision(net, "O2"), (normal(8, 16),)


# --- backward, update -------------------------------------------------------------------------------------------------


class Trap(nn.Cell):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.fc, self.how = dense(8, 8), how

    def construct(self, x: Any) -> Any:
        h = ops.relu(self.fc(x))
        if self.how == "sqrt":
            return ops.clamp(ops.sqrt(h), 1e-3, 10.0).mean()
        if self.how == "quotient":
            size = h.abs().sum(-1, keepdims=True)
            return ops.where(size > 1e9, h / (size * 0), h).mean()
        if self.how == "where":
            return ops.where(h > 0, ops.log(h), ops.zeros_like(h)).mean()
        return ops.sqrt((h * 0).sum(-1)).mean() + h.mean()


@faulty("backward-nan-from-noop-clamp")
def clamp_after_the_root() -> Made:
    return amp.auto_mixed_precision(Trap("sqrt"), "O2"), (normal(4, 8),)


@faulty("backward-nan-from-noop-clamp")
def where_around_the_logarithm() -> Made:
    return Trap("where"), (normal(4, 8),)


@faulty("backward-nan-from-noop-clamp")
def where_around_a_quotient() -> Made:
    return Trap("quotient"), (normal(4, 8),)


@faulty("backward-nan-from-noop-clamp")
def norm_at_zero() -> Made:
    return Trap("norm"), (normal(4, 8),)


@faulty("gradients-flushed-to-zero-without-loss-scale")
def tiny_loss() -> Made:
    def loss(scores: Any, labels: Any) -> Any:
        return ops.cross_entropy(scores, labels) * 1e-6

    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), integers(4, 8)), loss


@healthy
def tiny_loss_scaled() -> Made:
    def loss(scores: Any, labels: Any) -> Any:
        return ops.cross_entropy(scores, labels) * 1e-6 * 2.0**20

    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), integers(4, 8)), loss


@healthy
def first_scale_of_a_search() -> Made:
    def loss(scores: Any, labels: Any) -> Any:
        return ops.cross_entropy(scores, labels) * 2.0**24

    return amp.auto_mixed_precision(Mlp(), "O2"), (normal(8, 16), integers(4, 8)), loss


def _half(net: nn.Cell) -> nn.Cell:
    net.to_float(F16)
    for parameter in net.get_parameters():
        parameter.set_dtype(F16)
    return net


@faulty("fp16-update-below-half-ulp")
def update_too_small() -> Made:
    net = _half(Mlp())
    optimizer = nn.SGD(net.trainable_params(), 1e-6)
    return net, (normal(8, 16).astype(F16), integers(4, 8)), ops.cross_entropy, optimizer


@faulty("adam-eps-underflow-fp16-params")
def adam_on_float16() -> Made:
    net = _half(Mlp())
    return net, (normal(8, 16).astype(F16), integers(4, 8)), ops.cross_entropy, nn.Adam(net.trainable_params(), 1e-2)


@healthy
def adam_on_float32() -> Made:
    net = amp.auto_mixed_precision(Mlp(), "O2")
    return net, (normal(8, 16), integers(4, 8)), ops.cross_entropy, nn.Adam(net.trainable_params(), 1e-2)


# --- the level --------------------------------------------------------------------------------------------------------


class Leak(nn.Cell):
    def __init__(self, dtype: Any) -> None:
        super().__init__()
        self.a, self.b = Parameter(normal(16, 16, scale=0.2), name="a"), Parameter(normal(16, 4, scale=0.2), name="b")
        self.position = Parameter(Tensor(normal(8, 16).asnumpy(), dtype), name="position")

    def construct(self, x: Any) -> Any:
        h = ops.matmul(x.astype(F16), self.a.astype(F16))
        h = h + self.position
        return ops.matmul(ops.relu(h), self.b.astype(h.dtype))


@faulty("fp32-leak-keeps-chain-fp32")
def position_in_float32() -> Made:
    return Leak(F32), (normal(8, 16),)


@healthy
def position_in_float16() -> Made:
    return Leak(F16), (normal(8, 16),)


class OwnDense(nn.Dense):
    """O1 looks for nn.Dense itself."""


class OwnMlp(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = OwnDense(16, 32, weight_init=normal(32, 16, scale=0.3))
        self.weight = Parameter(normal(32, 4, scale=0.2), name="weight")

    def construct(self, x: Any) -> Any:
        return ops.matmul(ops.relu(self.fc(x)), self.weight)


@faulty("o1-converted-nothing")
def o1_on_own_cells() -> Made:
    return amp.auto_mixed_precision(OwnMlp(), "O1"), (normal(8, 16),)


@healthy
def o1_on_dense() -> Made:
    return amp.auto_mixed_precision(Mlp(), "O1"), (normal(8, 16),)


@healthy
def auto_level() -> Made:
    return amp.auto_mixed_precision(Normed(nn.LayerNorm((16,))), "auto"), (normal(8, 16),)


class Frozen(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head, self.drop = Mlp(16, 16), dense(16, 4), nn.Dropout(p=0.5)
        for parameter in self.backbone.get_parameters():
            parameter.requires_grad = False

    def construct(self, x: Any) -> Any:
        return self.head(self.drop(ops.relu(self.backbone(x))))


@healthy
def frozen_backbone_and_dropout() -> Made:
    return amp.auto_mixed_precision(Frozen(), "O2"), (normal(8, 16), integers(4, 8)), ops.cross_entropy


class Conv(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn1, self.bn2, self.relu, self.pool = nn.BatchNorm2d(8), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2, 2)
        self.conv2, self.fc = nn.Conv2d(8, 8, 3), nn.Dense(8, 4)

    def construct(self, x: Any) -> Any:
        x = self.pool(self.relu(self.bn1(self.conv1(x))))
        x = x + self.relu(self.bn2(self.conv2(x)))
        return self.fc(x.mean((2, 3)))


@healthy
def residual_cnn() -> Made:
    return amp.auto_mixed_precision(Conv(), "O2"), (normal(4, 3, 16, 16), integers(4, 4)), ops.cross_entropy


class Words(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention, self.norm = nn.Embedding(20, 16), Attention(), nn.LayerNorm((16,))
        self.head = nn.Dense(16, 20)

    def construct(self, tokens: Any) -> Any:
        x = self.table(tokens)
        mask = Tensor(np.triu(np.ones((6, 6), bool), 1)[None])
        return self.head(self.norm(x + self.attention(x, mask)))


def _language_loss(scores: Any, labels: Any) -> Any:
    return ops.cross_entropy(scores.reshape(-1, 20), labels.reshape(-1))


@healthy
def language_model() -> Made:
    return amp.auto_mixed_precision(Words(), "O2"), (integers(20, 2, 6), integers(20, 2, 6, seed=1)), _language_loss


@healthy
def language_model_float32() -> Made:
    return Words(), (integers(20, 2, 6), integers(20, 2, 6, seed=1)), _language_loss


class Saturated(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = dense(16, 4, 20.0)

    def construct(self, x: Any) -> Any:
        return ops.sigmoid(self.fc(x)) + ops.tanh(ops.relu(self.fc(x)))


@healthy
def saturated_activations() -> Made:
    return amp.auto_mixed_precision(Saturated(), "O2"), (normal(8, 16),)


class Grouped(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.GroupNorm(4, 8)
        self.rnn, self.fc = nn.RNN(8, 8, batch_first=True), nn.Dense(8, 4)

    def construct(self, x: Any) -> Any:
        h = ops.silu(self.norm(self.conv(x)))
        h = h.reshape(h.shape[0], h.shape[1], -1).swapaxes(1, 2)
        return self.fc(self.rnn(h)[0][:, -1])


@healthy
def group_norm_and_a_recurrent_layer() -> Made:
    return amp.auto_mixed_precision(Grouped(), "O2"), (normal(4, 3, 6, 6), integers(4, 4)), ops.cross_entropy


@healthy
def encoder_layer() -> Made:
    net = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    return amp.auto_mixed_precision(net, "O2"), (normal(2, 6, 16),)


class InPlace(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.fc = dense(8, 8)

    def construct(self, x: Any) -> Any:
        h = self.fc(x)
        h += 1.0
        h[:, 0] = 0.0
        return ops.softplus(h) / (ops.abs(h).sum(-1, keepdims=True) + 1e-6)


@healthy
def in_place_operators() -> Made:
    return amp.auto_mixed_precision(InPlace(), "O2"), (normal(4, 8),)


@healthy
def two_losses_and_a_tuple() -> Made:
    def loss(scores: Any, y: Any) -> Any:
        return ops.cross_entropy(scores, y) + (scores**2).mean() * 0.01, scores

    return amp.auto_mixed_precision(Mlp(), "O3"), (normal(8, 16), integers(4, 8)), loss
