"""Logs written by hand after what tools print, one fault each, and healthy ones that look like it.

They share no code with ``simulate.py``: short, pasted-looking logs with the headers, cuts and last words of real ones.
"""

from __future__ import annotations

import io
import json
import math
import random
from collections.abc import Callable, Iterator

import pytest

from ampdebug._diagnose import diagnose

Lines = Iterator[str]
CASES: dict[str, tuple[str, Callable[[random.Random], Lines]]] = {}


def case(slug: str) -> Callable[[Callable[[random.Random], Lines]], Callable[[random.Random], Lines]]:
    def keep(function: Callable[[random.Random], Lines]) -> Callable[[random.Random], Lines]:
        CASES[function.__name__] = (slug, function)
        return function

    return keep


def mindformers(step: int, loss: float, scale: float, overflow: bool, norm: str, steps: int = 9000) -> str:
    return (
        "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO - { Epoch:[  1/  2], "
        f"step:[{step:5d}/{steps:5d}], loss: {loss:.3f}, per_step_time: 2510ms, lr: 1e-05, overflow cond: {overflow}, "
        f"loss_scale: {scale}, global_norm: [{norm}]"
    )


def deepspeed(scale: float, rank: int = 0, divisor: int = 2) -> str:
    return (
        f"[2023-04-28 06:51:29,903] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank {rank} "
        f"Skipping step. Attempted loss scale: {int(scale)}, reducing to {int(scale // divisor)}"
    )


def swin(epoch: int, step: int, loss: float, scale: float) -> str:
    return (
        f"[2022-11-04 03:02:15 vit_small] (main.py 221): INFO Train: [{epoch}/100][{step}/200]\teta 0:14:10 lr 0.001000"
        f"\t wd 0.0500\ttime 0.3468 (0.3500)\tloss {loss:.4f} ({loss:.4f})\tgrad_norm 1.1000 (1.0)\tloss_scale "
        f"{scale:.4f} (67134.4390)\tmem 9134MB"
    )


@case("overflow-at-every-scale-from-step-1")
def deepspeed_to_the_floor(rng: random.Random) -> Lines:
    yield "[2023-04-28 06:51:00,000] [INFO] [config.py:965:print]   initial_dynamic_scale ........ 65536"
    for power in range(16, 0, -1):
        yield deepspeed(2.0**power)
    yield "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run."


@case("loss-scale-not-synchronised")
def deepspeed_ranks_go_apart(rng: random.Random) -> Lines:
    for place in range(6):
        yield deepspeed(2.0 ** (16 - place), 0, 2)
        yield deepspeed(2.0 ** (16 - 2 * place), 1, 4)
        yield f"[2023-04-28 06:51:29,903] [INFO] [logging.py:96] [Rank 0] step={10 * place + 10}, skipped=1, lr=[1e-05]"


@case("loss-0-means-nan-filtered")
def trainer_without_a_norm(rng: random.Random) -> Lines:
    for place, loss in enumerate((1.9007, 1.7, 1.6, 1.5, *[0.0] * 8)):
        yield f"{{'loss': {loss}, 'learning_rate': {min(place, 3) * 2e-6 + 2e-6}, 'epoch': {0.01 * place:.2f}}}"
    yield "{'eval_loss': nan, 'eval_runtime': 3.1, 'epoch': 0.06}"
    yield "{'train_runtime': 12.3, 'train_loss': 0.5, 'epoch': 0.06}"


@case("loss-0-means-nan-filtered")
def trainer_state_file(rng: random.Random) -> Lines:
    history = [
        {
            "grad_norm": math.nan if s > 40 else 1.2,
            "learning_rate": 1e-5,
            "loss": 0.0 if s > 40 else 3 - s * 0.03,
            "step": s,
        }
        for s in range(1, 70)
    ]
    yield from json.dumps({"best_metric": None, "log_history": history}, indent=2).split("\n")


