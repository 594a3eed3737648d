"""The pages under docs/ are true: their commands run, one page after the other, in one folder, as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = ("data", "training", "layouts", "slurm", "planning", "huggingface", "decoding")
BLOCK = re.compile(r"^```(bash|python)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def _corpus(folder: Path) -> None:
    """A few hundred short documents in two of the formats that the data page names."""
    folder.mkdir()
    words = ["slot", "token", "mask", "row", "shard", "stream", "rank", "stage", "cursor", "document"]
    for number in range(30):
        (folder / f"{number}.txt").write_text(" ".join(words[(number + i * i) % 10] for i in range(60)) + "\n")
    lines = [
        f'{{"text": "def f{i}(x):\\n    return x * {i} + {words[i % 10]!r}.count(str(x))\\n"}}' for i in range(300)
    ]
    (folder / "more.jsonl").write_text("\n".join(lines).replace("'", "\\u0027") + "\n")


@pytest.mark.slow
def test_commands_of_the_pages_run(tmp_path: Path) -> None:
    _corpus(tmp_path / "corpus")
    environment = dict(os.environ, PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}", HF_HUB_OFFLINE="1")
    environment["HF_MODULES_CACHE"] = str(tmp_path / "hf-modules")
    ran = 0
    for page in PAGES:
        for language, code in BLOCK.findall((ROOT / "docs" / f"{page}.md").read_text()):
            command = ["bash", "-euo", "pipefail", "-c", code] if language == "bash" else [sys.executable, "-c", code]
            result = subprocess.run(
                command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
            )
            assert result.returncode == 0, f"docs/{page}.md: {code}\n{result.stdout[-2000:]}\n{result.stderr[-4000:]}"
            assert "Traceback" not in result.stderr
            ran += 1
    assert ran >= 8, "the pages have lost their commands"
