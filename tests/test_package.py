"""What users install: the wheel holds ampdebug/hooks/ as a real folder and no top-level hooks/."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import zipfile
from email.parser import HeaderParser
from pathlib import Path

import pytest

import ampdebug

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel built from a copy of the tracked files, so that the checkout gets no build/ folder."""
    setuptools = pytest.importorskip("setuptools")
    if int(setuptools.__version__.split(".")[0]) < 77:
        pytest.skip(f"building needs setuptools>=77, here is {setuptools.__version__} (make test installs one)")
    copy = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    for folder in ("ampdebug", "hooks"):
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    build = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(copy / "dist"), str(copy)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = (copy / "dist").glob("*.whl")
    assert path.name == f"ampdebug-{ampdebug.__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


def modules(folder: Path) -> set[str]:
    return {str(file.relative_to(folder)) for file in folder.rglob("*.py")}


def test_it_holds_every_module_of_both_folders(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if name.endswith(".py")}
    hooks = {f"ampdebug/hooks/{name}" for name in modules(ROOT / "hooks")}
    own = {f"ampdebug/{name}" for name in modules(ROOT / "ampdebug") if not name.startswith("hooks/")}
    assert hooks, "hooks/ is empty"
    assert held == hooks | own


def test_it_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    top = {name.split("/")[0] for name in wheel.namelist()}
    assert top == {"ampdebug", f"ampdebug-{ampdebug.__version__}.dist-info"}
    assert "ampdebug/py.typed" in wheel.namelist()
    page = {f"ampdebug/report/page/{file.name}" for file in (ROOT / "ampdebug/report/page").iterdir()}
    assert {Path(name).suffix for name in page} == {".html", ".css", ".js"}
    assert page <= set(wheel.namelist())
    assert not [name for name in wheel.namelist() if name.endswith((".pyc", ".sqlite"))]


def test_its_metadata(wheel: zipfile.ZipFile) -> None:
    info = f"ampdebug-{ampdebug.__version__}.dist-info"
    metadata = HeaderParser().parsestr(wheel.read(f"{info}/METADATA").decode())
    core = [line for line in metadata.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert sorted(re.split("[<>=]", line)[0] for line in core) == ["mindspore", "numpy", "tabulate", "tensorboardX"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata["Requires-Python"].split(",")) == {">=3.10", "<3.13"}
    assert "ampdebug = ampdebug._cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    licence = wheel.read(f"{info}/licenses/LICENSE").decode()
    assert "Apache License" in licence
    assert "END OF TERMS AND CONDITIONS" in licence
