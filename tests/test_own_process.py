"""The marker own_process: every test keeps its own result, and a dead child is a failure that says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
MODULE = """
import os, signal, sys
import pytest

pytestmark = pytest.mark.own_process

def test_is_in_another_process(): assert "--child-reports" in " ".join(sys.argv)
def test_passes(): pass
def test_fails(): assert 1 == 2, "as written"
def test_dies(): os.kill(os.getpid(), signal.SIGKILL)
def test_after_the_death(): pass
def test_skips(): pytest.skip("on purpose")
@pytest.mark.xfail(reason="known", strict=True)
def test_is_known_to_fail(): raise ValueError
"""


@pytest.mark.skipif(sys.platform == "win32", reason="needs SIGKILL")
def test_each_test_has_its_own_result(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "ampdebug").symlink_to(ROOT / "ampdebug")
    (tmp_path / "tests" / "test_inner.py").write_text(MODULE)
    (tmp_path / "tests" / "test_outer.py").write_text("def test_plain(): pass\n")
    # An ordinary test in the folder before, and one in another folder after: nothing may be left set up between them.
    for folder, name in (("a", "test_before.py"), ("b", "test_later.py")):
        (tmp_path / "tests" / folder).mkdir()
        (tmp_path / "tests" / folder / name).write_text("def test_plain(): pass\n")
    (tmp_path / "tests" / "a" / "test_inner_too.py").write_text(
        "import pytest\npytestmark = pytest.mark.own_process\ndef test_inner(): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    said = done.stdout
    assert done.returncode == 1, said
    for name, outcome in {
        "is_in_another_process": "PASSED",
        "passes": "PASSED",
        "fails": "FAILED",
        "dies": "FAILED",
        "after_the_death": "PASSED",
        "skips": "SKIPPED",
        "is_known_to_fail": "XFAIL",
    }.items():
        assert f"tests/test_inner.py::test_{name} {outcome}" in said, said
    assert "as written" in said
    assert "the child process ended with exit code -9 in this test" in said
    assert "2 failed, 7 passed, 1 skipped, 1 xfailed" in said.splitlines()[-1]
