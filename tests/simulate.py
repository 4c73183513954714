"""A simulation of mixed-precision trainings and of the logs that tools write about them.

It shares nothing with the rules: scalers are implemented here from their frameworks' documented behaviour, gradients
are a random process, and a fault is a change of that process (the forward pass breaks, an update is made that should
not be, the scaler forgets its state). What is *expected* of a diagnosis follows from the fault and
from what a format can show.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

FP16_MAX = 65504.0
NAN = float("nan")


# --- scalers -----------------------------------------------------------------------------------------------------


class Static:
    """A fixed scale."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def update(self, overflow: bool) -> None:
        pass


class Dynamic:
    """MindSpore's DynamicLossScaleUpdateCell: halve on overflow (never below the floor), double after a window."""

    def __init__(self, scale: float, window: int, factor: float = 2.0, floor: float = 1.0) -> None:
        self.scale, self.window, self.factor, self.floor, self.good = scale, window, factor, floor, 0

    def update(self, overflow: bool) -> None:
        if overflow:
            self.scale, self.good = max(self.scale / self.factor, self.floor), 0
        else:
            self.good += 1
            if self.good >= self.window:
                self.scale, self.good = self.scale * self.factor, 0


class Torch(Dynamic):
    """PyTorch's GradScaler (no floor); apex is the same with a cap of 2**24."""

    def __init__(self, scale: float = 65536.0, window: int = 2000, cap: float = math.inf) -> None:
        super().__init__(scale, window, 2.0, 0.0)
        self.cap = cap

    def update(self, overflow: bool) -> None:
        super().update(overflow)
        self.scale = min(self.scale, self.cap)


class DeepSpeed:
    """DeepSpeed's DynamicLossScaler: some overflows are let pass before the scale is halved."""

    def __init__(self, power: int = 16, window: int = 1000, hysteresis: int = 2, floor: float = 1.0) -> None:
        self.scale, self.window, self.hysteresis, self.floor = 2.0**power, window, hysteresis, floor
        self.left, self.step, self.last = hysteresis, 0, -1

    def update(self, overflow: bool) -> None:
        if overflow:
            if self.left == 1:
                self.scale = max(self.scale / 2, self.floor)
            else:
                self.left -= 1
            self.last = self.step
        elif (self.step - self.last) % self.window == 0:
            self.left = self.hysteresis
            self.scale *= 2
        self.step += 1


Scaler = Static | Dynamic | DeepSpeed


# --- the training --------------------------------------------------------------------------------------------------


@dataclass
class Moment:
    """One simulated step, everything known."""

    step: int
    epoch: int
    epoch_step: int
    loss: float
    scale: float
    scale_after: float
    overflow: bool
    applied: bool
    norm: float
    lr: float
    updates: int
    hysteresis: int = 1
    restart: str = ""


@dataclass
class Setup:
    """A training: what the gradients and the loss do, which scaler, and what goes wrong."""

    seed: int
    steps: int = 600
    epoch_steps: int = 200
    scaler: Callable[[], Scaler] = lambda: Dynamic(65536.0, 1000)
    grad_log2: float = -4.0  # typical log2 of the largest gradient element
    noise: float = 0.5
    drift: float = -1.0  # change of grad_log2 over the run
    first_loss: float = 7.0
    last_loss: float = 2.0
    loss_noise: float = 0.05
    spikes: int = 0
    guarded: bool = True  # updates with non-finite gradients are skipped
    detects: bool = True  # the loop reports overflow
    forward_breaks: int | None = None  # from this step on the forward pass gives NaN
    backward_breaks: int | None = None  # from this step on a gradient is inf whatever the scale
    gradient_burst: int | None = None  # a few steps with huge gradients
    bad_batch: int | None = None  # the place in each epoch whose batch holds NaN
    diverge: int | None = None  # the loss climbs from here on
    zero_loss: int | None = None  # the divisor is inf from here on
    norm_is_scaled: bool = False
    restart_at: int | None = None
    restart_forgets: bool = False
    restart_nan: bool = False
    stuck_scaler: int | None = None  # the scaler stops growing here, after a burst
    base_lr: float = 1e-3


