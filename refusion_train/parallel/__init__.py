"""Parallelism as a wrapping around the model: process groups, the schedule and the sharded optimizer."""

import warnings

# megatron-core says so once per module on import; the fallbacks are what this package is tested with.
warnings.filterwarnings("ignore", message="(Transformer Engine and )?Apex (is|are) not installed")
