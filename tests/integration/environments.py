"""Environments for tests that must not see this project's packages, or need what it does not: made once, then kept.

They lie below the environment that runs the tests. Packages are links to those installed here, except what is asked for
in another version, or is not here: that is installed by pip, and a test is skipped where it cannot be.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path

import pytest
from packaging.requirements import Requirement

CACHE = Path(sys.prefix) / "share" / "refusion-tests"


def environment(name: str, linked: list[str], installed: list[str], without: tuple[str, ...] = ()) -> Path:
    """Python of environment `name` with the packages `linked` (and what they require) and the requirements `installed`.

    without: packages that are required by linked ones, but not to be linked.
    """
    folder, python = CACHE / name, CACHE / name / "bin" / "python"
    if python.exists():
        return python
    aside = CACHE / f"{name}.{os.getpid()}"
    shutil.rmtree(aside, ignore_errors=True)
    venv.create(aside, with_pip=False)
    found = {key: one for key, one in _closure(linked).items() if key not in without}
    _link(found.values(), next(aside.glob("lib/python*/site-packages")))
    if installed:
        # pip must not replace what is only linked: removing it would remove it here.
        pins = aside / "constraints.txt"
        pins.write_text("".join(f"{key}=={one.version}\n" for key, one in sorted(found.items())), encoding="utf-8")
        pip = [sys.executable, "-m", "pip", "--python", str(aside / "bin" / "python"), "install", "--quiet"]
        done = subprocess.run([*pip, "-c", str(pins), *installed], capture_output=True, text=True, timeout=600)
        if done.returncode:
            shutil.rmtree(aside)
            pytest.skip(f"{', '.join(installed)} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    os.rename(aside, folder)
    return python


def _closure(names: list[str]) -> dict[str, importlib.metadata.Distribution]:
    """Installed distributions of these names and of everything that they require, by normal name."""
    found: dict[str, importlib.metadata.Distribution] = {}
    names = list(names)
    while names:
        name = re.sub(r"[-_.]+", "-", names.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        for text in found[name].requires or []:
            required = Requirement(text)
            if required.marker is None or required.marker.evaluate({"extra": ""}):
                names.append(required.name)
    return found


def _link(distributions: Iterable[importlib.metadata.Distribution], site: Path) -> None:
    for distribution in distributions:
        for top in {file.parts[0] for file in distribution.files or [] if not file.parts[0].startswith("..")}:
            source = Path(str(distribution.locate_file(top)))
            if source.exists() and top != "__pycache__" and not (site / top).exists():
                (site / top).symlink_to(source)
