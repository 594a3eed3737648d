"""For tests of batch scripts: golden files, texts that try to become commands, and programs that stand for Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
CLUSTERS: dict[str, dict[str, Any]] = {
    "plain": {"nodes": 2, "ranks_per_node": 2, "gpus_per_node": 0, "time": "01:00:00", "python": "/opt/python"},
    "all": {
        "nodes": 16, "ranks_per_node": 8, "gpu_type": "h100", "cpus_per_rank": 12, "memory": "0", "time": "2-00:00:00",
        "partition": "train", "account": "lab", "qos": "high", "constraint": "ib&h100", "reservation": "week",
        "exclusive": True, "stop_before": 600, "max_stalls": 5, "modules": ["cuda/12.8"], "venv": "/shared/my env",
        "setup": ["ulimit -l unlimited"], "environment": {"NCCL_DEBUG": "WARN", "NOTE": "it's"},
        "sbatch": ["--mail-type=END"], "srun": ["--cpu-bind=none"], "master_addr": "10.0.0.1",
    },
    "container": {
        "nodes": 4, "launch": "torchrun", "container_image": "/images/train.sqsh",
        "container_mounts": ["/data:/data", "/runs"],
    },
}  # fmt: skip


def execute(words: list[str], folder: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    environment = {"PATH": os.environ["PATH"], **variables}
    return subprocess.run(words, cwd=folder, env=environment, capture_output=True, timeout=30, check=False)


def assert_golden(script: str, name: str) -> None:
    """Look at what has changed, then write it anew: REFUSION_GOLDEN=1 pytest tests/unit/launchers"""
    if os.environ.get("REFUSION_GOLDEN"):
        (GOLDEN / name).write_text(script)
    assert script == (GOLDEN / name).read_text()


# Stands for Slurm and for the ranks' interpreter: leaves its arguments and its environment, and what it was given.
_FAKES = {
    "srun": """#!/bin/sh
        while [ "${1#--}" != "$1" ]; do shift; done
        SLURM_PROCID=3 SLURM_LOCALID=1 SLURM_NTASKS=4 exec "$@"
    """,
    "scontrol": "#!/bin/sh\necho node7\n",
    "squeue": "#!/bin/sh\n",
}


def fakes_in(folder: Path) -> Path:
    """A folder for PATH, and in it `python`, which writes down how it was called."""
    folder.mkdir()
    recorder = folder / "python"
    recorder.write_text(
        '#!/bin/sh\nplace="${RANK:--} ${LOCAL_RANK:--} ${WORLD_SIZE:--} $MASTER_ADDR"\n'
        f'printf \'%s\\0\' "$#" "$place" "$NOTE" "$PWD" "$@" >>\'{folder}/calls\'\n'
    )
    for name, text in _FAKES.items():
        (folder / name).write_text(text)
    for file in folder.iterdir():
        file.chmod(0o755)
    return folder


_PIECES = [
    "$(touch x)", "`touch x`", "; touch x;", "\n touch x\n", "&touch x&", "|touch x", "$HOME", "${PATH}", "'", '"',
    "\\", "\n", " ", "\t", "*", "?", "~", "#", "%j", "!", "<", ">x", "{a,b}", "[a]", "(", ")", "=", "-", "^",
    "\x80", "\udcff",
]  # fmt: skip
NASTY = st.lists(
    st.one_of(st.sampled_from(_PIECES), st.sampled_from(_PIECES), st.text(max_size=3)), min_size=1, max_size=6
).map(lambda pieces: "".join(pieces).replace("\0", "").replace("/", "") or "x")


def calls_of(fakes: Path) -> list[list[bytes]]:
    """How `python` was called: place, NOTE, folder, arguments."""
    told, calls = (fakes / "calls").read_bytes().split(b"\0")[:-1], []
    while told:
        size = 4 + int(told[0])
        calls.append(told[1:size])
        told = told[size:]
    return calls
