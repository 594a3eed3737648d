"""Compiling the kernels, keeping the machine code for the next process, and calling them.

The first process on a machine compiles a kernel in two or three seconds; numba keeps the result beside kernels.py, in
the user's cache folder where that is read-only, or in NUMBA_CACHE_DIR. Where none can be written, every process
compiles for itself. Ranks that start together take turns on a lock file, so that one compiles and the others load.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numba
import numpy as np
from numba import types

from refusion_train.objective import kernels
from refusion_train.objective.batch import Batch, PackedDocuments

_I64, _U64, _F64, _F32 = types.int64[::1], types.uint64[::1], types.float64[::1], types.float32[::1]
_U8, _I32 = types.uint8[::1], types.int32[::1]
_DOCUMENTS = (_I32, types.uint64, _U64, _U64, _U64, _U64)
_NOISE = (_F64, _F32, _U8)
_BATCH = (_I64, _I64, _I64, _I32, _F32, _U8, _U8, types.float64[:, ::1])
_SLOT_ROOM = (_U64, _U64, _U64, _U64)
# One signature each: the machine code in the cache never depends on who called first.
_SIGNATURES = {
    "corrupt_slots": (
        *_DOCUMENTS, _U64, *_NOISE, types.float64, types.boolean, types.int64, *_SLOT_ROOM, *_BATCH,
    ),
    "corrupt_ar": (*_DOCUMENTS, *_BATCH),
    "corrupt_mdm": (*_DOCUMENTS, *_NOISE, types.int64, *_BATCH),
}  # fmt: skip

_loaded: dict[str, Callable[..., None]] = {}
_loading = threading.Lock()


def corrupt_slots(
    batch: Batch, packed: PackedDocuments, sizes: np.ndarray, p: np.ndarray, weights: np.ndarray, buckets: np.ndarray,
    *, partial: float, cross_slot_targets: bool, mask_id: int,
) -> None:  # fmt: skip
    """The slot objective; padding is not written. sizes: int64 [n]; p, weights, buckets: of masked targets, [n]."""
    assert packed.tokens.shape[1] < 1 << kernels.SLOT_BITS, "rows are too long for the sort keys of slots"
    room = int((packed.lengths // sizes).max(initial=0)) + 2
    space = np.empty((4, room), np.uint64)
    kernel("corrupt_slots")(
        *_documents(packed), sizes.view(np.uint64), p, weights, buckets, partial, cross_slot_targets, mask_id,
        *space, *_outputs(batch),
    )  # fmt: skip


def corrupt_ar(batch: Batch, packed: PackedDocuments) -> None:
    """Next-token prediction; padding is not written."""
    kernel("corrupt_ar")(*_documents(packed), *_outputs(batch))


def corrupt_mdm(
    batch: Batch, packed: PackedDocuments, p: np.ndarray, weights: np.ndarray, buckets: np.ndarray, *, mask_id: int
) -> None:
    """Token-level masked diffusion; padding is not written."""
    kernel("corrupt_mdm")(*_documents(packed), p, weights, buckets, mask_id, *_outputs(batch))


def kernel(name: str) -> Callable[..., None]:
    """A kernel as machine code: from memory, from numba's cache, or compiled now."""
    if name not in _loaded:
        with _loading:
            if name not in _loaded:
                _loaded[name] = _load(name)
    return _loaded[name]


def renew() -> None:
    """Compile again what has been loaded, without the cache."""
    with _loading:
        for name in _loaded:
            _loaded[name] = _load(name, cache=False)


def _load(name: str, cache: bool = True) -> Callable[..., None]:
    function = getattr(kernels, name)
    try:
        dispatcher = numba.njit(cache=cache, nogil=True, error_model="numpy")(function)
        with _turn(dispatcher.stats.cache_path):
            dispatcher.compile(_SIGNATURES[name])
    except (RuntimeError, OSError):  # no folder to cache in (RuntimeError), or it cannot be read or written
        if not cache:
            raise
        return _load(name, cache=False)
    dispatcher.disable_compile()
    return dispatcher


@contextlib.contextmanager
def _turn(folder: str | None) -> Iterator[None]:
    """Wait for other processes that fill the same cache folder; without a lock where there can be none."""
    if folder is None:
        yield
        return
    try:
        import fcntl

        os.makedirs(folder, exist_ok=True)
        handle = open(os.path.join(folder, "refusion-kernels.lock"), "a")  # noqa: SIM115
        fcntl.flock(handle, fcntl.LOCK_EX)
    except (ImportError, OSError):
        yield
        return
    with handle:
        yield


def _documents(packed: PackedDocuments) -> tuple[Any, ...]:
    width = np.uint64(max(1, packed.tokens.shape[1]))
    columns = (packed.starts, packed.lengths, packed.prompts)
    unsigned = (np.ascontiguousarray(column).view(np.uint64) for column in columns)
    return (np.ascontiguousarray(packed.tokens).reshape(-1), width, *unsigned, np.ascontiguousarray(packed.keys))


def _outputs(batch: Batch) -> tuple[np.ndarray, ...]:
    fields = (
        batch.input_ids, batch.position_ids, batch.labels, batch.document_ids,
        batch.loss_weight, batch.target_kind, batch.noise_bucket,
    )  # fmt: skip
    return (*(field.reshape(-1) for field in fields), batch.counts)
