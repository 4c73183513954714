"""The rows of the format table for tools outside MindSpore. Adding a format is adding a row."""

from __future__ import annotations

import re

from ampdebug.logs._format import Fields, LogFormat, rx
from ampdebug.logs._keyed import Keyed


def _megatron(fields: Fields, line: bytes) -> None:
    skipped = fields.get("skipped")
    if skipped is not None:
        fields["overflow"] = skipped > 0
    # Megatron averages the loss over the steps that were not skipped and prints the field only where the mean is
    # positive, so that a vanished field means NaN when nothing was skipped, and nothing at all when everything was.
    if "loss" not in fields and not skipped and b"loss scale:" in line:
        fields["loss"] = float("nan")


def _fairseq_json(fields: Fields, line: bytes) -> None:
    if b'"train_loss"' in line or b'"valid_' in line:
        fields.clear()


def _hf(fields: Fields, line: bytes) -> None:
    # The epoch is a fraction there and says nothing that the order of the lines does not.
    del line
    fields.pop("epoch", None)


# What stands in a bar, before or after it: the loss under many names, never a part of it (``loss_cls``).
_BAR_PAIRS = rx(
    rb"(?<![\w/.-])((?:\w{1,20}[_/])?loss(?:[_/](?:step|train/total|total))?|lr|learning_rate|(?:loss|grad)_(?:scale|norm)"
    rb"|scale|gnorm)(?:=|: ?| )(<N>)"
)
_BAR_KEYS = {
    **{
        name + b"loss": "loss"
        for name in (b"", b"train_", b"train/", b"step_", b"reduced_train_", b"avr_", b"avg_", b"total_", b"batch_")
    },
    **dict.fromkeys((b"loss_step", b"train_loss_step", b"loss/train/total", b"loss/total", b"lm_loss"), "loss"),
    b"lr": "lr",
    b"learning_rate": "lr",
    b"grad_norm": "grad_norm",
    b"gnorm": "grad_norm",
    b"loss_scale": "scale",
    b"grad_scale": "scale",
    b"scale": "scale",
}


def _bar(fields: Fields, line: bytes) -> None:
    head = line.split(b"%|", 1)[0].lower()
    if b"valid" in head or b"eval" in head or b"test" in head or "loss" not in fields:
        fields.clear()


