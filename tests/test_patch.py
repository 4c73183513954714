"""Float32 written into source: one case a way of writing an operator, compared with the text a person would write."""

from __future__ import annotations

import difflib
import os
import subprocess
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("libcst", reason="patches are written with libcst: pip install 'ampdebug[fix]'")

from ampdebug._errors import AmpdebugError, FormatError
from ampdebug._patch import Patch, PatchSite, build_patch, is_library
from ampdebug._patch_match import Target, plain_name
from ampdebug._patch_rewrite import rewrite_source
from ampdebug._sites import OperatorSite

HEAD = "import mindspore as ms\nfrom mindspore import nn, ops\n"
HELPER = '''class _Float32(nn.Cell):
    """Runs a function in float32; AMP levels convert the cells of a network, and this is none."""

    def construct(self, compute):
        return compute()


_float32 = _Float32().to_float(ms.float32)
'''


def network(body: str, init: str = "pass", head: str = HEAD) -> tuple[str, int]:
    """A class around a construct, and the number of the first line in it."""
    text = f"{head}\n\nclass Net(nn.Cell):\n    def __init__(self):\n"
    text += textwrap.indent(textwrap.dedent(init).strip() + "\n", " " * 8)
    text += "\n    def construct(self, x, y=None, scale=2.0):\n"
    return text + textwrap.indent(textwrap.dedent(body).strip("\n") + "\n", " " * 8), text.count("\n") + 1


def patched(body: str, *targets: tuple[int, str], init: str = "pass", level: str = "O2", path: str = "net") -> str:
    """The changed lines of construct and of ``__init__``."""
    text, first = network(body, init)
    seen: dict[tuple[int, str], int] = {}
    asked = []
    for line, operator in targets:
        index = seen[line, operator] = seen.get((line, operator), -1) + 1
        asked.append(Target(first + line, operator, index, path))
    result = rewrite_source(text, asked, level=level)
    assert result.missed == ()
    compile(result.code, "net.py", "exec")
    lines = result.code.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("class Net("))
    return textwrap.dedent("\n".join(lines[start:])).strip("\n") + "\n"


def construct(*args: object, **kwargs: object) -> str:
    """The body of construct after the change."""
    text = patched(*args, **kwargs)  # type: ignore[arg-type]
    return textwrap.dedent(text.partition("def construct(self, x, y=None, scale=2.0):\n")[2])


