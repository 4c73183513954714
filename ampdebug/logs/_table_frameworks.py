"""The rows of the format table for further training frameworks. Adding a format is adding a row."""

from __future__ import annotations

import re

from ampdebug.logs._format import Fields, LogFormat, number, rx
from ampdebug.logs._keyed import JsonLines

_YOLO_PARTS = re.compile(rb"^\s*\d+/\d+ +[\d.]+[GMK]i?B? +((?:[-+.\w]+ +){3,8}?)\d+ *: ")


def _yolo(fields: Fields, line: bytes) -> None:
    # box, cls, dfl (or box, obj, cls), then the number of instances and the image size; there is no sum.
    match = _YOLO_PARTS.match(line)
    if match is None:
        fields.clear()
        return
    parts = [number(text) for text in match.group(1).split()[:-1]]
    known = [part for part in parts if part is not None]
    if not known or len(known) < len(parts):
        fields.clear()
        return
    fields["loss"] = sum(known)


def _no_evaluation(fields: Fields, line: bytes) -> None:
    head = line.split(b"%|", 1)[0].lower()
    if b"valid" in head or b"eval" in head or b"test" in head:
        fields.clear()


FRAMEWORK_FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        name="timm",
        tool="timm train.py",
        trigger=b"Train: ",
        pattern=rx(
            rb"Train: (?P<epoch>\d+) \[ *(?P<epoch_step>\d+)/(?P<epoch_steps>\d+) +\( *\d+%\)\] +Loss: +(?P<loss><N>)"
            rb"(?:.*?\bLR: (?P<lr><N>))?"
        ),
        sample=(
            "Train: 0 [  50/1251 (  4%)]  Loss: 6.93 (6.94)  Time: 0.345s,  741.12/s  (0.345s,  741.12/s)  LR: "
            "1.000e-06  Data: 0.010 (0.015)",
        ),
        steps_from=0,
        epochs_from=0,
        loss_decimals=2,
        traps=("The number in brackets is a running mean and stays NaN; it is not read.",),
    ),
    LogFormat(
        name="torchvision-example",
        tool="PyTorch's ImageNet example and its many descendants",
        trigger=b"Epoch: [",
        pattern=rx(
            rb"Epoch: \[(?P<epoch>\d+)\]\[ *(?P<epoch_step>\d+)/ *(?P<epoch_steps>\d+)\].*?\bLoss +(?P<loss><N>)"
        ),
        sample=(
            "Epoch: [0][  10/5005]\tTime  0.345 ( 0.512)\tData  0.001 ( 0.100)\tLoss 6.9345e+00 (6.9877e+00)\tAcc@1   "
            "0.39 (  0.20)\tAcc@5   1.56 (  0.85)",
        ),
        steps_from=0,
        epochs_from=0,
        loss_decimals=4,
        traps=("The number in brackets is a running mean and stays NaN; it is not read.",),
    ),
    LogFormat(
        name="mnist-example",
        tool="PyTorch's MNIST example, open_clip",
        trigger=b"Train Epoch: ",
        pattern=rx(
            rb"Train Epoch: (?P<epoch>\d+) \[ *(?P<epoch_step>\d+)/ *(?P<epoch_steps>\d+) *\( *\d+%\)\].*?"
            rb"(?<![\w])Loss: (?P<loss><N>)"
        ),
        sample=(
            "Train Epoch: 1 [640/60000 (1%)]\tLoss: 2.300039",
            "2023-01-01,00:00:00 | INFO | Train Epoch: 0 [  25600/1000000 (3%)] Data (t): 0.1 Batch (t): 0.5, 512/s "
            "LR: 0.000010 Logit Scale: 14.286 Contrastive_loss: 6.2383 (6.2383) Loss: 6.2383 (6.2383)",
        ),
        steps_from=0,
        epochs_from=None,
        traps=("It counts samples, not steps.",),
    ),
    LogFormat(
        name="cifar-tutorial",
        tool="PyTorch's CIFAR tutorial",
        trigger=b"] loss: ",
        pattern=rx(rb"^\[(?P<epoch>\d+), +(?P<epoch_step>\d+)\] loss: (?P<loss><N>)"),
        sample=("[1,  2000] loss: 2.173",),
        loss_is="mean",
        loss_decimals=3,
    ),
    LogFormat(
        name="ultralytics",
        tool="Ultralytics YOLOv8 and later, YOLOv5",
        trigger=b"%|",
        pattern=rx(
            rb"^\s*(?P<epoch>\d+)/\d+ +[\d.]+[GMK]i?B? .*?: +\d+%\|[^|]*\| *(?P<epoch_step>\d+)/(?P<epoch_steps>\d+) "
        ),
        sample=(
            "      1/100      2.31G      1.234      2.345      1.123         45        640: 100%|██████████| 8/8 "
            "[00:03<00:00,  2.10it/s]",
            "     0/299     6.92G   0.04325   0.05127   0.01872       120       640: 100%|██████████| 16/16 "
            "[00:05<00:00,  3.1it/s]",
        ),
        epochs_from=None,
        repeats=True,
        loss_is="mean",
        finish=_yolo,
        traps=("It prints running means of the parts of the loss; their sum is taken as the loss.",),
    ),
    LogFormat(
        name="keras",
        tool="Keras, TensorFlow's Model.fit",
        trigger=b"loss: ",
        pattern=rx(
            "^\\s*(?P<epoch_step>\\d+)/(?P<epoch_steps>\\d+) (?:\\[[=>.]*\\] - |(?:[ ]*[━╸╺]+ )).{0,120}?"
            "(?:- |^)loss: (?P<loss><N>)".encode()
        ),
        sample=(
            " 120/1563 [=>............................] - ETA: 10s - loss: 2.3012 - accuracy: 0.1123",
            "120/1563 ━━━━━━━━━━━━━━━━━━━━ 10s 7ms/step - accuracy: 0.1123 - loss: 2.3012",
        ),
        repeats=True,
        loss_is="mean",
        loss_decimals=4,
        traps=("The loss is the mean since the start of the epoch and stays NaN until its end.",),
    ),
    LogFormat(
        name="tacotron2",
        tool="Tacotron 2 and its descendants",
        trigger=b" Grad Norm ",
        pattern=rx(rb"Train loss (?P<step>\d+) (?P<loss><N>) Grad Norm (?P<grad_norm><N>)"),
        sample=("Train loss 6312 0.451234 Grad Norm 0.312345 1.95s/it",),
        steps_from=0,
        loss_decimals=6,
    ),
    LogFormat(
        name="tensorflow",
        tool="TensorFlow Estimator, LoggingTensorHook",
        trigger=b", step = ",
        pattern=rx(rb"\bloss = (?P<loss><N>), step = (?P<step>\d+)"),
        sample=(
            "INFO:tensorflow:loss = 2.3012, step = 100 (12.345 sec)",
            "I0629 10:00:00.123456 140 basic_session_run_hooks.py:260] loss = 2.3012, step = 100 (12.345 sec)",
        ),
        steps_from=0,
    ),
    LogFormat(
        name="clu",
        tool="JAX programs that log with clu.metric_writers",
        trigger=b"logging_writer.py",
        pattern=rx(rb"logging_writer\.py:\d+\] \[(?P<step>\d+)\] "),
        pairs=rx(rb"(?<![\w/])(?:train[_/])?(loss|learning_rate|lr|grad_norm|scale|loss_scale)=(<N>)"),
        keys={
            b"loss": "loss",
            b"learning_rate": "lr",
            b"lr": "lr",
            b"grad_norm": "grad_norm",
            b"scale": "scale",
            b"loss_scale": "scale",
        },
        sample=("I0101 00:00:00.000000 139 logging_writer.py:48] [100] accuracy=0.1, learning_rate=0.1, loss=2.3012",),
        loss_is="mean",
    ),
    LogFormat(
        name="paddleclas",
        tool="PaddleClas",
        trigger=b"[Train][Epoch ",
        pattern=rx(
            rb"\[Train\]\[Epoch (?P<epoch>\d+)/\d+\]\[Iter: (?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\]"
            rb"(?:lr(?:\([^)]*\))?: (?P<lr><N>))?.*?(?<![A-Za-z_])loss: (?P<loss><N>)"
        ),
        sample=(
            "[2022/01/01 00:00:00] ppcls INFO: [Train][Epoch 1/120][Iter: 10/5005]lr(LinearWarmup): 0.00010000, top1: "
            "0.00, CELoss: 7.01234, loss: 7.01234, batch_cost: 0.30s, reader_cost: 0.01",
        ),
        steps_from=0,
        loss_decimals=5,
    ),
    LogFormat(
        name="paddledetection",
        tool="PaddleDetection",
        trigger=b"learning_rate: ",
        pattern=rx(
            rb"Epoch: \[(?P<epoch>\d+)\] \[ *(?P<epoch_step>\d+)/ *(?P<epoch_steps>\d+)\] learning_rate: (?P<lr><N>) "
            rb".*?(?<![A-Za-z_])loss: (?P<loss><N>)"
        ),
        sample=(
            "[09/10 12:00:00] ppdet.engine INFO: Epoch: [0] [  20/1000] learning_rate: 0.000333 loss: 3.4512 loss_cls: "
            "1.2 eta: 1:00:00 batch_cost: 0.51 data_cost: 0.0003 ips: 15.6 images/s",
        ),
        steps_from=0,
        epochs_from=0,
        loss_decimals=6,
    ),
    LogFormat(
        name="paddlenlp",
        tool="PaddleNLP Trainer",
        trigger=b", global_step: ",
        pattern=rx(
            rb"\] - loss: (?P<loss><N>), (?:learning_rate: (?P<lr><N>), )?global_step: (?P<step>\d+)"
            rb"(?:.*?\bloss_scale: (?P<scale><N>))?"
        ),
        sample=(
            "[2023-06-01 10:00:00,123] [    INFO] - loss: 2.31234, learning_rate: 1e-05, global_step: 10, "
            "interval_runtime: 3.2, interval_samples_per_second: 5.1, loss_scale: 32768.0",
        ),
        loss_is="mean",
    ),
    LogFormat(
        name="espnet",
        tool="ESPnet 2",
        trigger=b"epoch:train:",
        pattern=rx(rb"\b(?P<epoch>\d+)epoch:train:\d+-(?P<epoch_step>\d+)batch: "),
        pairs=rx(rb"(?<![\w])(loss|grad_norm|loss_scale|optim0_lr0)=(<N>)"),
        keys={b"loss": "loss", b"grad_norm": "grad_norm", b"loss_scale": "scale", b"optim0_lr0": "lr"},
        sample=(
            "[host] 2021-01-01 00:00:00,000 (trainer:732) INFO: 1epoch:train:1-100batch: iter_time=0.1, "
            "forward_time=0.2, loss_ctc=120.1, loss_att=80.2, acc=0.1, loss=92.2, backward_time=0.1, grad_norm=12.3, "
            "clip=100.000, loss_scale=6.5536e+04, optim_step_time=0.05, optim0_lr0=1.000e-05, train_time=0.5",
        ),
        scale="unknown",
        loss_is="mean",
        traps=("All numbers are means over the batches since the last line, the scale too.",),
    ),
    LogFormat(
        name="icefall",
        tool="k2 icefall",
        trigger=b"loss[loss=",
        pattern=rx(
            rb"(?:\((?P<rank>\d+)/\d+\) )?Epoch (?P<epoch>\d+), batch (?P<epoch_step>\d+), (?:[\w: ]+, )??"
            rb"loss\[loss=(?P<loss><N>)(?:.*?\blr: (?P<lr><N>))?(?:.*?\bgrad_scale: (?P<scale><N>))?"
        ),
        sample=(
            "2022-05-10 08:00:00,123 INFO [train.py:842] (0/8) Epoch 1, batch 100, loss[loss=0.5123, simple_loss=1.0, "
            "pruned_loss=7.1, over 4000.00 frames.], tot_loss[loss=0.6123, simple_loss=1.1, pruned_loss=7.0, over "
            "40000.00 frames.], batch size: 20, lr: 2.50e-02, grad_scale: 8.0",
        ),
        scale="after",
        steps_from=0,
        loss_decimals=4,
        traps=("tot_loss is a running mean; it is not read.",),
    ),
    JsonLines(
        name="json-lines",
        tool="one JSON object a line: wandb exports, MMEngine, LLaMA-Factory, ms-swift, dllogger, trainer_state.json",
        trigger=b"oss",
        pattern=re.compile(rb'\{.{0,8000}?"[^"]{0,40}(?:loss|scale)[^"]{0,20}"'),
        sample=(
            '{"step": 10, "loss": 2.3, "loss_scale": 65536.0, "grad_norm": 1.0, "overflow": false}',
            '{"train/loss": 2.3, "train/grad_norm": 1.1, "train/learning_rate": 1e-05, "train/global_step": 10}',
            '{"mode": "train", "epoch": 1, "iter": 50, "lr": 0.0019, "memory": 3800, "loss": NaN, "grad_norm": 8.1}',
        ),
        epochs_from=None,
        traps=("A pretty-printed document is read too: each of its innermost objects counts as a line.",),
    ),
)
