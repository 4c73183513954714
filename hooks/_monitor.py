"""``AMPMonitor``: the callback for ``Model.train``."""

from __future__ import annotations

import os
from typing import Any, Literal

import mindspore as ms
from mindspore.train import Callback

from ampdebug._paths import as_path
from ampdebug.hooks._flight import KEEP_BYTES, keep_options
from ampdebug.hooks._flight_calls import TRAIN_STEP
from ampdebug.hooks._session import Session


class AMPMonitor(Callback):
    """Records what the numbers of every layer do while ``Model.train`` runs.

    List it first among the callbacks: ``LossMonitor`` raises at a NaN loss, and callbacks behind it miss that step.

    Args:
        out: Directory of the run; made if need be. One file a rank.
        every: Statistics are taken in step 1, 1 + every, ...; the scalars (loss, scale, overflow) in each.
        cells: Which cells are watched: path globs (``"blocks.*.attn"``), class names, cell classes, or a list of these.
            None watches all.
        append: Go on in a directory that already holds a run instead of refusing.
        amp_level: What to note as the AMP level; None reads it off the network.
        graph: How values leave a compiled graph: by a Python ``"callback"`` (CPU only) or by ``"capture"`` in buffers
            on the device, which costs its memory; ``"auto"`` takes callbacks where they work.
        tensorboard: Directory for live TensorBoard files, None for none.
        keep_bad_steps: How many of the first bad steps to keep, so that ``ampdebug.replay`` can run them again: batch,
            parameters before the step, loss scale; ``.npz`` files beside the run. 0 keeps none and costs nothing.
        keep_every: Parameters are copied to the host before step 1, 1 + keep_every, ...: one copy of their memory, and
            the time of copying it. With more than 1 a bad step that was not skipped has parameters that are older.
        keep_bytes: Limit for these files together, in bytes.

    Example:
        >>> monitor = ampdebug.AMPMonitor("runs/exp1", every=10)        # doctest: +SKIP
        >>> model.train(3, data, callbacks=[monitor])                   # doctest: +SKIP
        >>> print(ampdebug.open_run("runs/exp1"))                       # doctest: +SKIP
    """

    def __init__(
        self,
        out: str | os.PathLike[str],
        *,
        every: int = 1,
        cells: Any = None,
        append: bool = False,
        amp_level: str | None = None,
        graph: Literal["auto", "callback", "capture"] = "auto",
        tensorboard: str | os.PathLike[str] | None = None,
        keep_bad_steps: int = 0,
        keep_every: int = 1,
        keep_bytes: int = KEEP_BYTES,
    ) -> None:
        super().__init__()
        self._out = as_path(out, "out")
        self._options = {
            "every": every,
            "cells": cells,
            "append": append,
            "amp_level": amp_level,
            "graph": graph,
            "tensorboard": tensorboard,
            "keep": keep_options(keep_bad_steps, keep_every, keep_bytes),
        }
        self._session: Session | None = None

    def on_train_begin(self, run_context: Any) -> None:
        params = run_context.original_args()
        session = Session(params.train_network, self._out, **self._options)
        if params.dataset_sink_mode and ms.get_context("device_target") != "CPU":
            session.note(
                "sink-mode",
                "dataset_sink_mode=True: the device runs many steps between two calls of a callback, so only one "
                "step of each sink is seen. Train with dataset_sink_mode=False while you look at the numbers.",
            )
        try:
            session.attach()
        except Exception as error:  # noqa: BLE001 - what the user asked for was checked before: this is ours
            session.fail(error)
        self._session = session

    def on_train_step_begin(self, run_context: Any) -> None:
        if self._session is not None:
            self._session.begin()
            if self._session.flight is not None:
                self._session.flight.saw(run_context.original_args().get("train_dataset_element"), {}, TRAIN_STEP)

    def on_train_step_end(self, run_context: Any) -> None:
        if self._session is None:
            return
        params = run_context.original_args()
        self._session.end(
            params.net_outputs,
            epoch=params.cur_epoch_num,
            epoch_step=(params.cur_step_num - 1) % params.batch_num + 1,
        )

    def on_train_end(self, run_context: Any) -> None:
        self._close("finished")

    def __exit__(self, *error: Any) -> None:
        self._close("failed" if error and error[0] is not None else "finished")

    def _close(self, status: Any) -> None:
        if self._session is not None:
            self._session.close(status)
            self._session = None