@case("scale-collapse-loss-already-nan")
def insightface_shows_a_scale_of_zero(rng: random.Random) -> Lines:
    for place in range(1, 40):
        loss, scale = (21 - 0.2 * place, 65536.0) if place < 20 else (math.nan, 65536 * 2.0 ** (-20 * (place - 19)))
        yield (
            f"Training: 2023-03-14 09:08:43,293-Speed 2178.40 samples/sec   Loss {loss:.4f}   LearningRate 0.001000   "
            f"Epoch: 0   Global Step: {20 * place}   Fp16 Grad Scale: {scale:6.0f}   Required: 194 hours"
        )


@case("scale-collapse-loss-already-nan")
def paddle_halves_in_vain(rng: random.Random) -> Lines:
    scale = 32768.0
    for step in range(10, 600, 10):
        loss = math.nan if step > 300 else 5 - step * 0.01
        yield (
            f"[2023-06-01 10:00:00,123] [    INFO] - loss: {loss:.5f}, learning_rate: 1e-05, global_step: {step}, "
            f"interval_runtime: 3.2, interval_samples_per_second: 5.1, loss_scale: {scale}"
        )
        for _ in range(10 if step >= 300 else 0):
            yield f"Found inf or nan, current scale is: {scale}, decrease to: {scale}*0.5"
            scale /= 2


@case("nan-from-first-step-after-resume")
def mindformers_resumes_into_nan(rng: random.Random) -> Lines:
    yield "2024-08-19 14:00:00,000 - mindformers - INFO - .............Start load checkpoint from checkpoint..........."
    yield "2024-08-19 14:00:00,100 - mindformers - INFO - initial epoch: 1, initial step: 300"
    for step in range(301, 330):
        yield mindformers(step, math.nan, 65536.0 / 2 ** min(step - 301, 16), overflow=True, norm="nan", steps=500)


