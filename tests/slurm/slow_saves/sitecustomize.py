"""Put on PYTHONPATH by a test: the last rename of a checkpoint takes a while, so that something can come between."""

import os
import time

_rename = os.rename


def _slow(source, target, **options):  # type: ignore[no-untyped-def]
    if os.path.basename(str(target)).startswith("step-") and str(source).endswith(".tmp"):
        time.sleep(2.0)
    _rename(source, target, **options)


os.rename = _slow