def train(setup: Setup) -> Iterator[Moment]:
    """Run it."""
    rng = random.Random(setup.seed)
    scaler = setup.scaler()
    corrupted = False
    updates = 0
    ar = 0.0
    decay = setup.steps / 4.0
    spikes = {rng.randrange(30, setup.steps - 10) for _ in range(setup.spikes)} if setup.steps > 60 else set()
    climb = 1.0
    for step in range(1, setup.steps + 1):
        restart = ""
        if setup.restart_at == step:
            restart = "nan" if setup.restart_nan else "forgot" if setup.restart_forgets else "ok"
            if setup.restart_forgets:
                scaler = setup.scaler()
            corrupted = corrupted or setup.restart_nan
        epoch, within = divmod(step - 1, setup.epoch_steps)
        progress = step / setup.steps
        ar = 0.7 * ar + rng.gauss(0, setup.noise * 0.7)
        log2 = setup.grad_log2 + setup.drift * progress + ar
        loss = setup.last_loss + (setup.first_loss - setup.last_loss) * math.exp(-step / decay)
        loss *= 1 + rng.gauss(0, setup.loss_noise)
        if step in spikes:
            loss *= rng.uniform(2.5, 6)
            log2 += rng.uniform(1, 3)
        if setup.diverge is not None and step >= setup.diverge:
            climb *= 1 + rng.uniform(0.02, 0.12)
            loss *= climb
            log2 += math.log2(climb)
            if climb > 1e6:
                corrupted = True
        if setup.gradient_burst is not None and 0 <= step - setup.gradient_burst < 3:
            log2 += 30
        biggest = 2.0**log2
        norm = biggest * (4 + 2 * rng.random())
        broken = setup.forward_breaks is not None and step >= setup.forward_breaks
        bad = setup.bad_batch is not None and within + 1 == setup.bad_batch
        if corrupted or broken or bad:
            loss = NAN
        zero = setup.zero_loss is not None and step >= setup.zero_loss and loss == loss
        if zero:
            loss, norm, biggest = 0.0, 0.0, 0.0
        inf_backward = setup.backward_breaks is not None and step >= setup.backward_breaks
        scale = scaler.scale
        overflow = loss != loss or inf_backward or biggest * scale > FP16_MAX
        if loss != loss:
            norm = NAN
        elif overflow:
            norm = math.inf
        if setup.norm_is_scaled and math.isfinite(norm):
            norm *= scale
        applied = not overflow or not setup.guarded
        if overflow and applied:
            corrupted = True
        updates += applied
        hysteresis = getattr(scaler, "left", 1)
        if setup.stuck_scaler is None or step < setup.stuck_scaler or overflow:
            scaler.update(overflow)
        lr = setup.base_lr * min(1.0, step / (0.1 * setup.steps))
        yield Moment(
            step,
            epoch + 1,
            within + 1,
            loss,
            scale,
            scaler.scale,
            overflow and setup.detects,
            applied,
            norm,
            lr,
            updates,
            hysteresis,
            restart,
        )


# --- formats -------------------------------------------------------------------------------------------------------


@dataclass
class Style:
    """How a tool writes about a training.

    Attributes:
        shows: What of loss, overflow, scale, norm can be seen.
        write: Lines of a run.
        intervals: Logging intervals that the tool's users choose.
    """

    name: str
    shows: frozenset[str]
    write: Callable[[list[Moment], int, Setup], list[str]]
    intervals: tuple[int, ...] = (1, 5, 10, 20)
    scaler: str = "any"


def _on(moments: list[Moment], interval: int) -> Iterator[Moment]:
    for m in moments:
        if m.step % interval == 0:
            yield m


def _restart_line(m: Moment) -> list[str]:
    return (
        [f"2024-08-19 14:00:00,000 - INFO - Resume training from checkpoint ./output/rank_0-{m.step - 1}.ckpt"]
        if m.restart
        else []
    )


def _mindformers(moments: list[Moment], interval: int, setup: Setup, *, mean: bool = False) -> list[str]:
    out: list[str] = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval and not m.overflow:
            continue
        loss = f"loss:[{m.loss:.3f}/{m.loss:.3f}]" if mean else f"loss: {m.loss:.3f}"
        out.append(
            "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO - { "
            f"Epoch:[{m.epoch:3d}/  9], step:[{m.epoch_step:5d}/{setup.epoch_steps:5d}], {loss}, per_step_time: "
            f"2510ms, lr: {m.lr:.7g}, overflow cond: {m.overflow}, loss_scale: {m.scale}, global_norm: [{m.norm:.6g}]"
        )
        if not mean:
            out.append(
                "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO -    "
                f"{100 * m.step / setup.steps:.1f}% |█████         | 12.50000 samples/s/p  0:20:47 }}"
            )
    return out