@case("scaler-state-not-restored")
def swin_resumes_with_a_new_scale(rng: random.Random) -> Lines:
    for epoch in range(3):
        yield from (swin(epoch, step, 6 - epoch / 2, 1024.0) for step in range(0, 200, 10))
    yield "[2022-11-04 04:00:00 vit_small] (utils.py 20): INFO ==============> Resuming form ckpt_epoch_2.pth......"
    yield from (swin(3, step, 4.4, 65536.0 / 2 ** min(6, step // 10)) for step in range(0, 200, 10))


@case("")
def swin_resumes_as_it_was(rng: random.Random) -> Lines:
    for epoch in range(4):
        if epoch == 3:
            yield "[2022-11-04 04:00:00 vit_small] (utils.py 20): INFO ==========> Resuming form ckpt_epoch_2.pth...."
        yield from (swin(epoch, step, 6 - epoch / 2, 1024.0) for step in range(0, 200, 10))


@case("scale-never-grows")
def twelve_overflows_and_never_again(rng: random.Random) -> Lines:
    scale = 65536.0
    for step in range(1, 5000, 5):
        overflow = 101 <= step <= 156
        yield mindformers(step, 5 - step * 0.0005, scale, overflow, "inf" if overflow else "0.41")
        scale = scale / 2 if overflow else scale


@case("scale-too-low-headroom")
def static_scale_of_one(rng: random.Random) -> Lines:
    yield "amp_level: O2"
    for step in range(1, 300):
        yield mindformers(step, 5 - step * 0.001, 1.0, overflow=False, norm=f"{0.0008 + rng.random() * 1e-4:.5f}")


@case("")
def static_scale_that_fits(rng: random.Random) -> Lines:
    for step in range(1, 200):
        loss = 10 - 0.01 * step
        yield f"epoch: 0, current epoch percent: 0.003, step: {step}, loss: {loss}, overflow: False, loss scale: 128"


@case("divergence-learning-rate")
def nanogpt_climbs(rng: random.Random) -> Lines:
    for step in range(0, 1100, 10):
        loss = 3 - 0.002 * step if step < 500 else 2 + (step - 500) * 0.02 if step < 1000 else math.nan
        yield f"iter {step}: loss {loss:.4f}, time 312.40ms, mfu 31.20%"


@case("nan-permanent-params-corrupted")
def loss_monitor_stops(rng: random.Random) -> Lines:
    for step in range(1, 31):
        yield f"epoch: 1 step: {step}, loss is {'nan' if step == 30 else 2 - step * 0.01 + rng.gauss(0, 0.02)}"
    yield "Traceback (most recent call last):"
    yield "ValueError: In epoch: 1 step: 30, loss is NAN or INF, training process cannot continue, terminating."


@case("nan-permanent-params-corrupted")
def torchrun_prefixes(rng: random.Random) -> Lines:
    for step in range(1, 80):
        loss, norm = (math.nan, math.nan) if step > 50 else (8 - step * 0.05, 1.2345)
        for rank in range(4):
            yield (
                f"[rank{rank}]:2024-10-09 12:00:00,123 - root - INFO - step: {step}  loss: {loss:8.4f}  grad_norm: "
                f"{norm:7.4f}  memory: 40.20GiB(42.30%)  tps: 3,456  mfu: 38.90%"
            )


@case("nan-permanent-params-corrupted")
def yolo_parts(rng: random.Random) -> Lines:
    for epoch in range(1, 31):
        box, cls = (math.nan, math.nan) if epoch > 12 else (1.5 - epoch * 0.03, 2.5 - epoch * 0.05)
        yield "\r".join(
            f"      {epoch}/100      2.31G      {box:.3f}      {cls:.3f}      1.123         45        640: "
            f"{batch * 100 // 8}%|██████████| {batch}/8 [00:03<00:00,  2.10it/s]"
            for batch in (1, 4, 8)
        )


@case("loss-nan-before-scale-moved")
def json_lines_collapse(rng: random.Random) -> Lines:
    scale = 65536.0
    for step in range(1, 120):
        bad = step > 70
        loss, norm = (math.nan, math.nan) if bad else (5 - step * 0.02, 1.1)
        yield json.dumps({"step": step, "loss": loss, "loss_scale": scale, "grad_norm": norm, "overflow": bad})
        scale = max(scale / 2, 1.0) if bad else scale


@case("grad-norm-proportional-to-loss-scale")
def csv_norm_follows_the_scale(rng: random.Random) -> Lines:
    yield "step,loss,loss_scale,grad_norm"
    scale = 2.0**10
    for step in range(1, 1500):
        scale = scale * 2 if step % 250 == 0 else scale
        yield f"{step},{5 - step * 0.002:.4f},{scale},{scale * 0.001 * (1 + rng.gauss(0, 0.1)):.5f}"


@case("label-ge-num-classes")
def an_assertion_of_the_loss(rng: random.Random) -> Lines:
    yield from (f"step {step} loss {2 - step * 0.01}" for step in range(1, 30))
    yield (
        "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: "
        "[3,0,0] Assertion `t >= 0 && t < n_classes` failed."
    )


@case("label-ge-num-classes")
def an_index_of_gather(rng: random.Random) -> Lines:
    yield from (f"epoch: 1 step: {step}, loss is {2 - step * 0.01}" for step in range(1, 30))
    yield "RuntimeError: For 'GatherD', the value of 'index' must be in [-80, 80), but got: 80"


@case("")
def an_index_error_of_other_origin(rng: random.Random) -> Lines:
    yield from (f"epoch: 1 step: {step}, loss is {2 - step * 0.01}" for step in range(1, 30))
    yield "IndexError: list index out of range"


@case("")
def growth_and_a_skip_each_time(rng: random.Random) -> Lines:
    scale = 65536.0
    for step in range(1, 3000):
        overflow = scale > 65536 * 2.5
        yield f"Epoch 1 | Step {step}/3000 | Loss {4 - step * 0.001:.4f} | Scale {scale} | found_inf {float(overflow)}"
        scale = scale / 2 if overflow else scale * 2 if step % 1000 == 0 else scale


@case("")
def a_norm_that_is_nan_now_and_then(rng: random.Random) -> Lines:
    for step in range(100, 2001, 100):
        yield (
            f"[host] 2021-01-01 00:00:00,000 (trainer:732) INFO: 1epoch:train:{step - 99}-{step}batch: iter_time=0.1, "
            f"loss_ctc=120.1, loss={120 - step * 0.01:.3f}, grad_norm=12.3, loss_scale=6.5536e+04, optim0_lr0=1.000e-05"
        )
        if step in (300, 1400):
            yield "[host] 2021-01-01 (trainer:663) WARNING: The grad norm is nan. Skipping updating the model."


@case("")
def warm_up_from_a_large_loss(rng: random.Random) -> Lines:
    for step in range(1, 400):
        loss = 100 * math.exp(-step / 20) + 2 + rng.gauss(0, 0.05)
        yield f"step {step} loss {loss:.4f} lr {min(1, step / 100) * 1e-3}"


@case("")
def warm_restarts_of_the_learning_rate(rng: random.Random) -> Lines:
    for step in range(1, 1000):
        loss = 2 + math.exp(-(step % 200) / 40) + rng.gauss(0, 0.03)
        yield f"step {step} loss {loss:.4f} lr {1 - (step % 200) / 200}"


@case("")
def losses_below_zero(rng: random.Random) -> Lines:
    for step in range(500):
        yield f"iter {step}: loss {-0.5 + rng.gauss(0, 0.3):.4f}, time 312.40ms, mfu 31.20%"


def falling_loss(step: int, start: float, end: float, steps: float, rng: random.Random, noise: float = 0.05) -> float:
    return end + (start - end) * math.exp(-step / steps) + rng.gauss(0, noise)


def megatron(step: int, loss: float | None, scale: float, norm: float | None, skipped: int = 0, nans: int = 0) -> str:
    text = "" if loss is None else f" lm loss: {loss:.6E} |"
    return (
        f" [2025-01-02 03:04:05.678901] iteration {step:8d}/   20000 | consumed samples: {step * 64:12d} | elapsed "
        f"time per iteration (ms): 812.4 | learning rate: 6.000000E-06 | global batch size:    64 |{text} "
        f"loss scale: {scale} |{'' if norm is None else f' grad norm: {norm:.3f} |'} number of skipped "
        f"iterations: {skipped:3d} | number of nan iterations: {nans:3d} |"
    )


def fairseq(step: int, loss: float, scale: float, norm: float, updates: int) -> str:
    return (
        f"2021-10-03 15:20:08 | INFO | train_inner | epoch 001:  {step:5d} / 100000 loss={loss:.3f}, "
        f"nll_loss={loss:.3f}, ppl=26.34, wps=49827.0, ups=2.38, num_updates={updates}, "
        f"lr=0.00041, gnorm={norm:.3f}, loss_scale={scale:g}, train_wall=8, gb_free=10.2, wall=1908"
    )


def fairseq_overflow(scale: float) -> str:
    return (
        "2021-10-03 15:20:07 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, setting "
        f"loss scale to: {scale}"
    )


def mmengine(epoch: int, step: int, loss: float, norm: float) -> str:
    return (
        f"2023/02/20 14:43:11 - mmengine - INFO - Epoch(train)   [{epoch}][{step:4d}/500]  lr: 1.0000e-02  eta: "
        f"6:12:01  time: 0.0149  data_time: 0.0003  memory: 214  grad_norm: {norm:.4f}  loss: {loss:.4f}"
    )


def maskrcnn(step: int, loss: float) -> str:
    return (
        f"2020-05-10 06:34:34,320 maskrcnn_benchmark.trainer INFO: eta: 1 day, 19:42:40  iter: {step}  loss: "
        f"{loss:.4f} ({loss:.4f})  loss_classifier: {loss / 2:.4f} ({loss / 2:.4f})  time: 1.6072  data: 0.0132  "
        "lr: 0.020000  max mem: 8743"
    )


FLOOR = "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding. Try lowering the lr."


@case("scale-collapse-loss-already-nan")
def fairseq_to_its_floor(rng: random.Random) -> Lines:
    """97 of the last 100 updates were made, those before the NaN: that says nothing of the NaN ones."""
    yield from (fairseq(s, falling_loss(s, 12, 7, 600, rng), 128, 1.3, s) for s in range(100, 2000, 100))
    for power in range(6, -13, -1):
        yield fairseq_overflow(2.0**power)
        if power == 4:
            yield fairseq(2000, math.nan, 16, math.nan, 1997)
    yield FLOOR


@case("nan-from-first-step-after-resume")
def fairseq_resumes_and_only_overflows(rng: random.Random) -> Lines:
    yield "2021-10-03 15:00:05 | INFO | fairseq.trainer | Loaded checkpoint checkpoint_last.pt (epoch 3 @ 7300 updates)"
    yield "2021-10-03 15:00:05 | INFO | fairseq.trainer | begin training epoch 3"
    yield from (fairseq_overflow(2.0**power) for power in range(6, -13, -1))
    yield FLOOR


@case("nan-from-first-step-after-resume")
def lightning_restores_nan(rng: random.Random) -> Lines:
    yield "Restoring states from the checkpoint path at lightning_logs/version_3/checkpoints/epoch=11-step=1200.ckpt"
    for epoch in (12, 13):
        for step in range(1, 101, 3):
            yield f"Epoch {epoch}:  {step}%|████▌     | {step}/100 [00:10<00:12,  4.45it/s, v_num=4, train_loss=nan]\r"


@case("every-update-dropped")
def deepspeed_with_a_static_scale(rng: random.Random) -> Lines:
    for step in range(10, 500, 10):
        yield from (deepspeed(65536.0, divisor=1) for _ in range(10))
        yield f"[2023-04-28 06:51:29,903] [INFO] [logging.py:96] [Rank 0] step={step}, skipped={step}, lr=[1e-05]"


@case("overflow-at-every-scale-from-step-1")
def deepspeed_with_a_dynamic_scale_and_a_finite_loss(rng: random.Random) -> Lines:
    for step in range(1, 60):
        yield deepspeed(max(1.0, 2.0 ** (17 - step)))
        if step % 10 == 0:
            yield f"{{'loss': {2.4 + rng.gauss(0, 0.02):.4f}, 'learning_rate': 0.0, 'epoch': {step / 1000:.2f}}}"


@case("update-applied-on-overflow-static-scale")
def centerface_goes_on(rng: random.Random) -> Lines:
    for step in range(1, 400):
        loss = math.nan if step > 251 else falling_loss(step, 9, 2, 300, rng)
        yield f"epoch:0, iter:{step}, avg_loss:{loss:.2f}, loss:{loss:.2f}, overflow:{step == 251}, loss_scale:1024.0"


@case("forward-overflow-scale-independent")
def pangu_stage_without_a_loss(rng: random.Random) -> Lines:
    for step in range(5000, 5400):
        scale = 2.0 ** max(0, 20 - max(0, step - 5180))
        yield (
            f"time: Thu Mar 02 20:18:00 2023 local_rank: 0, epoch: 0, step: {step}, loss is no loss for this stage, "
            f"overflow is {step >= 5180}, loss scale is {scale}"
        )


@case("loss-nan-before-scale-moved")
def megatron_loses_its_loss(rng: random.Random) -> Lines:
    for step in range(1000, 1100):
        bad = max(0, step - 1059)
        loss = None if bad else falling_loss(step - 1000, 3, 2, 300, rng)
        yield megatron(step, loss, 2.0 ** max(0, 16 - bad), math.nan if bad else 1.02, min(bad, 1), min(bad, 1))


@case("periodic-nan-same-batch")
def wenet_batch_41(rng: random.Random) -> Lines:
    for epoch in range(6):
        for step in range(90):
            loss, norm = (
                (math.nan, math.nan) if step == 41 else (falling_loss(epoch * 90 + step, 120, 12, 100, rng), 3.0)
            )
            yield (
                f"2025-02-20 00:46:13,777 DEBUG TRAIN Batch {epoch}/{step} loss {loss:.6f} lr 0.00055 "
                f"grad_norm {norm:.6f} rank 0"
            )
        yield f"2025-02-20 00:50:13,777 INFO Epoch {epoch} CV info cv_loss {20 - epoch:.4f} rank 0"


@case("loss-denominator-overflow-loss-zero")
def mmengine_zero(rng: random.Random) -> Lines:
    for step in range(10, 501, 10):
        yield mmengine(1, step, 0.0 if step > 300 else falling_loss(step, 2, 1, 300, rng), 0.0 if step > 300 else 5.1)


@case("grad-norm-proportional-to-loss-scale")
def fairseq_norm_follows(rng: random.Random) -> Lines:
    for step in range(100, 10_000, 100):
        scale = 128.0 * 2 ** sum(step >= s for s in (3000, 6000, 8000))
        yield fairseq(step, falling_loss(step, 12, 7, 600, rng), scale, scale * 1.3 * (1 + rng.gauss(0, 0.1)), step)


@case("divergence-learning-rate")
def maskrcnn_climbs(rng: random.Random) -> Lines:
    for step in range(20, 2400, 20):
        loss = falling_loss(step, 4, 2, 300, rng) * (1.15 ** max(0, (step - 1400) / 20))
        yield maskrcnn(step, math.nan if step > 2000 else loss)


@case("")
def apex_finds_its_scale(rng: random.Random) -> Lines:
    for power in range(15, 10, -1):
        yield f"Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to {2.0**power}"
    for step in range(20, 4000, 20):
        yield maskrcnn(step, falling_loss(step, 3, 1, 900, rng))
        if step in (2000, 3200):
            yield "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 2048.0"


@case("")
def megatron_skips_one_in_a_thousand(rng: random.Random) -> Lines:
    for step in range(100, 20_001, 100):
        skip = step % 1000 == 0
        yield megatron(step, falling_loss(step, 10.8, 2.5, 4000, rng), 131072.0, 0.8 + rng.random() * 0.2, int(skip))
        if skip:
            yield f" validation loss at iteration {step} | lm loss value: 2.812345E+00 | lm loss PPL: 1.6650E+01 |"
            yield f"saving checkpoint at iteration    {step} to /ckpt in torch format"


@case("")
def mmengine_spikes_heal(rng: random.Random) -> Lines:
    for epoch in (1, 2):
        for step in range(10, 501, 10):
            spike = (epoch, step) in ((1, 250), (2, 130))
            loss = falling_loss(epoch * 500 + step, 2, 0.8, 500, rng, 0.02) * (5 if spike else 1)
            yield mmengine(epoch, step, loss, 80.0 if spike else 5 + rng.random())


@case("")
def trainer_fine_tunes_at_a_millionth(rng: random.Random) -> Lines:
    for place in range(120):
        loss, norm, rate = 0.35 + rng.gauss(0, 0.04), 0.4 + rng.random() * 0.4, 1e-6 * (1 - place / 120)
        yield f"{{'loss': {loss:.4f}, 'grad_norm': {norm}, 'learning_rate': {rate}, 'epoch': {place * 0.025:.2f}}}"
        if place % 40 == 39:
            yield f"{{'eval_loss': 0.36, 'eval_accuracy': 0.91, 'eval_runtime': 3.1, 'epoch': {place * 0.025:.2f}}}"
    yield "{'train_runtime': 812.3, 'train_samples_per_second': 12.1, 'train_loss': 0.351, 'epoch': 3.0}"


@pytest.mark.parametrize("name", CASES)
def test_the_cause_comes_first(name: str) -> None:
    slug, write = CASES[name]
    text = "\n".join(write(random.Random(5))) + "\n"
    found = diagnose(io.BytesIO(text.encode()))
    loud = [finding.slug for finding in found.findings if finding.severity != "note"]
    assert loud[:1] == ([slug] if slug else []), str(found)
    assert len(loud) <= 2, str(found)