OTHER_FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        name="megatron",
        tool="Megatron-LM and its forks",
        trigger=b"per iteration (",
        pattern=rx(rb"iteration +(?P<step>\d+)/ *\d+ \|"),
        pairs=rx(rb"\| *([a-z][\w ]{0,60}?): *\[?(<N>) *(?=\||$)"),
        keys={
            b"lm loss": "loss",
            b"lm_loss": "loss",
            b"loss": "loss",
            b"total loss": "loss",
            b"total_loss": "loss",
            b"loss scale": "scale",
            b"grad norm": "grad_norm",
            b"learning rate": "lr",
            b"number of skipped iterations": "skipped",
            b"number of nan iterations": "nan_losses",
        },
        sample=(
            " [2025-01-02 03:04:05.678901] iteration      120/    8000 | consumed samples:         7680 | elapsed "
            "time per iteration (ms): 812.4 | learning rate: 6.680000E-06 | global batch size:    64 | lm loss: "
            "2.311234E+00 | loss scale: 65536.0 | grad norm: 1.021 | number of skipped iterations:   0 | number of "
            "nan iterations:   0 |",
        ),
        scale="after",
        prints_overflow=True,
        loss_is="mean",
        drops_nan_loss=True,
        finish=_megatron,
        traps=(
            "The loss field vanishes when the loss is NaN, and also when every step since the last line was skipped.",
            "A constant loss scale of 1.0 means that there is no scaler (bf16 or fp32).",
            "Skipped iterations are counted since the last line.",
        ),
    ),
    LogFormat(
        name="deepspeed",
        tool="DeepSpeed engine",
        trigger=b"skipped=",
        pattern=rx(rb"step=(?P<step>\d+), skipped=(?P<skipped_total>\d+), lr=\[(?P<lr><N>)?"),
        sample=(
            "[2023-04-28 06:51:29,903] [INFO] [logging.py:96:log_dist] [Rank 0] step=10, skipped=6, lr=[9.65e-06], "
            "mom=[(0.9, 0.95)]",
        ),
        traps=("No loss; skipped counts from the start of the process.",),
    ),
    LogFormat(
        name="hf-trainer",
        tool="Hugging Face Trainer",
        trigger=b"loss'",
        pattern=rx(
            rb"\{(?=[^{}]{0,4000}?'(?:learning_rate|epoch)')(?:'[\w/]{1,40}': *'?[-+.\w]{1,40}'?, ){0,12}?"
            rb"'loss': *'?(?P<loss><N>)"
        ),
        pairs=rx(rb"'([\w/]{1,40})': *'?(<N>)"),
        keys={b"grad_norm": "grad_norm", b"learning_rate": "lr"},
        sample=(
            "{'loss': 1.9007, 'grad_norm': 2.3141672611236572, 'learning_rate': 1.53e-07, 'epoch': 0.02}",
            "{'loss': '1.9007', 'grad_norm': '2.314', 'learning_rate': '1.53e-07', 'epoch': '0.02'}",
        ),
        loss_is="mean",
        loss_decimals=4,
        filters_nan_loss=True,
        finish=_hf,
        traps=(
            "NaN losses are left out of the mean (logging_nan_inf_filter), so that only NaN ones print 0.0.",
            "No step number: findings count the lines that carry a loss.",
            "The learning rate stands still, or is 0.0, while the scaler skips steps.",
        ),
    ),
    LogFormat(
        name="fairseq",
        tool="fairseq",
        trigger=b"num_updates=",
        pattern=rx(rb"epoch +(?P<epoch>\d+): +(?P<epoch_step>\d+) / (?P<epoch_steps>\d+)\b"),
        pairs=rx(rb"\b(loss|gnorm|loss_scale|lr|num_updates)=(<N>)"),
        keys={
            b"loss": "loss",
            b"gnorm": "grad_norm",
            b"loss_scale": "scale",
            b"lr": "lr",
            b"num_updates": "optimizer_step",
        },
        sample=(
            "2021-10-03 15:20:08 | INFO | train_inner | epoch 002:     20 / 3680 loss=6.019, nll_loss=4.719, "
            "ppl=26.34, wps=49827.0, ups=2.38, wpb=20511.4, bsz=712.4, num_updates=3699, lr=0.00041, gnorm=0.628, "
            "loss_scale=65536, train_wall=8, gb_free=10.2, wall=1908",
        ),
        scale="after",
        loss_is="mean",
        loss_decimals=3,
        traps=("num_updates leaves skipped steps out; the number after 'epoch' counts them in.",),
    ),
    LogFormat(
        name="fairseq-json",
        tool="fairseq with --log-format json",
        trigger=b'"num_updates"',
        pattern=rx(rb'\{"epoch": "?(?P<epoch>\d+)'),
        pairs=rx(rb'"(loss|gnorm|loss_scale|lr|num_updates)": "?(<N>)'),
        keys={
            b"loss": "loss",
            b"gnorm": "grad_norm",
            b"loss_scale": "scale",
            b"lr": "lr",
            b"num_updates": "step",
        },
        sample=(
            '2021-10-03 15:20:08 | INFO | train_inner | {"epoch": 2, "update": 1.005, "loss": "6.019", "ppl": "26.34", '
            '"num_updates": "3699", "lr": "0.00041", "gnorm": "0.628", "loss_scale": "65536"}',
        ),
        scale="after",
        loss_is="mean",
        loss_decimals=3,
        finish=_fairseq_json,
        traps=("num_updates leaves skipped steps out.",),
    ),
    LogFormat(
        name="swin",
        tool="Swin-Transformer main.py and its descendants",
        trigger=b"Train: [",
        pattern=rx(rb"Train: \[(?P<epoch>\d+)/\d+\]\[(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\]"),
        pairs=rx(rb"\b(lr|loss|grad_norm|loss_scale) +(<N>)"),
        keys={b"lr": "lr", b"loss": "loss", b"grad_norm": "grad_norm", b"loss_scale": "scale"},
        sample=(
            "[2022-11-04 03:02:15 vit_small] (main.py 221): INFO Train: [0/100][400/1251]\teta 0:14:10 lr 0.001000\t "
            "wd 0.0500\ttime 0.3468 (0.3500)\tloss 6.7308 (6.8349)\tgrad_norm 1.1636 (1.0127)\tloss_scale 131072.0000 "
            "(67134.4390)\tmem 9134MB",
        ),
        scale="after",
        steps_from=0,
        epochs_from=0,
        loss_decimals=4,
        traps=("The number in brackets is a running mean and stays NaN after one skipped step; it is not read.",),
    ),
    LogFormat(
        name="metric-logger",
        tool="DeiT, MAE, BEiT and others with MetricLogger",
        trigger=b"Epoch: [",
        pattern=rx(rb"Epoch: \[(?P<epoch>\d+)(?:/\d+)?\] +\[ *(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\] +eta: "),
        pairs=rx(rb"\b(lr|loss|grad_norm|loss_scale): +(<N>)"),
        keys={b"lr": "lr", b"loss": "loss", b"grad_norm": "grad_norm", b"loss_scale": "scale"},
        sample=(
            "Epoch: [0]  [  20/1251]  eta: 0:14:10  lr: 0.000012  loss: 6.9077 (6.9102)  loss_scale: 65536.0000 "
            "(65536.0000)  grad_norm: 1.0211 (1.1034)  time: 0.4120  data: 0.0002  max mem: 9134",
        ),
        scale="after",
        steps_from=0,
        epochs_from=0,
        loss_decimals=4,
        traps=(
            "The value is a median of the last steps, the number in brackets the mean since the start of the epoch.",
        ),
    ),
    LogFormat(
        name="nanogpt",
        tool="nanoGPT",
        trigger=b"iter ",
        pattern=rx(rb"\biter (?P<step>\d+): loss (?P<loss><N>), time"),
        sample=("iter 120: loss 3.2145, time 312.40ms, mfu 31.20%",),
        steps_from=0,
        loss_decimals=4,
    ),
    LogFormat(
        name="mmengine",
        tool="mmengine, mmcv 2",
        trigger=b"(train) ",
        pattern=rx(
            rb"(?:Epoch\(train\) +\[(?P<epoch>\d+)\]\[ *(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\]"
            rb"|Iter\(train\) +\[ *(?P<step>\d+)/\d+\])"
        ),
        pairs=rx(rb"\b(lr|base_lr|loss|grad_norm|loss_scale): +(<N>)"),
        keys={b"lr": "lr", b"loss": "loss", b"grad_norm": "grad_norm", b"loss_scale": "scale"},
        sample=(
            "02/20 14:43:11 - mmengine - INFO - Epoch(train)   [1][ 100/3125]  lr: 1.0000e-01  eta: 6:12:01  time: "
            "0.0149  data_time: 0.0003  memory: 214  grad_norm: 3.1416  loss: 2.0611",
            "02/20 14:43:11 - mmengine - INFO - Iter(train) [  100/80000]  lr: 1.0000e-02  eta: 6:12:01  time: "
            "0.0149  loss: 2.0611",
        ),
        loss_is="mean",
        loss_decimals=4,
    ),
    LogFormat(
        name="mmcv",
        tool="mmcv 1",
        trigger=b" - INFO - ",
        pattern=rx(
            rb" - INFO - (?:[Ee]poch \[(?P<epoch>\d+)\]\[(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\]|Iter "
            rb"\[(?P<step>\d+)/\d+\])"
            rb"[\t ]+lr: (?P<lr><N>)"
        ),
        pairs=rx(rb"\b(loss|grad_norm|loss_scale): +(<N>)"),
        keys={b"loss": "loss", b"grad_norm": "grad_norm", b"loss_scale": "scale"},
        sample=(
            "2021-05-01 10:00:00,123 - mmdet - INFO - Epoch [1][50/7330]\tlr: 1.978e-03, eta: 2 days, 3:04:05, time: "
            "2.10, data_time: 0.05, memory: 3800, loss_rpn_cls: 0.65, loss_cls: 1.2, loss: 2.5, grad_norm: 8.1",
        ),
        loss_is="mean",
        loss_decimals=4,
    ),
    LogFormat(
        name="insightface",
        tool="insightface arcface_torch",
        trigger=b"Global Step: ",
        pattern=rx(
            rb"Loss (?P<loss><N>) +(?:LearningRate (?P<lr><N>) +)?Epoch: (?P<epoch>\d+) +Global Step: (?P<step>\d+)"
            rb"(?: +Fp16 Grad Scale: *(?P<scale><N>))?"
        ),
        sample=(
            "Training: 2023-03-14 09:08:43,293-Speed 2178.40 samples/sec   Loss 21.1234   LearningRate 0.001000   "
            "Epoch: 0   Global Step: 20   Fp16 Grad Scale:  65536   Required: 194 hours",
        ),
        scale="after",
        epochs_from=0,
        loss_is="mean",
        loss_decimals=4,
        traps=("The scale is printed without decimals: one below a half shows as 0.",),
    ),
    LogFormat(
        name="wenet",
        tool="wenet, CosyVoice",
        trigger=b"TRAIN Batch ",
        pattern=rx(rb"TRAIN Batch (?P<epoch>\d+)/(?P<epoch_step>\d+)\b"),
        pairs=rx(rb"\b(loss|lr|grad_norm|rank) (<N>)"),
        keys={b"loss": "loss", b"lr": "lr", b"grad_norm": "grad_norm", b"rank": "rank"},
        sample=(
            "2025-02-20 00:46:13,777 DEBUG TRAIN Batch 7/100 loss 1.234567 lr 0.00055784 grad_norm 2.345678 rank 2",
        ),
        steps_from=0,
        epochs_from=0,
        loss_decimals=6,
        traps=("Every rank prints its own line.",),
    ),
    LogFormat(
        name="lightning",
        tool="PyTorch Lightning, NeMo, Composer and other progress bars with an epoch",
        trigger=b"%|",
        pattern=rx(
            rb"[Ee]poch:? *\[?(?P<epoch>\d+)(?:/\d+)?\]?[^%|\r\n]{0,80}?\b\d+%\|[^|\r\n]*\| *(?P<epoch_step>\d+)/"
            rb"(?P<epoch_steps>\d+) \[\d"
        ),
        pairs=_BAR_PAIRS,
        keys=_BAR_KEYS,
        sample=(
            "Epoch 0:  45%|████▌     | 45/100 [00:10<00:12,  4.45it/s, v_num=0, train_loss=2.310]",
            "Epoch 3:  10%|█         | 10/100 [00:30<04:30,  3.00s/it, loss=nan, v_num=0]",
            "Epoch 0:   1%|▏         | 100/10000 [01:00<1:39:00,  1.66it/s, reduced_train_loss=10.90, global_step=9.0]",
            "train          Epoch   0:   25%|█████ | 8/32 [00:05<00:15,  1.6ba/s, loss/train/total=2.3100]",
        ),
        epochs_from=None,
        repeats=True,
        loss_decimals=2,
        finish=_bar,
        traps=("The bar repeats a step on every refresh, separated by carriage returns; the last print counts.",),
    ),
    LogFormat(
        name="progress-bar",
        tool="accelerate and diffusers scripts, plain tqdm bars with a loss",
        trigger=b"%|",
        pattern=rx(
            rb"^(?!.{0,120}?[Ee]poch:? *\[?\d)(?!\s*\d+/\d+ +[\d.]+[GMK]).{0,160}?\b\d+%\|[^|\r\n]*\| *(?P<step>\d+)"
            rb"/\d+ \[\d"
        ),
        pairs=_BAR_PAIRS,
        keys=_BAR_KEYS,
        sample=(
            "Steps:  25%|█████               | 501/2000 [00:05<2:01:07,  5.02s/it, lr=1e-5, step_loss=nan, td=0.05s]",
            "loss 2.3123:  10%|█         | 10/100 [00:10<01:30,  1.00it/s]",
        ),
        repeats=True,
        finish=_bar,
        traps=("The bar repeats a step on every refresh, separated by carriage returns; the last print counts.",),
    ),
    LogFormat(
        name="maskrcnn-benchmark",
        tool="maskrcnn_benchmark, detectron2",
        trigger=b"iter: ",
        pattern=rx(rb"\beta: .{0,60}?\biter: (?P<step>\d+) +(?:total_)?loss: (?P<loss><N>)"),
        pairs=rx(rb"\b(lr): (<N>)"),
        keys={b"lr": "lr"},
        sample=(
            "2020-05-10 06:34:34,320 maskrcnn_benchmark INFO: eta: 1 day, 19:42:40  iter: 180  loss: 2.3776 (2.6154)  "
            "loss_classifier: 1.1888 (1.3077)  time: 1.6072 (1.5858)  data: 0.0132 (0.0184)  lr: 0.023000  max mem: "
            "8743",
            "[05/10 06:34:34 d2.utils.events]:  eta: 19:42:40  iter: 179  total_loss: 2.378  loss_cls: 1.189  "
            "loss_box_reg: 0.4  time: 1.6072  data_time: 0.0132  lr: 0.023  max_mem: 8743M",
        ),
        loss_decimals=4,
        traps=("The value is a median of the last 20 steps, the number in brackets a mean.",),
    ),
)

GENERIC = Keyed(
    name="generic",
    tool="any line with a step number and a loss, in any order and notation",
    trigger=b"oss",
    pattern=re.compile(rb"(?i)loss"),
    sample=(
        "[train] step=1200 loss=2.3117 lr=3e-4 grad_norm=0.91 loss_scale=32768",
        "Epoch [1/10], Step [100/600], Loss: 2.1234, Scale: 65536.0",
        "loss 2.3123 | iter 120 | found_inf 1.0 | GradScaler 16384.0",
        "Step 10: loss tensor(2.3123, device='cuda:0'), scale 65536.0, all_finite False",
    ),
    epochs_from=None,
    steps_restart=True,
    traps=(
        "Only tried on lines of no other format; it knows nothing of what the numbers mean to the tool.",
        "Of lines that name different losses the kind seen first is read.",
    ),
)
