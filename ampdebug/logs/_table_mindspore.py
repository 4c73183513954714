"""The rows of the format table for MindSpore and the toolkits above it. Adding a format is adding a row."""

from __future__ import annotations

import re

from ampdebug.logs._format import NUMBER, Fields, LogFormat, Place, boolean, number, rx, scale_number

_VALUE = re.compile(rb"dtype=(\w+), value=\s*\[?\s*(" + NUMBER + rb"|True|False)")


def _by_dtype(line: bytes) -> dict[str, Place]:
    # The cell returns (loss, overflow, scale) or less, and what is left out shifts the rest: go by dtype, not position.
    places: dict[str, Place] = {}
    floats: list[re.Match[bytes]] = []
    begin = line.find(b"Tensor(")
    for match in _VALUE.finditer(line, begin) if begin >= 0 else ():
        if match.group(1) != b"Bool":
            floats.append(match)
        elif "overflow" not in places:
            places["overflow"] = (*match.span(2), boolean)
    if floats:
        places["loss"] = (*floats[0].span(2), number)
    if len(floats) > 1 and "overflow" in places:
        places["scale"] = (*floats[1].span(2), scale_number)
    return places


def _mindformers(fields: Fields, line: bytes) -> None:
    # "overflow cond: False, loss_scale: False" is what a net without a scaler prints; that False says nothing.
    if "scale" not in fields and b"loss_scale: False" in line:
        fields.pop("overflow", None)