@pytest.mark.parametrize(
    ("body", "targets", "wanted"),
    [
        # one operator: its inputs to float32, the result back
        ("return ops.exp(x)", [(0, "Exp")], "return _float32(lambda: ops.exp(x.astype(ms.float32))).astype(x.dtype)"),
        (
            "return x.sum(-1, keepdims=True)",
            [(0, "Tensor.sum")],
            "return _float32(lambda: x.astype(ms.float32).sum(-1, keepdims=True)).astype(x.dtype)",
        ),
        (
            "return x / y",
            [(0, "Tensor.__truediv__")],
            "return _float32(lambda: x.astype(ms.float32) / y.astype(ms.float32)).astype(x.dtype)",
        ),
        # numbers are no tensors
        (
            "n = x.shape[0]\nreturn 2.0 * x / n",
            [(1, "Tensor.__rmul__")],
            "n = x.shape[0]\nreturn _float32(lambda: 2.0 * x.astype(ms.float32)).astype(x.dtype) / n",
        ),
        # the second of two on one line
        (
            "return ops.exp(x) + ops.exp(y)",
            [(0, "Exp"), (0, "Exp")],
            "return _float32(lambda: ops.exp(x.astype(ms.float32))).astype(x.dtype) + "
            "_float32(lambda: ops.exp(y.astype(ms.float32))).astype(y.dtype)",
        ),
        # nested and chained: one region, nothing rounded inside
        (
            "return x.exp().sum(-1).log()",
            [(0, "Tensor.exp"), (0, "Tensor.sum"), (0, "Tensor.log")],
            "return _float32(lambda: x.astype(ms.float32).exp().sum(-1).log()).astype(x.dtype)",
        ),
        # movements belong to the way
        (
            "return ops.mean(ops.reshape(x, (x.shape[0], -1)), 1)",
            [(0, "ReduceMean")],
            "return _float32(lambda: ops.mean(ops.reshape(x.astype(ms.float32), (x.shape[0], -1)), 1)).astype(x.dtype)",
        ),
        # what is not protected is computed outside, as before
        (
            "# scores\nreturn ops.exp(x * scale)  # large",
            [(1, "Exp")],
            "# scores\noperand = x * scale\n"
            "return _float32(lambda: ops.exp(operand.astype(ms.float32))).astype(operand.dtype)  # large",
        ),
        # two statements: the value between them stays; everybody else sees it rounded
        (
            "e = ops.exp(x)\nz = ops.relu(e)\nreturn ops.log(e) + z",
            [(0, "Exp"), (2, "Log")],
            "e = _float32(lambda: ops.exp(x.astype(ms.float32)))\nz = ops.relu(e.astype(x.dtype))\n"
            "return _float32(lambda: ops.log(e)).astype(x.dtype) + z",
        ),
        # the same name again: its dtype is kept
        (
            "x = ops.exp(x)\nx = x.reshape(2, -1)\nx = ops.log(x)\nreturn x",
            [(0, "Exp"), (2, "Log")],
            "dtype = x.dtype\nx = _float32(lambda: ops.exp(x.astype(ms.float32)))\nx = x.reshape(2, -1)\n"
            "x = _float32(lambda: ops.log(x)).astype(dtype)\nreturn x",
        ),
        (
            "x += y\nreturn x",
            [(0, "Tensor.__iadd__")],
            "x = _float32(lambda: x.astype(ms.float32) + y.astype(ms.float32)).astype(x.dtype)\nreturn x",
        ),
        # several lines keep their comments
        (
            "y = (\n    x  # one\n    # two\n    / y  # three\n)\nreturn y",
            [(1, "Tensor.__truediv__")],
            "y = _float32(lambda: (\n    x.astype(ms.float32)  # one\n    # two\n    / y.astype(ms.float32)  # three\n"
            ")).astype(x.dtype)\nreturn y",
        ),
        # MindSpore compiles no lambda in a loop
        (
            "for _ in range(3):\n    x = ops.exp(x) / 2\nreturn x",
            [(1, "Exp")],
            "for _ in range(3):\n    def in_float32():\n        return ops.exp(x.astype(ms.float32))\n\n"
            "    x = _float32(in_float32).astype(x.dtype) / 2\nreturn x",
        ),
        # what does not always run stays where it is
        (
            "return ops.exp(x) if scale > 1 else ops.log(x + 1)",
            [(0, "Log")],
            "return ops.exp(x) if scale > 1 else "
            "_float32(lambda: ops.log((x + 1).astype(ms.float32))).astype(x.dtype)",
        ),
        # a function of the library that calls operators of other names
        (
            "return ops.std(x)",
            [(0, "Square")],
            "return _float32(lambda: ops.std(x.astype(ms.float32))).astype(x.dtype)",
        ),
    ],
)  # fmt: skip
def test_operators(body: str, targets: list[tuple[int, str]], wanted: str) -> None:
    assert construct(body, *targets) == wanted + "\n"


def test_attributes_are_what_init_made_them() -> None:
    init = 'self.pool = ops.ReduceMean()\nself.w = ms.Parameter(ops.ones(3), name="w")\nself.axis = 1'
    assert construct(
        "return self.pool(x * self.w, self.axis)", (0, "ReduceMean"), (0, "Tensor.__mul__"), init=init
    ) == (
        "return _float32(lambda: self.pool(x.astype(ms.float32) * self.w.astype(ms.float32), self.axis))"
        ".astype(x.dtype)\n"
    )


def test_a_librarys_cell_is_pinned_where_it_is_made() -> None:
    text = patched("return self.fc(x) + y", (0, "MatMul"), init="self.fc = nn.Dense(4, 4)  # wide", path="block.fc")
    assert "self.fc = _Float32Dense(4, 4)  # wide\n" in text
    assert "return self.fc(x).astype(x.dtype) + y\n" in text
    text = patched("return self.fc(x) + y", (0, "MatMul"), init="self.fc = nn.Dense(4, 4)", path="fc", level="auto")
    assert "self.fc = nn.Dense(4, 4).to_float(ms.float32)\n" in text


def test_cells_in_containers() -> None:
    init = "self.head = nn.SequentialCell(nn.Dense(4, 8), nn.Dense(8, 3))"
    text = patched("return self.head(x)", (0, "MatMul"), init=init, path="head.1")
    assert "self.head = nn.SequentialCell(nn.Dense(4, 8), _Float32Dense(8, 3))\n" in text
    assert "return self.head(x)\n" in text


