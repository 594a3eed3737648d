"""Telling an error that another rank has caused, by dying, from one of this rank's own."""

from __future__ import annotations

import torch.distributed as dist

# What is said when the group has lost a rank: by gloo, by NCCL, by the store through which ranks meet.
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "socket closed", "timed out waiting",
    "remote process exited", "nccl", "failed to recv", "connection refused",
)  # fmt: skip


def rank_lost(error: BaseException) -> bool:
    """Whether `error` says that another rank of the group has gone."""
    text = str(error).lower()
    return isinstance(error, (RuntimeError, dist.DistError)) and any(words in text for words in _LOST)