MINDSPORE_FORMATS: tuple[LogFormat, ...] = (
    LogFormat(
        name="mindformers",
        tool="MindFormers MFLossMonitor (sink and non-sink, 2023 to now), mindrlhf",
        trigger=b"step:[",
        pattern=rx(
            rb"Epoch:\[ *(?P<epoch>\d+)/ *\d+\], *step:\[ *(?P<epoch_step>\d+)/ *(?P<epoch_steps>\d+)\], *"
            rb"loss: ?\[?(?P<loss><N>)(?:/<N>)?\]?(?:, [a-z_]*time: *[\d.]+ ?ms)?"
            rb"(?:.*?\blr: *\[?(?P<lr><N>))?(?:.*?overflow cond: *\[?(?P<overflow>\w+))?"
            rb"(?:.*?loss_scale: *\[?(?P<scale><N>))?(?:.*?global_norm: *\[?(?P<grad_norm><N>))?"
        ),
        sample=(
            "2024-08-19 14:03:22,118 - mindformers[mindformers/core/callback/callback.py:485] - INFO - { Epoch:[  1/  "
            "2], step:[   12/  500], loss: 10.618, per_step_time: 2510ms, lr: 9.5e-06, overflow cond: False, "
            "loss_scale: 65536.0, global_norm: [1.4355]",
            "2024-08-19 14:03:22,118 - [mindformers/core/callback/callback.py:485] - INFO - { Epoch:[  1/  2], "
            "step:[   12/  500], loss:[10.618/10.701], per_step_time: 2510ms, overflow cond: True, loss_scale: "
            "32768.0, global_norm: [nan], train_throughput_per_npu: 2.896T",
            "[INFO] 2023-07-11 10:48:37,163 [/app/mindformers/core/callback/callback.py:269] print_output_info: "
            "Epoch:[  1/  1], step:[  116/  125], loss:[2.220/2.220], time:1951.612 ms, lr:[2.4499998e-06], overflow "
            "cond: False, loss_scale: 16384.0",
        ),
        scale="used",
        prints_overflow=True,
        loss_decimals=3,
        finish=_mindformers,
        traps=(
            "The number after the slash in loss:[a/b] is the mean of the epoch and stays NaN after one NaN; it is not "
            "read.",
            "overflow cond and loss_scale print False when the net returns only a loss; then both are unknown.",
        ),
    ),
    LogFormat(
        name="mindyolo",
        tool="mindyolo trainer",
        trigger=b", Step ",
        pattern=rx(
            rb"Epoch (?P<epoch>\d+)/\d+, Step (?P<epoch_step>\d+)/(?P<epoch_steps>\d+), (?:imgsize \([\d, ]*\), )?"
            rb"loss: (?P<loss><N>)(?:.*?\b(?:cur_)?lr: \[?(?P<lr><N>))?"
        ),
        sample=(
            "2024-03-05 09:33:51,054 [INFO] Epoch 2/30, Step 600/1600, imgsize (640, 640), loss: nan, lbox: nan, "
            "lobj: nan, lcls: nan, cur_lr: 0.0954166650772095",
        ),
        scale="after",
        traps=("Overflow is only looked at on steps that are logged, so its absence between them proves little.",),
    ),
    LogFormat(
        name="mindocr",
        tool="mindocr EvalSaveCallback",
        trigger=b"step: [",
        pattern=rx(
            rb"epoch: \[(?P<epoch>\d+)/\d+\] step: \[(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\], "
            rb"loss: (?P<loss><N>)(?:, lr(?:_\d+)?: (?P<lr><N>))?"
        ),
        sample=(
            "[2024-03-02 11:02:58] mindocr.utils.callbacks INFO - epoch: [1/20] step: [900/1500], loss: nan, lr: "
            "0.000150, per step time: 216.913 ms, fps per card: 295.05 img/s",
        ),
        traps=("Prints neither overflow nor scale nor norm: a NaN loss is all that can be seen.",),
    ),
    LogFormat(
        name="yolox",
        tool="models YOLOX",
        trigger=b"step: [",
        pattern=rx(
            rb"epoch: \[(?P<epoch>\d+)/\d+\] step: \[(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\], lr: (?P<lr><N>), "
            rb"loss: (?P<loss><N>)(?:, overflow: \[?(?P<overflow>\w+)\]?)?(?:, scale: \[?(?P<scale><N>))?"
        ),
        sample=(
            "epoch: [1/285] step: [10/1848], lr: 0.000123, loss: 12.3456, overflow: False, scale: 1024, avg step "
            "time: 312.45ms",
        ),
        prints_overflow=True,
        loss_decimals=4,
    ),
    LogFormat(
        name="mindone",
        tool="mindone EvalSaveCallback",
        trigger=b", step ",
        pattern=rx(
            rb"epoch (?P<epoch>\d+), step (?P<epoch_step>\d+), lr (?P<lr><N>), loss (?P<loss><N>)"
            rb"(?:, loss scale (?P<scale><N>))?(?:, global_step (?P<optimizer_step>\d+))?"
        ),
        sample=(
            "[2024-05-10 08:00:23] INFO: epoch 1, step 23, lr 0.0000100, loss 0.512345, loss scale 4096, global_step "
            "22, step_time(ms) 817.8",
        ),
        scale="after",
        loss_decimals=6,
        traps=(
            "The scale is printed as an integer, so that one below 1 shows as 0.",
            "global_step counts the updates that were made: it falls behind step when updates are dropped.",
        ),
    ),
    LogFormat(
        name="mindcv",
        tool="mindcv StateMonitor",
        trigger=b"batch: [",
        pattern=rx(
            rb"Epoch: \[(?P<epoch>\d+)/\d+\], batch: ?\[(?P<epoch_step>\d+)/(?P<epoch_steps>\d+)\], "
            rb"loss: (?P<loss><N>)(?:, lr: (?P<lr><N>))?"
        ),
        sample=(
            "[2023-06-26 10:00:00] mindcv.utils.callbacks INFO - Epoch: [1/90], batch: [500/10009], loss: 6.784029, "
            "lr: 0.040000, time: 6.084443s",
        ),
        loss_decimals=6,
    ),
    LogFormat(
        name="loss-monitor",
        tool="MindSpore LossMonitor",
        trigger=b", loss is ",
        pattern=rx(
            rb"epoch:? (?P<epoch>\d+),? step:? (?P<epoch_step>\d+), loss is (?!NAN or INF)(?P<loss><N>)(?!.*\bscale)"
        ),
        sample=("epoch: 1 step: 100, loss is 0.3456789",),
    ),
    LogFormat(
        name="bert",
        tool="models BERT LossCallBack",
        trigger=b", outputs are ",
        pattern=rx(
            rb"epoch: (?P<epoch>\d+),(?: current epoch percent: [\d.]+,)? step: (?P<step>\d+), outputs are "
            rb"\(?\[?(?:(?P<loss><N>)|Tensor\()"
        ),
        sample=(
            "epoch: 0, current epoch percent: 0.003, step: 12, outputs are (Tensor(shape=[], dtype=Float32, value= "
            "10.4722), Tensor(shape=[], dtype=Bool, value= False), Tensor(shape=[], dtype=Float32, value= 131072))",
        ),
        scale="used",
        epochs_from=0,
        prints_overflow=True,
        locate=_by_dtype,
        traps=("Fields are told apart by dtype; large scales are rounded to six digits (6.71089e+07).",),
    ),
    LogFormat(
        name="face-recognition",
        tool="models face recognition",
        trigger=b", loss:(Tensor(",
        pattern=rx(rb"epoch\[(?P<epoch>\d+)\], iter\[(?P<step>\d+)\], loss:\(Tensor\((?:.*?cur_lr:(?P<lr><N>))?"),
        sample=(
            "epoch[0], iter[100], loss:(Tensor(shape=[], dtype=Float32, value= 17.25), Tensor(shape=[], dtype=Bool, "
            "value= False), Tensor(shape=[], dtype=Float32, value= 1024)), cur_lr:0.000660, mean_fps:512.1 imgs/sec",
        ),
        epochs_from=0,
        prints_overflow=True,
        locate=_by_dtype,
    ),
    LogFormat(
        name="bert-benchmark",
        tool="models BERT benchmark, Transformer",
        trigger=b"overflow: ",
        pattern=rx(
            rb"epoch: (?P<epoch>\d+),(?: current epoch percent: [\d.]+,)? step: (?P<step>\d+), loss: "
            rb"\[?(?P<loss><N>)\]?, "
            rb"overflow: \[?(?P<overflow>\w+)\]?, loss[ _]scale: \[?(?P<scale><N>)"
        ),
        sample=(
            "epoch: 0, current epoch percent: 0.003, step: 12, loss: 10.47, overflow: False, loss scale: 131072",
            "time: 8123, epoch: 1, step: 12, loss: 10.47, overflow: [False], loss_scale: 131072.0",
        ),
        epochs_from=0,
        prints_overflow=True,
    ),
    LogFormat(
        name="pangu-alpha",
        tool="models PanGu-alpha",
        trigger=b", overflow is ",
        pattern=rx(
            rb"local_rank: (?P<rank>\d+), epoch: (?P<epoch>\d+), step: (?P<step>\d+), loss is (?:(?P<loss><N>)|no "
            rb"loss[\w ]*), "
            rb"overflow is \[?(?P<overflow>\w+)\]?, loss scale is \[?(?P<scale><N>)"
        ),
        sample=(
            "time: Thu Mar 02 20:18:00 2023 local_rank: 0, epoch: 0, step: 5182, loss is 3.98, overflow is True, loss "
            "scale is 65536.0",
            "time: Thu Mar 02 20:18:00 2023 local_rank: 3, epoch: 0, step: 5182, loss is no loss for this stage, "
            "overflow is False, loss scale is 65536.0",
        ),
        epochs_from=0,
        prints_overflow=True,
        traps=("Pipeline stages without a loss print the text 'no loss for this stage'; the loss is then unknown.",),
    ),
    LogFormat(
        name="centerface",
        tool="models centerface",
        trigger=b"loss_scale:",
        pattern=rx(
            rb"epoch:(?P<epoch>\d+), iter:(?P<step>\d+), avg_loss:<N>, loss:\[?(?P<loss><N>)\]?, "
            rb"overflow:\[?(?P<overflow>\w+)\]?, loss_scale:\[?(?P<scale><N>)"
        ),
        sample=("epoch:1, iter:20, avg_loss:3.21, loss:3.11, overflow:False, loss_scale:1024.0",),
        prints_overflow=True,
    ),
    LogFormat(
        name="face-detection",
        tool="models FaceDetection",
        trigger=b"], loss_scale:[",
        pattern=rx(
            rb"rank\[(?P<rank>\d+)\], iter\[(?P<step>\d+)\], loss\[(?P<loss><N>)\], overflow:\[(?P<overflow>\w+)\], "
            rb"loss_scale:\[(?P<scale><N>)\](?:, lr:(?P<lr><N>))?"
        ),
        sample=(
            "rank[0], iter[21], loss[2.31], overflow:[False], loss_scale:[1024.], lr:0.001, "
            "batch_images:(8,3,416,416), batch_labels:(8,200,6)",
        ),
        prints_overflow=True,
    ),
    LogFormat(
        name="dlinknet",
        tool="models dlinknet",
        trigger=b"scale sense is ",
        pattern=rx(
            rb"rank_(?P<rank>\d+) epoch (?P<epoch>\d+) step (?P<epoch_step>\d+), loss is (?P<loss><N>), "
            rb"scale sense is \[?(?P<scale><N>)\]?, overflow is \[?(?P<overflow>\w+)"
        ),
        sample=("rank_0 epoch 1 step 20, loss is 0.41, scale sense is 1024.0, overflow is False",),
        prints_overflow=True,
    ),
)
