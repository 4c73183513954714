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


@pytest.mark.parametrize("name", CASES)
def test_the_cause_comes_first(name: str) -> None:
    slug, write = CASES[name]
    text = "\n".join(write(random.Random(5))) + "\n"
    found = diagnose(io.BytesIO(text.encode()))
    loud = [finding.slug for finding in found.findings if finding.severity != "note"]
    assert loud[:1] == ([slug] if slug else []), str(found)
    assert len(loud) <= 2, str(found)