def test_o2_rounds_what_batchnorm_gives_unless_it_is_asked_not_to() -> None:
    init = "self.conv = nn.Conv2d(1, 1, 3)\nself.bn = nn.BatchNorm2d(16)\nself.pool = ops.ReduceMean()"
    body = "x = self.bn(self.conv(x))\nx = ops.reshape(x, (2, -1))\nreturn self.pool(x, 1)"
    assert construct(body, (2, "ReduceMean"), init=init) == (
        "operand = self.conv(x)\nx = _unrounded(self.bn)(operand)\nx = ops.reshape(x, (2, -1))\n"
        "return _float32(lambda: self.pool(x, 1)).astype(operand.dtype)\n"
    )
    assert construct(body, (2, "ReduceMean"), init=init, level="O3") == (
        "x = self.bn(self.conv(x))\nx = ops.reshape(x, (2, -1))\n"
        "return _float32(lambda: self.pool(x.astype(ms.float32), 1)).astype(x.dtype)\n"
    )


def test_under_o1_plain_casts_are_enough() -> None:
    assert construct("return ops.exp(x) + y", (0, "Exp"), level="O1") == (
        "return ops.exp(x.astype(ms.float32)).astype(x.dtype) + y\n"
    )


@pytest.mark.parametrize(
    ("head", "wanted"),
    [
        (HEAD, HELPER),
        ("import mindspore\nfrom mindspore import nn, ops\n", HELPER.replace("ms.float32", "mindspore.float32")),
        (
            "import mindspore.common.dtype as mstype\nfrom mindspore import nn, ops\n",
            HELPER.replace("ms.float32", "mstype.float32"),
        ),
        (
            "from mindspore import dtype as mstype\nfrom mindspore import nn, ops\n",
            HELPER.replace("ms.float32", "mstype.float32"),
        ),
        ("import mindspore.nn as nn\nimport mindspore.ops as ops\n", "import mindspore as ms\n\n\n" + HELPER),
        ('"""Doc."""\n\nimport mindspore as ms\nimport mindspore.nn as nn\nfrom mindspore import ops\n', HELPER),
    ],
)
def test_names_are_spelled_as_in_the_file(head: str, wanted: str) -> None:
    text, first = network("return ops.exp(x)", head=head)
    code = rewrite_source(text, [Target(first, "Exp", 0, "net")], level="O2").code
    assert wanted in code
    removed = [line for line in difflib.ndiff(text.splitlines(), code.splitlines()) if line.startswith("- ")]
    assert removed == ["-         return ops.exp(x)"]
    assert code.count("class _Float32") == 1


def test_names_that_are_taken_are_left_alone() -> None:
    body = "operand = 3\n_float32 = 1\nreturn ops.exp(x * operand)"
    text, first = network(body)
    code = rewrite_source(text, [Target(first + 2, "Exp", 0, "net")], level="O2").code
    assert "operand_2 = x * operand\n" in code
    assert "return _float32_2(lambda: ops.exp(operand_2.astype(ms.float32))).astype(operand_2.dtype)\n" in code


def test_a_function_outside_of_a_class() -> None:
    text = f"{HEAD}\n\ndef norm(x, axis=-1):\n    return x / x.sum(axis)\n"
    code = rewrite_source(text, [Target(6, "Tensor.sum", 0, "")], level="O3").code
    assert "    operand" not in code
    assert "    return x / _float32(lambda: x.astype(ms.float32).sum(axis)).astype(x.dtype)\n" in code


@pytest.mark.parametrize(
    ("body", "target", "message"),
    [
        ("x[0] = y\nreturn x", (0, "Tensor.__setitem__", "net"), "assigns into a tensor"),
        ("return x.shape", (0, "Exp", "net"), "none on line 10 could be Exp"),
        ("return ops.std(x) + ops.var(x)", (0, "Square", "net"), "2 calls on line 10 could be Square"),
    ],
)
def test_what_cannot_be_patched_is_named(body: str, target: tuple[int, str, str], message: str) -> None:
    text, first = network(body)
    result = rewrite_source(text, [Target(first + target[0], target[1], 0, target[2])], level="O2")
    assert result.code == text
    assert message in result.missed[0][1]


def test_source_that_is_not_python() -> None:
    with pytest.raises(FormatError, match="cannot be parsed"):
        rewrite_source("def (", [], level="O2")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("ops.exp", "Exp"), ("Tensor.sum", "ReduceSum"), ("ops.matmul", "MatMulExt"), ("ops.bmm", "BatchMatMul"),
        ("Tensor.__rtruediv__", "ops.div"), ("mint.mean", "MeanExt"), ("Tensor.__iadd__", "Add"),
    ],
)  # fmt: skip
def test_spellings_of_one_operator(one: str, other: str) -> None:
    assert plain_name(one) == plain_name(other)
    assert len({plain_name(name) for name in ("Add", "Sub", "Exp", "Expm1", "ReduceMax", "std", "round", "pad")}) == 8


