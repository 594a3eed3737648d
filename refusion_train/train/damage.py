"""Words about blocks that were left out (`data.on_error: skip`)."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from refusion_train.data.streams import Damage

logger = logging.getLogger(__name__)

_WARNINGS_AT_ONCE = 5


def warn_of_damage(damage: Sequence[Damage], where: str) -> None:
    """One line for each block, but not hundreds when a whole shard has gone."""
    for entry in damage[:_WARNINGS_AT_ONCE]:
        logger.warning(
            "%s: left out %s documents, %s tokens: %s", where, f"{entry.documents:,}", f"{entry.tokens:,}", entry.reason
        )
    rest = damage[_WARNINGS_AT_ONCE:]
    if rest:
        tokens = sum(entry.tokens for entry in rest)
        logger.warning("%s: left out %d more blocks with %s tokens", where, len(rest), f"{tokens:,}")
