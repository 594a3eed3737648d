"""What is around the compiled kernels: choice of backend, the cache of machine code, several processes and threads."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import plain_objective
import pytest

from refusion_train.config import ObjectiveConfig
from refusion_train.errors import ConfigError
from refusion_train.objective import api, compiled, make_objective

MASK, PAD = 4, 0
PACKED = plain_objective.pack([(0, 0, 30, 2, 1), (0, 30, 20, 0, 2), (1, 0, 33, 0, 3)], 2, 50)


@pytest.fixture(autouse=True)
def _own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiled, "_loaded", dict(compiled._loaded))


def test_auto_is_compiled_where_numba_imports() -> None:
    assert make_objective(ObjectiveConfig(), MASK, PAD).backend == "numba"
    assert make_objective(ObjectiveConfig(), MASK, PAD, "numpy").backend == "numpy"


def test_without_numba(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "_cannot_compile", lambda: "does not import (no module)")
    assert make_objective(ObjectiveConfig(), MASK, PAD).backend == "numpy"
    with pytest.raises(ConfigError, match="backend=numba of the objective does not import"):
        make_objective(ObjectiveConfig(), MASK, PAD, "numba")


def test_numba_that_is_missing_or_switched_off_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    import numba.core.config

    assert api._cannot_compile() == ""
    monkeypatch.setattr(numba.core.config, "DISABLE_JIT", 1)
    assert "NUMBA_DISABLE_JIT" in api._cannot_compile()
    monkeypatch.setitem(sys.modules, "numba.core", None)
    assert "does not import" in api._cannot_compile()


def test_kernels_hold_no_gil() -> None:
    assert compiled.kernel("corrupt_slots").targetoptions["nogil"] is True  # type: ignore[attr-defined]


def _wrong(*arguments: np.ndarray) -> None:
    for array in arguments[-8:]:
        array.fill(1)


def test_stale_machine_code_is_compiled_anew() -> None:
    compiled._loaded["corrupt_ar"] = _wrong
    objective = make_objective(ObjectiveConfig(name="ar"), MASK, PAD, "numba")
    assert compiled._loaded["corrupt_ar"] is not _wrong
    assert objective.corrupt(PACKED).equals(make_objective(objective.config, MASK, PAD, "numpy").corrupt(PACKED))


def test_a_machine_on_which_the_bits_differ_uses_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled._loaded["corrupt_ar"] = _wrong
    monkeypatch.setattr(compiled, "renew", lambda: None)
    assert make_objective(ObjectiveConfig(name="ar"), MASK, PAD).backend == "numpy"
    with pytest.raises(ConfigError, match="gives other bits than numpy here; use backend=numpy"):
        make_objective(ObjectiveConfig(name="ar"), MASK, PAD, "numba")


def test_no_folder_for_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """numba refuses to decorate where neither the package, nor the user's cache folder can be written."""
    real, asked = compiled.numba.njit, []

    def njit(**options):
        asked.append(options["cache"])
        if options["cache"]:
            raise RuntimeError("cannot cache function 'corrupt_ar': no locator available for file")
        return real(**options)

    monkeypatch.setattr(compiled.numba, "njit", njit)
    compiled._loaded.clear()
    assert make_objective(ObjectiveConfig(name="ar"), MASK, PAD, "numba").corrupt(PACKED).counts.any()
    assert asked == [True, False]


def test_a_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a full disk: numba raises after it has compiled."""
    from numba.core.caching import IndexDataCacheFile

    def save(*_: object) -> None:
        raise OSError(28, "No space left on device")

    def load(*_: object) -> None:
        return None

    monkeypatch.setattr(IndexDataCacheFile, "save", save)
    monkeypatch.setattr(IndexDataCacheFile, "load", load)
    compiled._loaded.clear()
    assert make_objective(ObjectiveConfig(name="ar"), MASK, PAD, "numba").corrupt(PACKED).counts.any()


def test_processes_that_start_together_share_one_cache(tmp_path: Path) -> None:
    code = (
        "import zlib; from refusion_train.config import ObjectiveConfig as C; from refusion_train.objective import *\n"
        "import plain_objective as p; from refusion_train.objective import compiled\n"
        "o = make_objective(C(name='ar'), 4, 0, 'numba')\n"
        "b = o.corrupt(p.pack([(0, 0, 30, 2, 1)], 1, 50))\n"
        "k = compiled.kernel('corrupt_ar').stats\n"
        "print(zlib.crc32(b.labels), sum(k.cache_hits.values()), sum(k.cache_misses.values()))"
    )
    paths = os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[3])])
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path), "PYTHONPATH": paths}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=300)[0].split() for process in processes]
    assert all(process.returncode == 0 for process in processes)
    assert outputs[0][0] == outputs[1][0]
    assert sorted(output[1:] for output in outputs) == [["0", "1"], ["1", "0"]], "one compiles, the other loads"


def test_threads_share_an_objective() -> None:
    packed = plain_objective.pack([(row, 0, 900, 3, row) for row in range(16)], 16, 900)
    objective = make_objective(ObjectiveConfig(partial_slot_probability=0.2), MASK, PAD, "numba")
    wanted = objective.corrupt(packed)
    results: list[bool] = []

    def work() -> None:
        results.extend(objective.corrupt(packed).equals(wanted) for _ in range(20))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 80