# --- the patch --------------------------------------------------------------------------------------------------------


def patch_of(path: Path, *, verify: object = None, operator: str = "Exp") -> Patch:
    text, first = network("return ops.exp(x)")
    path.write_text(text, encoding="utf-8")
    site = PatchSite(OperatorSite("net", operator, f"{path.name}:{first}", 0), str(path))
    return build_patch([site], level="O2", verify=verify)  # type: ignore[arg-type]


def test_the_diff_is_one_that_git_applies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    patch = patch_of(tmp_path / "net.py")
    assert patch.verified is None
    assert str(patch).startswith("not verified: it was not run (verify=False)\n\n--- a/net.py\n+++ b/net.py\n@@ ")
    subprocess.run(["git", "apply", "-"], input=str(patch).encode(), cwd=tmp_path, check=True, timeout=60)
    assert (tmp_path / "net.py").read_text(encoding="utf-8") == patch.files[str(tmp_path / "net.py")]


def test_writing_keeps_a_backup_and_refuses_other_files(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    patch = patch_of(path)
    before = path.read_text(encoding="utf-8")
    os.chmod(path, 0o640)
    assert patch.write() == (str(path),)
    assert path.read_text(encoding="utf-8") == patch.files[str(path)] != before
    assert (tmp_path / "net.py.orig").read_text(encoding="utf-8") == before
    assert path.stat().st_mode & 0o777 == 0o640
    assert sorted(item.name for item in tmp_path.iterdir()) == ["net.py", "net.py.orig"]
    with pytest.raises(AmpdebugError, match="has changed since the patch was made"):
        patch.write()
    path.write_text(before, encoding="utf-8")
    (tmp_path / "net.py.orig").write_text("mine", encoding="utf-8")
    with pytest.raises(AmpdebugError, match="exists and is another file"):
        patch.write()
    assert path.read_text(encoding="utf-8") == before


def test_line_ends_of_windows_stay(tmp_path: Path) -> None:
    text, first = network("return ops.exp(x)")
    path = tmp_path / "net.py"
    path.write_bytes(text.replace("\n", "\r\n").encode())
    site = PatchSite(OperatorSite("net", "Exp", f"net.py:{first}", 0), str(path))
    build_patch([site], level="O2", verify=None).write()
    data = path.read_bytes()
    assert b"_float32(lambda" in data
    assert data.count(b"\n") == data.count(b"\r\n")


def test_the_patch_says_what_was_verified(tmp_path: Path) -> None:
    seen = []

    def verify(before: dict[str, str], after: dict[str, str]) -> tuple[bool, str]:
        seen.append((before, after))
        return True, "accuracy 0.97"

    patch = patch_of(tmp_path / "net.py", verify=verify)
    assert patch.verified is True
    assert str(patch).startswith("verified: accuracy 0.97\n")
    assert seen == [(patch.before, patch.files)]
    assert str(patch_of(tmp_path / "net.py", verify=lambda b, a: (False, "nan"))).startswith("NOT verified: nan\n")


def test_a_value_may_leave_its_function_where_rounding_it_fails(tmp_path: Path) -> None:
    patch = patch_of(tmp_path / "net.py", verify=lambda b, a: (".astype(x.dtype)" not in next(iter(a.values())), ""))
    assert patch.verified is True
    assert "+        return _float32(lambda: ops.exp(x.astype(ms.float32)))\n" in patch.diff


def test_a_librarys_source_is_not_patched(tmp_path: Path) -> None:
    file = tmp_path / "site-packages" / "mindcv" / "vit.py"
    assert is_library(str(file))
    assert not is_library(str(tmp_path / "net.py"))
    site = PatchSite(OperatorSite("block", "Exp", "vit.py:3", 0), str(file))
    patch = build_patch([site, PatchSite(OperatorSite("b", "Exp", "", 0), "")], level="O2", verify=None)
    assert (patch.diff, patch.verified) == ("", None)
    assert "result.apply(net) protects whole cells" in patch.reason
    assert "is a library's file, not yours" in patch.left_out[0]
    assert "has no line of your source" in patch.left_out[1]


def test_what_is_put_before_the_statement_sees_a_kept_value_rounded() -> None:
    body = "w = ops.exp(x)\nreturn w / w.sum(-1, keepdims=True)"
    assert construct(body, (0, "Exp"), (1, "Tensor.__truediv__")) == (
        "w = _float32(lambda: ops.exp(x.astype(ms.float32)))\n"
        "operand = w.astype(x.dtype).sum(-1, keepdims=True)\n"
        "return _float32(lambda: w / operand.astype(ms.float32)).astype(operand.dtype)\n"
    )