def _mindformers_mean(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return _mindformers(moments, interval, setup, mean=True)


def _mindyolo(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out: list[str] = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval:
            continue
        if m.overflow:
            what = "still update" if m.applied else "drop step"
            out.append(f"2024-03-05 09:33:51,047 [WARNING] overflow, {what}, loss scale adjust to {m.scale_after}")
        head = f"Epoch {m.epoch}/30, Step {m.epoch_step}/{setup.epoch_steps}"
        out.append(
            f"2024-03-05 09:33:51,054 [INFO] {head}, imgsize (640, 640), loss: {m.loss:.4f}, lbox: {m.loss * 0.3:.4f}, "
            f"lobj: {m.loss * 0.2:.4f}, lcls: {m.loss * 0.5:.4f}, cur_lr: {m.lr}"
        )
        out.append(f"2024-03-05 09:33:51,058 [INFO] {head}, step time: 626.57 ms")
    return out


def _mindocr(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        line
        for m in moments
        for line in [
            *_restart_line(m),
            *(
                [
                    f"[2024-03-02 11:02:58] mindocr.utils.callbacks INFO - epoch: [{m.epoch}/20] step: "
                    f"[{m.epoch_step}/{setup.epoch_steps}], loss: {m.loss:.6f}, lr: {m.lr:.6f}, per step time: 216.913 "
                    "ms, fps per card: 295.05 img/s"
                ]
                if m.step % interval == 0
                else []
            ),
        ]
    ]


def _mindone(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out: list[str] = []
    for m in moments:
        out += _restart_line(m)
        if m.overflow:
            out.append(f"[2024-05-10 08:00:23] WARNING: overflow detected in epoch {m.epoch} step {m.epoch_step}")
        if m.step % interval == 0:
            out.append(
                f"[2024-05-10 08:00:23] INFO: epoch {m.epoch}, step {m.epoch_step}, lr {m.lr:.7f}, loss {m.loss:.6f}, "
                f"loss scale {int(m.scale_after)}, global_step {m.updates}, step_time(ms) 817.8"
            )
    return out


def _mindcv(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval:
            continue
        if m.updates < 1:
            out.append(
                "[2023-06-02 10:30:00] mindcv.utils.callbacks WARNING - `global_step` of optimizer is less than 1. It "
                "seems to be a overflow at the first step. If you keep seeing this message, it means that the "
                "optimizer never actually called."
            )
        out.append(
            f"[2023-06-26 10:00:00] mindcv.utils.callbacks INFO - Epoch: [{m.epoch}/90], batch: "
            f"[{m.epoch_step}/{setup.epoch_steps}], loss: {m.loss:.6f}, lr: {m.lr:.6f}, time: 6.084443s"
        )
    return out


def _loss_monitor(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval == 0:
            out.append(f"epoch: {m.epoch} step: {m.epoch_step}, loss is {m.loss}")
    return out


def _bert(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval == 0:
            out.append(
                f"epoch: {m.epoch - 1}, current epoch percent: 0.003, step: {m.step}, outputs are (Tensor(shape=[], "
                f"dtype=Float32, value= {m.loss:.6g}), Tensor(shape=[], dtype=Bool, value= {m.overflow}), "
                f"Tensor(shape=[], dtype=Float32, value= {m.scale:.6g}))"
            )
    return out


def _bert_benchmark(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval == 0:
            out.append(
                f"time: 8123, epoch: {m.epoch}, step: {m.step}, loss: {m.loss:.5g}, overflow: {m.overflow}, "
                f"loss_scale: {m.scale}"
            )
    return out


def _pangu(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        out += _restart_line(m)
        if m.step % interval == 0:
            out.append(
                f"time: Thu Mar 02 20:18:00 2023 local_rank: 0, epoch: {m.epoch - 1}, step: {m.step}, loss is "
                f"{m.loss:.5g}, overflow is {m.overflow}, loss scale is {m.scale}"
            )
    return out


def _pangu_ranks(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    """Two ranks in one file, each with its own opinion of the scale when they are not synchronised."""
    rng = random.Random(setup.seed + 1)
    out = []
    other = Dynamic(moments[0].scale, 100) if "unsynchronised" in setup.__dict__.get("note", "") else None
    for m in moments:
        scale = m.scale
        overflow = m.overflow
        if other is not None:
            scale = other.scale
            overflow = rng.random() < 0.02
            other.update(overflow)
        if m.step % interval:
            continue
        for rank, (s, o) in enumerate(((m.scale, m.overflow), (scale, overflow))):
            out.append(
                f"time: Thu Mar 02 20:18:00 2023 local_rank: {rank}, epoch: {m.epoch - 1}, step: {m.step}, loss is "
                f"{m.loss:.5g}, overflow is {o}, loss scale is {s}"
            )
    return out


def _yolox(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        f"epoch: [{m.epoch}/285] step: [{m.epoch_step}/{setup.epoch_steps}], lr: {m.lr:.6f}, loss: {m.loss:.4f}, "
        f"overflow: {m.overflow}, scale: {int(m.scale)}, avg step time: 312.45ms"
        for m in _on(moments, interval)
    ]


def _apex(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    recent: list[float] = []
    for m in moments:
        if m.overflow:
            out.append(f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {m.scale_after}")
        recent = [*recent[-19:], m.loss]
        if m.step % interval == 0:
            values = sorted(recent, key=lambda v: (v != v, v))
            middle = values[len(values) // 2]
            out.append(
                f"2020-05-10 06:34:34,320 maskrcnn_benchmark INFO: eta: 1 day, 19:42:40  iter: {m.step}  loss: "
                f"{middle:.4f} ({sum(recent) / len(recent):.4f})  loss_classifier: {middle / 2:.4f} (1.3077)  time: "
                f"1.6072 (1.5858)  data: 0.0132 (0.0184)  lr: {m.lr:.6f}  max mem: 8743"
            )
    return out


def _deepspeed_message(m: Moment) -> str:
    head = "[2023-04-28 06:51:29,903] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 "
    head += "Skipping step. "
    if m.scale_after == m.scale and m.hysteresis > 1:
        return head + (
            f"Attempted loss scale: {int(m.scale)}, but hysteresis is {m.hysteresis}. Reducing hysteresis to "
            f"{m.hysteresis - 1}"
        )
    return head + f"Attempted loss scale: {int(m.scale)}, reducing to {int(m.scale_after)}"


def _deepspeed(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    skipped = 0
    for m in moments:
        if m.overflow:
            skipped += 1
            out.append(_deepspeed_message(m))
            if m.scale == m.scale_after == 1.0 and m.hysteresis == 1:
                out.append(
                    "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."
                )
                break
        if m.step % max(interval, 10) == 0:
            out.append(
                f"[2023-04-28 06:51:29,903] [INFO] [logging.py:96:log_dist] [Rank 0] step={m.step}, skipped={skipped}, "
                f"lr=[{m.lr}], mom=[(0.9, 0.95)]"
            )
    return out


def _bar_deepspeed(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        if m.overflow:
            out.append(_deepspeed_message(m))
        bar = (
            f"Steps:  25%|█████               | {m.step}/{setup.steps} [00:05<2:01:07,  5.02s/it, lr={m.lr:.3g}, "
            f"step_loss={m.loss:.4g}, td=0.05s]"
        )
        out.append("\r".join([bar] * 2))
    return out


def _megatron(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    skipped, nans, total, count = 0, 0, 0.0, 0
    for m in moments:
        if m.restart:
            out.append(f"  successfully loaded checkpoint from /ckpt/mp_rank_00 at iteration {m.step - 1}")
        if m.applied:
            total += m.loss
            count += 1
        else:
            skipped += 1
            nans += m.loss != m.loss and setup.detects
        if m.step % interval:
            continue
        mean = total / count if count else 0.0
        loss = f"lm loss: {mean:.6E} | " if mean > 0 else ""
        norm = "" if not m.applied else f"grad norm: {m.norm:.3f} | "
        out.append(
            f" [2025-01-02 03:04:05.678901] iteration {m.step:8d}/    8000 | consumed samples: {64 * m.step:12d} | "
            f"elapsed time per iteration (ms): 812.4 | learning rate: {m.lr:.6E} | global batch size:    64 | "
            f"{loss}loss scale: {m.scale_after:.1f} | {norm}number of skipped iterations: {skipped:3d} | number of nan "
            f"iterations: {nans:3d} |"
        )
        skipped, nans, total, count = 0, 0, 0.0, 0
    return out


def _hf(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    total, count = 0.0, 0
    for m in moments:
        total += m.loss if math.isfinite(m.loss) else 0.0
        count += 1
        if m.step % interval == 0:
            norm = "nan" if m.norm != m.norm else f"{m.norm:.6g}"
            norm_part = "" if setup.seed % 3 == 0 else f"'grad_norm': {norm}, "
            lr = m.lr if setup.zero_loss is None and (m.applied or not setup.guarded) else setup.base_lr
            out.append(
                f"{{'loss': {round(total / count, 4)}, {norm_part}'learning_rate': {lr:.6g}, 'epoch': "
                f"{m.step / setup.epoch_steps:.2f}}}"
            )
            total, count = 0.0, 0
    return out


def _fairseq(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        if m.restart:
            out.append(
                f"2021-10-03 15:00:00 | INFO | fairseq.trainer | Loaded checkpoint /ckpt/last.pt (epoch {m.epoch} @ "
                f"{m.updates} updates)"
            )
        if m.overflow:
            out.append(
                "2021-10-03 15:20:07 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, "
                f"setting loss scale to: {m.scale_after}"
            )
        if m.step % interval == 0:
            out.append(
                f"2021-10-03 15:20:08 | INFO | train_inner | epoch {m.epoch:03d}: {m.epoch_step:6d} / "
                f"{setup.epoch_steps} loss={m.loss:.3f}, nll_loss=4.719, ppl=26.34, wps=49827.0, ups=2.38, "
                f"wpb=20511.4, bsz=712.4, num_updates={m.updates}, lr={m.lr:.6g}, gnorm={m.norm:.3f}, "
                f"loss_scale={m.scale_after:g}, train_wall=8, gb_free=10.2, wall=1908"
            )
    return out


def _swin(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    means = [0.0, 0.0, 0.0]
    for count, m in enumerate(moments, 1):
        if m.restart:
            out.append(
                f"[2022-11-04 03:00:00 vit_small] (utils.py 30): INFO => loaded checkpoint 'ckpt.pth' (epoch {m.epoch})"
            )
            out.append("[2022-11-04 03:00:00 vit_small] (utils.py 31): INFO resuming training from epoch")
        values = (m.loss, m.norm, m.scale_after)
        means = [a + (b - a) / count for a, b in zip(means, values, strict=True)]
        if (m.step - 1) % interval == 0:
            out.append(
                "[2022-11-04 03:02:15 vit_small] (main.py 221): INFO Train: "
                f"[{m.epoch - 1}/100][{m.epoch_step - 1}/{setup.epoch_steps}]\teta 0:14:10 lr {m.lr:.6f}\t wd "
                f"0.0500\ttime 0.3468 (0.3500)\tloss {m.loss:.4f} ({means[0]:.4f})\tgrad_norm {m.norm:.4f} "
                f"({means[1]:.4f})\tloss_scale {m.scale_after:.4f} ({means[2]:.4f})\tmem 9134MB"
            )
    return out


def _nanogpt(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out = []
    for m in moments:
        if m.step % 250 == 1:
            out.append(f"step {m.step - 1}: train loss {m.loss:.4f}, val loss {m.loss + 0.05:.4f}")
        if (m.step - 1) % interval == 0:
            out.append(f"iter {m.step - 1}: loss {m.loss:.4f}, time 312.40ms, mfu 31.20%")
    return out


def _mmengine(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        f"02/20 14:43:11 - mmengine - INFO - Epoch(train)   [{m.epoch}][{m.epoch_step:4d}/{setup.epoch_steps}]  lr: "
        f"{m.lr:.4e}  eta: 6:12:01  time: 0.0149  data_time: 0.0003  memory: 214  grad_norm: {m.norm:.4f}  loss: "
        f"{m.loss:.4f}"
        for m in _on(moments, interval)
    ]


def _insightface(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        f"Training: 2023-03-14 09:08:43,293-Speed 2178.40 samples/sec   Loss {m.loss:.4f}   LearningRate {m.lr:.6f}   "
        f"Epoch: {m.epoch - 1}   Global Step: {m.step}   Fp16 Grad Scale: {m.scale_after:6.0f}   Required: 194 hours"
        for m in _on(moments, interval)
    ]


def _wenet(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    rng = random.Random(setup.seed)
    return [
        f"2025-02-20 00:46:13,777 DEBUG TRAIN Batch {m.epoch - 1}/{m.epoch_step} loss "
        f"{m.loss * (1 + 0.01 * rng.random()):.6f} lr {m.lr:.8f} grad_norm {m.norm:.6f} rank {rank}"
        for m in _on(moments, interval)
        for rank in rng.sample(range(4), 4)
    ]


def _lightning(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        "\r".join(
            f"Epoch {m.epoch - 1}:  45%|████▌     | {m.epoch_step}/{setup.epoch_steps} [00:10<00:12,  4.45it/s, "
            f"v_num=0, train_loss={m.loss:.3f}]"
            for m in moments
            if m.epoch == epoch
        )
        for epoch in sorted({m.epoch for m in moments})
    ]


def _generic(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        f"[train] step={m.step} loss={m.loss:.4f} lr={m.lr:.3g} grad_norm={m.norm:.4g} loss_scale={m.scale:g} "
        f"overflow={m.overflow}"
        for m in _on(moments, interval)
    ]


def _timm(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        f"Train: {m.epoch - 1} [{m.epoch_step - 1:4d}/{setup.epoch_steps} "
        f"({100 * m.epoch_step // setup.epoch_steps:3d}%)]  Loss: {m.loss:#.3g} ({m.loss:#.3g})  Time: 0.345s,  "
        f"741.12/s  (0.345s,  741.12/s)  LR: {m.lr:.3e}  Data: 0.010"
        for m in moments
        if (m.epoch_step - 1) % interval == 0
    ]


def _json_lines(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        json.dumps(
            {
                "train/global_step": m.step,
                "train/loss": m.loss,
                "train/loss_scale": m.scale,
                "train/grad_norm": m.norm,
                "train/overflow": m.overflow,
                "_runtime": 3.2 * m.step,
            }
        )
        for m in _on(moments, interval)
    ]


def _csv(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    rows = [f"{m.epoch - 1},{m.lr:.4g},{m.step},{m.loss:.6g},{m.scale:g},{m.norm:.5g}," for m in _on(moments, interval)]
    return ["epoch,lr-SGD,step,train_loss,loss_scale,grad_norm,val_loss", *rows]


def _icefall(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    return [
        f"2022-05-10 08:00:00,123 INFO [train.py:842] (0/8) Epoch {m.epoch}, batch {m.epoch_step - 1}, "
        f"loss[loss={m.loss:.4g}, simple_loss=1.0, over 4000.00 frames.], tot_loss[loss={m.loss:.4g}, over 40000.00 "
        f"frames.], batch size: 20, lr: {m.lr:.2e}, grad_scale: {m.scale_after}"
        for m in _on(moments, interval)
    ]


def _trainer_state(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    history = [
        {
            "epoch": m.step / setup.epoch_steps,
            "grad_norm": m.norm,
            "learning_rate": m.lr,
            "loss": m.loss,
            "step": m.step,
        }
        for m in _on(moments, interval)
    ]
    return json.dumps({"best_metric": None, "log_history": history, "max_steps": setup.steps}, indent=2).split("\n")


def _keras(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    out: list[str] = []
    mean = 0.0
    for m in moments:
        if m.epoch_step == 1:
            out.append(f"Epoch {m.epoch}/30")
            mean = 0.0
        mean += (m.loss - mean) / m.epoch_step
        if m.step % interval == 0:
            out.append(
                f"{m.epoch_step:5d}/{setup.epoch_steps} [=====>........................] - ETA: 10s - loss: {mean:.4f} "
                "- accuracy: 0.1123"
            )
    return out


def _hand_written(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    """The step begins anew in each epoch, and the values come in an order of their own."""
    return [
        f"Epoch {m.epoch} | Loss {m.loss:.4f} | Step {m.epoch_step} | found_inf={float(m.overflow)} | Scale {m.scale} "
        f"| Grad Norm: {m.norm:.4f}"
        for m in _on(moments, interval)
    ]


def _ranked(moments: list[Moment], interval: int, setup: Setup) -> list[str]:
    """torchrun's prefixes, every rank with its own line."""
    rng = random.Random(setup.seed)
    return [
        f"[rank{rank}]:2024-10-09 12:00:00,123 - root - INFO - step: {m.step}  loss: {m.loss:8.4f}  grad_norm: "
        f"{m.norm:7.4f}  loss_scale: {m.scale:g}  memory: 40.20GiB(42.30%)  tps: 3,456  mfu: 38.90%"
        for m in _on(moments, interval)
        for rank in rng.sample(range(4), 4)
    ]


_L, _O, _S, _N = "loss", "overflow", "scale", "norm"
STYLES: dict[str, Style] = {
    style.name: style
    for style in (
        Style("mindformers", frozenset({_L, _O, _S, _N}), _mindformers, (1, 5, 10)),
        Style("mindformers-mean", frozenset({_L, _O, _S, _N}), _mindformers_mean, (1, 5, 10)),
        Style("mindyolo", frozenset({_L, _O, _S}), _mindyolo, (1, 10)),
        Style("mindocr", frozenset({_L}), _mindocr),
        Style("mindone", frozenset({_L, _O, _S}), _mindone, (1,)),
        Style("mindcv", frozenset({_L}), _mindcv),
        Style("loss-monitor", frozenset({_L}), _loss_monitor, (1, 5)),
        Style("bert", frozenset({_L, _O, _S}), _bert, (1,)),
        Style("bert-benchmark", frozenset({_L, _O, _S}), _bert_benchmark, (1, 10)),
        Style("pangu", frozenset({_L, _O, _S}), _pangu, (1, 10)),
        Style("pangu-ranks", frozenset({_L, _O, _S}), _pangu_ranks, (1,)),
        Style("yolox", frozenset({_L, _O, _S}), _yolox, (1, 10)),
        Style("apex", frozenset({_L, _O, _S, "between"}), _apex, (20,)),
        Style("deepspeed", frozenset({_O, _S, "between"}), _deepspeed, (10,)),
        Style("bar-deepspeed", frozenset({_L, _O, _S, "between"}), _bar_deepspeed, (1,)),
        Style("megatron", frozenset({_L, _O, _S, _N}), _megatron, (1, 10)),
        Style("hf", frozenset({_L, _N, "filtered"}), _hf, (1, 10)),
        Style("fairseq", frozenset({_L, _O, _S, _N, "between"}), _fairseq, (20,)),
        Style("swin", frozenset({_L, _S, _N}), _swin, (1, 10)),
        Style("nanogpt", frozenset({_L}), _nanogpt, (1, 10)),
        Style("mmengine", frozenset({_L, _N}), _mmengine, (10, 50)),
        Style("insightface", frozenset({_L, _S}), _insightface, (10, 20)),
        Style("wenet", frozenset({_L, _N}), _wenet, (1, 10)),
        Style("lightning", frozenset({_L}), _lightning, (1,)),
        Style("generic", frozenset({_L, _O, _S, _N}), _generic, (1, 10)),
        Style("timm", frozenset({_L}), _timm, (1, 10)),
        Style("json-lines", frozenset({_L, _O, _S, _N}), _json_lines, (1, 10)),
        Style("csv", frozenset({_L, _S, _N}), _csv, (1, 10)),
        Style("icefall", frozenset({_L, _S}), _icefall, (1, 10)),
        Style("trainer-state", frozenset({_L, _N}), _trainer_state, (1, 10)),
        Style("keras", frozenset({_L}), _keras, (1, 10)),
        Style("hand-written", frozenset({_L, _O, _S, _N}), _hand_written, (1, 10)),
        Style("ranked", frozenset({_L, _S, _N}), _ranked, (1, 10)),
    )
}


# --- runs --------------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """A generated log.

    Attributes:
        text: The log.
        style: Format.
        fault: "" for a healthy run.
        expected: Slugs any of which is right as the first finding.
        interval: Logging interval.
    """

    text: bytes
    style: str
    fault: str
    expected: frozenset[str]
    interval: int
    seed: int
    setup: Setup = field(repr=False, default_factory=lambda: Setup(0))


def _noise_lines(rng: random.Random, lines: list[str]) -> list[str]:
    """Lines of other origin between: warnings, settings, validation."""
    others = (
        "UserWarning: The given NumPy array is not writable, and PyTorch does not support non-writable tensors.",
        "load_checkpoint: None",
        "resume_training: False",
        "[INFO] dataset size 12345, batch size 8",
        "Validation Top_1_Accuracy: 71.2000%, Top_5_Accuracy: 90.5000%, time: 21.477769s",
        "Saving model to ./runs/exp/weights/model-1_1600.ckpt",
        "[WARNING] ME(1234:5678,MainProcess):2024-03-05 the parameter gradient of the layer is None",
        "",
    )
    result: list[str] = [others[rng.randrange(5)] for _ in range(3)]
    for line in lines:
        if rng.random() < 0.02:
            result.append(rng.choice(others))
        result.append(line)
    return result


def _render(setup: Setup, style: Style, interval: int, rng: random.Random) -> bytes:
    moments = list(train(setup))
    lines = style.write(moments, interval, setup)
    if style.name not in ("lightning", "trainer-state"):
        lines = _noise_lines(rng, lines)
    newline = "\r\n" if rng.random() < 0.1 and "\r" not in "".join(lines[:20]) else "\n"
    return (newline.join(lines) + newline).encode()


def _any_scaler(rng: random.Random, style: Style) -> Callable[[], Scaler]:
    if style.name in ("deepspeed", "bar-deepspeed"):
        power, hysteresis, window = rng.choice((16, 20, 32)), rng.choice((1, 2)), rng.choice((500, 1000))
        return lambda: DeepSpeed(power, window, hysteresis)
    if style.name in ("apex", "swin", "insightface", "fairseq"):
        start, window = rng.choice((2.0**16, 2.0**17, 2.0**24)), rng.choice((500, 1000, 2000))
        return lambda: Torch(start, window)
    kind = rng.choice(("static", "dynamic", "dynamic", "torch"))
    if kind == "static":
        scale = 2.0 ** rng.choice((0, 7, 10, 12))
        return lambda: Static(scale)
    start, window = 2.0 ** rng.choice((12, 15, 16, 24, 26)), rng.choice((200, 500, 1000, 2000))
    return lambda: Dynamic(start, window)


def healthy(seed: int) -> Run:
    """A training with nothing wrong: scale searches, rare overflows, spikes that heal, restarts that restore."""
    rng = random.Random(seed * 7919 + 1)
    style = list(STYLES.values())[seed % len(STYLES)]
    interval = rng.choice(style.intervals)
    steps = max(rng.choice((300, 600, 1500, 3000)), 40 * interval)
    setup = Setup(
        seed,
        steps=steps,
        epoch_steps=rng.choice((50, 200, 1000)),
        scaler=_any_scaler(rng, style),
        grad_log2=rng.uniform(-7, -1),
        noise=rng.uniform(0.1, 0.6),
        drift=rng.uniform(-2, 0.5),
        first_loss=rng.choice((0.9, 2.3, 7.0, 11.0, 40.0)),
        loss_noise=rng.choice((0.01, 0.05, 0.15)),
        spikes=rng.choice((0, 0, 1, 3)),
    )
    setup.last_loss = setup.first_loss * rng.uniform(0.1, 0.7)
    if rng.random() < 0.3 and style.name not in ("deepspeed", "lightning", "bar-deepspeed"):
        setup.restart_at = rng.randrange(steps // 3, steps - 20)
    scaler = setup.scaler()
    if isinstance(scaler, Static):
        # A fixed scale is only a healthy choice where it leaves room.
        setup.grad_log2 = min(setup.grad_log2, 15 - math.log2(scaler.scale) - 6)
        setup.noise = min(setup.noise, 0.4)
        setup.spikes = 0
    return Run(_render(setup, style, interval, rng), style.name, "", frozenset(), interval, seed, setup)


def _pick(rng: random.Random, names: tuple[str, ...]) -> Style:
    return STYLES[rng.choice(names)]


_SCALED_STEPWISE = (
    *("mindformers", "mindformers-mean", "bert", "bert-benchmark", "pangu", "generic", "json-lines", "hand-written"),
    "ranked",
)
_LOSS_ONLY = (
    *("mindocr", "mindcv", "loss-monitor", "nanogpt", "lightning", "mmengine", "wenet", "timm", "trainer-state"),
    "keras",
)


def _fault(name: str, rng: random.Random, seed: int) -> tuple[Setup, Style, int, frozenset[str]]:
    steps = rng.choice((400, 600, 1200))
    start = rng.randrange(steps // 3, steps // 2)
    setup = Setup(
        seed,
        steps=steps,
        epoch_steps=rng.choice((50, 200, 1000)),
        grad_log2=rng.uniform(-6, -2),
        noise=rng.uniform(0.1, 0.5),
        first_loss=rng.choice((2.3, 7.0, 11.0)),
        loss_noise=rng.choice((0.02, 0.05, 0.1)),
    )
    setup.last_loss = setup.first_loss * rng.uniform(0.2, 0.6)
    expected: set[str]
    if name == "static-applied":
        style = _pick(rng, ("mindyolo", "bert", "pangu", "mindformers", "yolox", "bert-benchmark"))
        setup.guarded, setup.gradient_burst = False, start
        scale = 2.0 ** rng.choice((10, 12, 16))
        setup.scaler = lambda: Static(scale)
        interval = 1
        setup.grad_log2 = min(setup.grad_log2, 15 - math.log2(scale) - 5)
        expected = {"update-applied-on-overflow-static-scale"}
    elif name == "forward-nan":
        style = _pick(rng, (*_SCALED_STEPWISE, "mindone", "mindyolo", "bar-deepspeed", "yolox", "swin"))
        setup.forward_breaks = start
        scale = 2.0 ** rng.choice((14, 15, 16))
        setup.scaler = lambda: Dynamic(scale, 1000)
        if style.name == "bar-deepspeed":
            setup.scaler = lambda: DeepSpeed(16, 1000, 1)
        interval = 1
        expected = {"loss-nan-before-scale-moved"}
    elif name == "forward-nan-coarse":
        style = _pick(rng, ("apex", "insightface"))
        setup.forward_breaks = start
        setup.steps = max(steps, start + 300)
        setup.scaler = lambda: Torch(65536.0, 2000)
        interval = rng.choice(style.intervals)
        expected = {"scale-collapse-loss-already-nan", "loss-nan-before-scale-moved"}
    elif name == "overflow-any-scale":
        style = _pick(
            rng, ("deepspeed", "mindformers", "bert", "pangu", "mindone", "bar-deepspeed", "fairseq", "apex", "generic")
        )
        setup.backward_breaks = start
        setup.scaler = lambda: Dynamic(2.0**15, 1000)
        if "deepspeed" in style.name:
            setup.scaler = lambda: DeepSpeed(16, 1000, rng_choice)
            rng_choice = rng.choice((1, 2))
        interval = rng.choice(style.intervals)
        expected = {"forward-overflow-scale-independent"}
    elif name == "overflow-from-start":
        style = _pick(
            rng, ("deepspeed", "mindformers", "bert", "pangu", "mindone", "bar-deepspeed", "bert-benchmark", "generic")
        )
        if rng.random() < 0.5 and style.name != "deepspeed":
            setup.forward_breaks = 1
        else:
            setup.backward_breaks = 1
        power = rng.choice((16, 24, 32))
        setup.scaler = (
            (lambda: DeepSpeed(power, 1000, 2)) if "deepspeed" in style.name else (lambda: Dynamic(2.0**power, 1000))
        )
        interval = 10 if style.name == "deepspeed" else 1
        expected = {"overflow-at-every-scale-from-step-1"}
    elif name == "bad-batch":
        style = _pick(
            rng,
            (
                "mindformers",
                "mindone",
                "pangu",
                "bert",
                "mindcv",
                "mindocr",
                "yolox",
                "loss-monitor",
                "swin",
                "generic",
            ),
        )
        setup.epoch_steps = rng.choice((37, 60, 80))
        setup.bad_batch = rng.randrange(3, setup.epoch_steps)
        setup.steps = setup.epoch_steps * 7
        setup.scaler = lambda: Static(4096.0)
        setup.grad_log2 = min(setup.grad_log2, -3)
        interval = 1
        expected = {"periodic-nan-same-batch"}
    elif name == "never-updated":
        style = _pick(rng, ("mindcv", "bert", "pangu", "mindformers", "yolox", "mindone"))
        setup.scaler = lambda: Static(2.0**16)
        setup.grad_log2 = 6.0
        setup.noise = 0.2
        setup.last_loss = setup.first_loss  # nothing is learnt
        interval = 1 if style.name != "mindcv" else 10
        expected = {"every-update-dropped"}
    elif name == "no-guard":
        style = _pick(rng, ("megatron", "mindformers", "pangu", "bert", "generic"))
        setup.forward_breaks, setup.guarded, setup.detects = start, False, False
        setup.scaler = lambda: Static(1.0)
        interval = rng.choice(style.intervals)
        expected = {"nan-updates-not-skipped"}
    elif name == "permanent":
        style = _pick(rng, _LOSS_ONLY)
        setup.forward_breaks, setup.guarded = start, False
        interval = rng.choice(style.intervals)
        setup.steps = max(steps, start + 12 * interval, 40 * interval)
        setup.forward_breaks = max(start, 20 * interval)
        setup.steps = max(setup.steps, setup.forward_breaks + 12 * interval)
        expected = {"nan-permanent-params-corrupted"}
    elif name == "window-too-short":
        style = _pick(
            rng, ("fairseq", "mindformers", "bert", "pangu", "mindone", "deepspeed", "apex", "generic", "hand-written")
        )
        window = rng.choice((8, 12, 16, 24))
        start_scale = 2.0 ** math.floor(15.9 - setup.grad_log2 - 1)
        setup.scaler = lambda: (
            DeepSpeed(int(math.log2(start_scale)), window, 1)
            if style.name == "deepspeed"
            else Dynamic(start_scale, window)
        )
        setup.noise = 0.2
        setup.drift = rng.uniform(-0.5, 0.5)
        setup.steps = 1200
        interval = rng.choice(style.intervals)
        expected = {"scale-oscillates-window-too-short"}
    elif name == "norm-scaled":
        style = _pick(rng, ("swin", "mindformers", "megatron", "generic", "fairseq", "csv", "json-lines"))
        setup.norm_is_scaled = True
        setup.noise = 0.25
        window = rng.choice((150, 200))
        setup.scaler = lambda: Dynamic(2.0**10, window)
        setup.grad_log2 = rng.uniform(-7, -4)
        setup.drift = rng.uniform(-0.4, 0.4)
        setup.steps = 900
        interval = rng.choice([i for i in style.intervals if i <= 20])
        expected = {"grad-norm-proportional-to-loss-scale"}
    elif name == "divergence":
        style = _pick(
            rng,
            ("mindcv", "mindocr", "nanogpt", "mindformers", "bert", "swin", "megatron", "timm", "json-lines", "csv"),
        )
        interval = rng.choice([i for i in style.intervals if i <= 10])
        setup.diverge = start
        setup.steps = start + 260 + 12 * interval
        setup.loss_noise = 0.03
        setup.scaler = lambda: Dynamic(2.0**12, 2000)
        expected = {"divergence-learning-rate"}
    elif name == "resume-nan":
        style = _pick(rng, ("mindformers", "mindyolo", "mindocr", "mindcv", "megatron", "bert", "fairseq"))
        interval = rng.choice([i for i in style.intervals if i <= 10] or [20])
        setup.restart_at, setup.restart_nan = start, True
        setup.scaler = lambda: Dynamic(2.0**14, 1000)
        expected = {"nan-from-first-step-after-resume"}
    elif name == "resume-forgets":
        style = _pick(rng, ("mindformers", "bert", "pangu", "mindone", "megatron", "swin", "bert-benchmark"))
        interval = rng.choice([i for i in style.intervals if i <= 5] or [1])
        setup.restart_at, setup.restart_forgets = start, True
        setup.grad_log2 = rng.uniform(0, 2)
        setup.scaler = lambda: Dynamic(2.0**24, 2000)
        expected = {"scaler-state-not-restored"}
    elif name == "ranks":
        style = STYLES["pangu-ranks"]
        setup.__dict__["note"] = "unsynchronised"
        setup.scaler = lambda: Dynamic(2.0**12, 100)
        setup.grad_log2 = -3
        interval = 1
        expected = {"loss-scale-not-synchronised"}
    elif name == "filtered":
        style = STYLES["hf"]
        setup.forward_breaks = start
        setup.scaler = lambda: Torch()
        interval = rng.choice((1, 10))
        setup.steps = start + 20 * interval
        expected = {"loss-0-means-nan-filtered"}
    elif name == "zero":
        style = _pick(rng, ("mindformers", "mmengine", "bert", "swin", "pangu", "mindocr", "generic"))
        setup.zero_loss = start
        setup.scaler = lambda: Dynamic(2.0**12, 2000)
        interval = min(style.intervals)
        setup.steps = start + 12 * interval + 50
        expected = {"loss-denominator-overflow-loss-zero"}
    elif name == "stuck":
        style = _pick(rng, ("mindformers", "bert", "pangu", "bert-benchmark", "generic", "csv", "json-lines"))
        window = rng.choice((100, 200))
        setup.scaler = lambda: Dynamic(2.0**12, window)
        setup.grad_log2 = -6
        setup.steps = 3000
        setup.backward_breaks = None
        setup.stuck_scaler = 700
        setup.gradient_burst = 690
        interval = min(style.intervals)
        expected = {"scale-never-grows"}
    else:
        raise ValueError(name)
    return setup, style, interval, frozenset(expected)


FAULTS = (
    "static-applied",
    "forward-nan",
    "forward-nan-coarse",
    "overflow-any-scale",
    "overflow-from-start",
    "bad-batch",
    "never-updated",
    "no-guard",
    "permanent",
    "window-too-short",
    "norm-scaled",
    "divergence",
    "resume-nan",
    "resume-forgets",
    "ranks",
    "filtered",
    "zero",
    "stuck",
)


def faulty(seed: int) -> Run:
    """A training in which one thing goes wrong."""
    rng = random.Random(seed * 104729 + 3)
    name = FAULTS[seed % len(FAULTS)]
    setup, style, interval, expected = _fault(name, rng, seed)
    return Run(_render(setup, style, interval, rng), style.name, name, expected, interval, seed, setup)
