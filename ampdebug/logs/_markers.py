"""Lines that are no training step but say something about one: overflow messages, errors, resumes, settings.

Like the table of formats this is one row a kind of line, each with samples that the tests read.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from ampdebug.logs._format import CONVERTERS, Fields, number, rx

MarkerKind = Literal[
    "overflow-between",  # an overflowed step that prints no step line of its own
    "overflow-next",  # belongs to the step line that follows
    "never-stepped",
    "scale-floor",
    "zero-division",
    "stopped-on-nan",
    "stopped-on-nan-gradient",
    "range-error",
    "resume",
    "load",
    "checkpoint",
    "level",
    "bfloat16",
    "parameter-norm",
]


@dataclass(frozen=True)
class Marker:
    """One kind of such line.

    Attributes:
        kind: What it says.
        trigger: Bytes without which the line can't be one.
        pattern: Its layout; named groups are fields as in the table of formats, besides ``text``, ``total``.
        samples: Lines of that kind.
        not_samples: Lines that look alike and must not be taken for one.
        per_process: Every process prints it, so that equal neighbours are one event.
        fields: What is true of every such line.
    """

    kind: MarkerKind
    trigger: bytes
    pattern: re.Pattern[bytes]
    samples: tuple[str, ...]
    not_samples: tuple[str, ...] = ()
    per_process: bool = False
    fields: tuple[tuple[str, object], ...] = ()

    def read(self, line: bytes) -> Fields | None:
        """What the line says, None where it is of another kind."""
        match = self.pattern.search(line)
        if match is None:
            return None
        fields: Fields = dict(self.fields)
        for name, text in match.groupdict().items():
            if text is None:
                continue
            convert = CONVERTERS.get(name)
            value = convert(text) if convert is not None else text.decode("utf-8", "replace")
            if value is not None:
                fields[name] = value
        factor = number(fields.pop("factor").encode()) if "factor" in fields else None
        if factor is not None and fields.get("scale_before") is not None:
            fields["scale"] = fields["scale_before"] * factor
        return fields


_DROPPED = (("overflow", True), ("dropped", True))

MARKERS: tuple[Marker, ...] = (
    Marker(
        "overflow-next",
        b"overflow, still update",
        rx(rb"overflow, still update, loss scale adjust to (?P<scale><N>)"),
        ("2024-03-05 09:33:51,047 [WARNING] overflow, still update, loss scale adjust to 1024.0",),
        fields=(("overflow", True), ("applied", True)),
    ),
    Marker(
        "overflow-next",
        b"overflow, drop",
        rx(rb"overflow, drop(?: step)?[,.] [Ll]oss scale adjust to (?P<scale><N>)"),
        (
            "2024-03-05 09:33:51,047 [WARNING] overflow, drop step, loss scale adjust to 512.0",
            "Epoch 2/30, Step 600/1600, accumulate: 4, this step grad overflow, drop. Loss scale adjust to 512.0",
        ),
        fields=_DROPPED,
    ),
    Marker(
        "overflow-next",
        b"overflow detected",
        rx(rb"overflow detected(?: in epoch (?P<epoch>\d+) step (?P<epoch_step>\d+)\.?|\.?\s*$)"),
        (
            "[2024-05-10 08:00:23] WARNING: overflow detected in epoch 1 step 23",
            "[2023-05-10 08:00:23] WARNING: overflow detected.",
            "overflow detected",
        ),
        fields=(("overflow", True),),
    ),
    Marker(
        "overflow-between",
        b"overflow detected, ",
        rx(rb"overflow detected, (?:ignoring gradient, )?setting (?:loss )?scale to(?: to)?:? (?P<scale><N>)"),
        (
            "2021-10-03 15:20:07 | INFO | fairseq.trainer | NOTE: gradient overflow detected, ignoring gradient, "
            "setting loss scale to: 65536.0",
            "| WARNING: overflow detected, setting loss scale to: 0.25",
            "AMP: overflow detected, setting scale to to 64.0",
        ),
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"Gradient overflow",
        rx(
            rb"Gradient overflow(?:\. +Skipping step, loss scaler \d+ reducing loss scale to (?P<scale><N>)|, skipping "
            rb"update)"
        ),
        (
            "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
            "Gradient overflow, skipping update",
        ),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"OVERFLOW!",
        rx(
            rb"OVERFLOW!(?: Rank (?P<rank>\d+))? ?Skipping step\. Attempted loss scale: (?P<scale_before><N>)"
            rb"(?:, reducing to (?P<scale><N>))?"
        ),
        (
            "[2023-04-28 06:51:29,903] [INFO] [loss_scaler.py:181:update_scale] [deepspeed] OVERFLOW! Rank 0 Skipping "
            "step. Attempted loss scale: 65536, reducing to 32768",
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, but hysteresis is 2. Reducing "
            "hysteresis to 1",
            "[deepscale] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 4294967296, reducing to 2147483648.0",
            "OVERFLOW! Skipping step. Attempted loss scale: 131072.0",
        ),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"rad overflow on iteration",
        rx(rb"[Gg]rad overflow on iteration:? *(?P<step>\d+)"),
        ("[deepscale] fused_optimizer.py: Grad overflow on iteration 3",),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"ound inf or nan",
        rx(
            rb"[Ff]ound inf or nan, current scale is: (?P<scale_before><N>)(?:, decrease to: <N> ?\* ?(?P<factor><N>))?"
        ),
        ("Found inf or nan, current scale is: 32768.0, decrease to: 32768.0*0.5",),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"kipping updating the model",
        rx(rb"[Tt]he grad norm is (?:nan|inf|-inf)\. Skipping updating the model"),
        ("[host] 2021-01-01 00:00:00,000 (trainer:663) WARNING: The grad norm is nan. Skipping updating the model.",),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"dynamic loss scale from ",
        rx(rb"Reducing dynamic loss scale from (?P<scale_before><N>) to (?P<scale><N>)"),
        (
            "[2023-04-28 06:51:29,903] [INFO] [fused_optimizer.py:394:_update_scale] Reducing dynamic loss scale from "
            "65536.0 to 32768.0",
        ),
        not_samples=("Increasing dynamic loss scale from 32768.0 to 65536.0",),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"verflow",
        rx(
            rb"(?i)^(?!.{0,400}(?:loss scaler \d|attempted loss scale|overflow, skipping update|scale adjust"
            rb"|setting (?:loss )?scale)).*?"
            rb"\b(?:found overflow|grad(?:ient)?s? overflow(?:ed|s)?|overflow(?:ed)?(?: (?:detected|occur\w*|found))?)"
            rb"[,.;:!]? {1,2}(?:so |and )?(?:skip|ignor|drop)(?:ping|ped|s)?\b(?! *[=:])"
            rb"|\boverflow occurs, please check"
        ),
        (
            "[04/22/23 15:38:12] INFO     colossalai - colossalai - INFO: Found overflow. Skip step",
            "overflow detected, skip update",
            "[WARNING] gradient overflow, skip step",
            "Overflow occurs, please check it.",
        ),
        not_samples=(
            "Gradient overflow.  Skipping step, loss scaler 0 reducing loss scale to 32768.0",
            "Gradient overflow, skipping update",
            "OVERFLOW! Skipping step. Attempted loss scale: 131072.0",
            "[deepspeed] OVERFLOW! Rank 0 Skipping step. Attempted loss scale: 65536, reducing to 32768",
            "overflow detected, ignoring gradient, setting loss scale to: 65536.0",
            "2024-03-05 09:33:51,047 [WARNING] overflow, drop step, loss scale adjust to 512.0",
            "overflow_skip: True",
        ),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "overflow-between",
        b"kip",
        rx(
            rb"(?i)\b(?:nan|inf|non-?finite)s?(?: (?:or|and) (?:nan|inf)s?)? (?:values? )?"
            rb"(?:(?:was |were )?(?:found|detected) )?in (?:the )?grad\w*[,.;:]? (?:so )?skip(?:ping|ped)?\b"
        ),
        (
            "warning: found NaN or Inf in gradients, skipping step",
            "Found inf or nan in gradients, skipping optimizer step",
        ),
        per_process=True,
        fields=_DROPPED,
    ),
    Marker(
        "never-stepped",
        b"is less than 1",
        rx(rb"global_step` of optimizer is less than 1"),
        (
            "[2023-06-02 10:30:00] mindcv.utils.callbacks WARNING - `global_step` of optimizer is less than 1. It "
            "seems to be a overflow at the first step.",
        ),
    ),
    Marker(
        "scale-floor",
        b"oss scale",
        rx(rb"Minimum loss scale reached|loss scale already at minimum|Current loss scale already at minimum"),
        (
            "FloatingPointError: Minimum loss scale reached (0.0001). Your loss is probably exploding.",
            "Exception: Current loss scale already at minimum - cannot decrease scale anymore. Exiting run.",
        ),
    ),
    Marker(
        "zero-division",
        b"ZeroDivisionError",
        rx(rb"^\W*(?:\[?rank ?\d+\]?:? *)?ZeroDivisionError: float division by zero"),
        ("ZeroDivisionError: float division by zero",),
    ),
    Marker(
        "stopped-on-nan",
        b"NAN or INF",
        rx(rb"In epoch: (?P<epoch>\d+) step: (?P<epoch_step>\d+), loss is NAN or INF"),
        (
            "ValueError: In epoch: 1 step: 7, loss is NAN or INF, training process cannot continue, terminating "
            "training.",
        ),
    ),
    Marker(
        "stopped-on-nan",
        b"oss",
        rx(
            rb"(?i)(?:(?:error|exception): (?!In epoch: ).{0,80}?(?:\bloss (?:is|became|diverged.{0,20}) (?:nan|inf)"
            rb"|nan (?:loss|in loss|detected in loss)|\bnan in local forward loss)"
            rb"|\bloss (?:is|became|was) (?:infinite|non-?finite|nan|inf)\b(?! or inf, training process).{0,40}"
            rb"(?:\bstop|\babort|\bexit|\bterminat|\bat iteration)"
            rb"|\bloss returned in `training_step` is (?:nan|inf)|\binvalid loss, terminating"
            rb"|\bnan (?:or inf )?(?:loss|detected in (?:the )?loss)\b.{0,20}(?:\bstop|\babort|\bexit|\bterminat))"
            rb"(?:.{0,20}\bat iteration[= ]+(?P<step>\d{1,12}))?"
        ),
        (
            "RuntimeError: loss is nan, stopping training",
            "Exception: NaN loss encountered nan in loss",
            "Loss is nan, stopping training",
            "FloatingPointError: Loss became infinite or NaN at iteration=612!",
            "ValueError: The loss returned in `training_step` is nan.",
            "Batch 5: Invalid loss, terminating training",
            "AssertionError: Rank 0: found NaN in local forward loss calculation. Device: 0, node: host",
        ),
        not_samples=(
            "stop_on_nan: the training is ended when the loss is nan",
            "early stopping when loss is not falling",
        ),
    ),
    Marker(
        "stopped-on-nan-gradient",
        b"rror",
        rx(
            rb"(?i)error: .{0,60}?(?:found nan in local grad norm|gradients are (?:nan|inf)"
            rb"|(?P<text>Function '\w{1,80}' returned nan values))"
        ),
        (
            "AssertionError: Rank 3: found NaN in local grad norm in backwards pass. Device: 3, node: host",
            "RuntimeError: Function 'SoftmaxBackward0' returned nan values in its 0th output.",
            "FloatingPointError: gradients are Nan/Inf",
        ),
        not_samples=("RuntimeError: Function 'SoftmaxBackward0' returned an invalid gradient",),
    ),
    Marker(
        "range-error",
        b"rror",
        rx(
            rb"(?P<text>(?:IndexError: Target -?\d+ is out of bounds"
            rb"|For '(?:GatherD|NLLLoss|OneHot|SparseSoftmaxCrossEntropyWithLogits)'.{0,80}must be in \[.{0,40}but "
            rb"got:? *-?\d+|label.{0,40}(?:out of range|outside the valid range).{0,80}))"
        ),
        (
            "IndexError: Target 91 is out of bounds.",
            "RuntimeError: For 'GatherD', the value of 'index' must be in [-80, 80), but got: 80",
            "InvalidArgumentError: Received a label value of 91 which is outside the valid range of [0, 91).",
        ),
    ),
    Marker(
        "range-error",
        b"t < n_classes",
        rx(rb"(?P<text>nll_loss.{0,120}Assertion `t >= 0 && t < n_classes`)"),
        (
            "../aten/src/ATen/native/cuda/Loss.cu:250: nll_loss_forward_reduce_cuda_kernel_2d: block: [0,0,0], thread: "
            "[3,0,0] Assertion `t >= 0 && t < n_classes` failed.",
        ),
    ),
    Marker(
        "resume",
        b"esum",
        rx(
            rb"(?i)\bresum(?:ed|ing|e)\b(?! *[\]=:'\"])(?!.{0,60}\b(?:false|none|disabled|null)\b)"
            rb"[ \w]{0,40}\b(?:from|training|checkpoint\w{0,40}|ckpt\w{0,40}|run|epoch|step|success\w*)\b"
        ),
        (
            "2024-05-10 08:00:23 INFO: Resume training from checkpoint ./output/ckpt/rank_0-120_4.ckpt",
            "resumed from epoch 12",
            "=> resuming from checkpoint /data/ckpt.pth",
            "Resuming training from step 12000",
            "==============> Resuming form ckpt_epoch_2.pth....................",
        ),
        not_samples=(
            "resume: None",
            "resume_training: False",
            "'resume_from_checkpoint': None",
            "resume training: false",
        ),
    ),
    Marker(
        "resume",
        b"states from",
        rx(rb"Restor(?:ing|ed)(?: all)? states from the checkpoint"),
        (
            "Restoring states from the checkpoint path at lightning_logs/version_3/checkpoints/epoch=11-step=1200.ckpt",
            "Restored all states from the checkpoint at lightning_logs/version_3/checkpoints/epoch=11-step=1200.ckpt",
        ),
    ),
    Marker(
        "resume",
        b"oaded checkpoint",
        rx(rb"(?i)loaded checkpoint .{0,200}(?:\(epoch|iteration|@ \d+ updates|\bstep\b)"),
        (
            "  successfully loaded checkpoint from /ckpt/mp_rank_00 at iteration 3000",
            "Loaded checkpoint /ckpt/checkpoint_last.pt (epoch 2 @ 3680 updates)",
            "=> loaded checkpoint 'model.pth' (epoch 12)",
        ),
        not_samples=("loaded checkpoint resnet50.ckpt",),
    ),
    Marker(
        "load",
        b"oad",
        rx(
            rb"(?i)\bload(?:ed|ing)?\b[ \w:]{0,30}\b(?:check ?point|ckpt|weights?|param\w*|states?|model)\b"
            rb"(?!.{0,60}\b(?:false|none|disabled|null)\b)(?P<text>.{0,120})"
        ),
        (
            "2024-08-19 14:03:22,118 - mindformers - INFO - Load checkpoint from ./output/checkpoint/rank_0/ok.ckpt",
            "Loading checkpoint: /data/model.ckpt",
            "loading weights from model.ckpt",
        ),
        not_samples=("load_checkpoint: None", "load_checkpoint ................... None", "load checkpoint: False"),
    ),
    Marker(
        "checkpoint",
        b"av",
        rx(rb"(?i)\b(?:sav(?:ed|ing)|save)\b.{0,40}(?:check ?point|ckpt|model|weights)\b(?P<text>.{0,120})"),
        (
            "2024-03-05 09:43:55,592 [INFO] Saving model to ./runs/exp/weights/model-2_1600.ckpt",
            "saving checkpoint at iteration    1000 to /ckpt",
        ),
    ),
    Marker(
        "level",
        b"MP level",
        rx(rb"(?i)\bAMP level: *(?P<text>O[0-3]|auto)\b"),
        ("[2023-06-26 09:59:40] __main__ INFO - AMP level: O0, Loss scale: 1.0(fixed), Drop overflow update: False",),
    ),
    Marker(
        "level",
        b"mp_level",
        rx(rb"\b(?:ms_)?amp_level['\"]?\s{0,4}[:=.]{0,20}\s{0,4}['\"]?(?P<text>O[0-3]|auto)\b"),
        ("ms_amp_level: O2", "'amp_level': 'O3',", "amp_level=O0"),
    ),
    Marker(
        "bfloat16",
        b"bf",
        rx(
            rb"(?i)\bbf(?:loat)?16['\"]?[ .]{0,40}[:=]?[ .]{0,60}['\"]?true\b|params_dtype[ "
            rb".:=]{1,60}(?:torch\.)?bfloat16"
        ),
        (
            "  bf16 ............................................ True",
            "params_dtype .................. torch.bfloat16",
            "bf16: true",
        ),
        not_samples=("bf16: False",),
    ),
    Marker(
        "parameter-norm",
        b"_norm/",
        rx(
            rb"step:\[ *\d+/ *\d+\] (?:device_)?(?:local|adam_m|adam_v)_norm/(?P<text>[\w.\-/]{1,200}): *\[?"
            rb"(?P<grad_norm><N>)"
        ),
        (
            "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:1014] - INFO - Epoch:[  1/  "
            "2], step:[   12/  500] local_norm/model.layers.0.attention.wq.weight: 0.0132",
        ),
    ),
)
