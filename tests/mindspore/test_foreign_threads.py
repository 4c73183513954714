"""MindSpore's threads keep their Python thread state once a callback of ours came by."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PROGRAM = """
    import threading
    import mindspore as ms, numpy as np
    from mindspore import Tensor, nn, ops
    from ampdebug.hooks._foreign_threads import keep_thread_state

    ms.set_context(mode=ms.GRAPH_MODE)
    known = threading.local()
    main = threading.get_ident()
    keep, kept = False, set()

    def callback(x):
        if keep:
            keep_thread_state()
        if threading.get_ident() != main:
            kept.add(hasattr(known, "there"))
            known.there = True
        return np.zeros(1, np.float32)

    class Net(nn.Cell):
        def __init__(self):
            super().__init__()
            self.emit = ops.Custom(callback, out_shape=(1,), out_dtype=ms.float32, func_type="pyfunc")

        def construct(self, x):
            y = x
            for _ in range(70):  # so much that MindSpore gives it to threads of its own
                y = ops.matmul(y, x)
                y = ops.depend(y, self.emit(y))
            return y

    net, x = Net(), Tensor(np.full((128, 128), 1 / 128, np.float32))
    for keep in (False, True):
        for _ in range(6):  # MindSpore may take another thread for the first runs
            net(x).asnumpy()
        kept.clear()
        for _ in range(4):
            net(x).asnumpy()
        print(keep, sorted(kept))
"""


def test_the_state_outlives_the_callback(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    command = [sys.executable, str(program)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]  # the interpreter comes down as it should
    assert done.stdout.splitlines() == ["False [False]", "True [True]"]
