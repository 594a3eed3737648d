"""The few exceptions a user sees: one clear line each, and the exit code that goes with it.

Everything that is the user's to mend is raised as a `RefusionError`; the command line prints its
text as one line and exits with `exit_code`. Any other exception is a bug of ours and keeps its traceback.
"""

from __future__ import annotations


class RefusionError(Exception):
    """Base of all errors shown to a user without a traceback. The text says what, where and the remedy."""

    exit_code = 1


class ConfigError(RefusionError, ValueError):
    """A wrong usage or configuration: names the key, the value and what to change."""

    exit_code = 2


class DataError(RefusionError):
    """A corpus, shard, index or tokenizer that cannot be used: names the file and the place in it."""


class CheckpointError(RefusionError):
    """A checkpoint that cannot be written or read: names the folder and file."""


class TrainingError(RefusionError):
    """Training cannot go on (non-finite losses, a lost rank): names the step."""
