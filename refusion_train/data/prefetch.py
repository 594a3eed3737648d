"""Work done ahead in background threads, delivered in order.

An item is made in two stages: `take` is cheap and must run one at a time in order (it advances the streams), `work` is
dear and may run for several items at once (it corrupts rows, in code that releases the GIL). So the result depends on
neither the number of threads nor their timing. Threads instead of processes: handing batches between processes costs
more than making them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, Generic, TypeVar

_PATIENCE = 10.0  # seconds; a thread that hangs in a read of a lost disk must not hang the program: it dies with it

Taken = TypeVar("Taken")
Made = TypeVar("Made")


class Prefetcher(Generic[Taken, Made]):
    """An endless iterator over work(take()), up to `depth` items ahead of the consumer.

    workers: threads; 0: everything happens in the consumer's thread when it asks. An exception in a thread is raised
    in the consumer's thread in place of the item that failed; that ends the iterator. The threads start with the first
    item that is asked for, and end with `close`, with the iterator itself, or with the process.

    Neither `take` nor `work` may hold a reference to the owner of the iterator, or the owner is never collected.
    """

    def __init__(self, take: Callable[[], Taken], work: Callable[[Taken], Made], workers: int, depth: int) -> None:
        self._shared = _Shared(take, work, max(depth, 1))
        self._threads = [
            threading.Thread(target=_serve, args=(self._shared,), name=f"data-{i}", daemon=True) for i in range(workers)
        ]
        self._started = False
        weakref.finalize(self, self._shared.stop)

    def __iter__(self) -> Prefetcher[Taken, Made]:
        return self

    def __next__(self) -> Made:
        if self._shared.stopped:
            raise StopIteration
        if not self._threads:
            return self._make_here()
        if not self._started:
            self._started = True
            for thread in self._threads:
                thread.start()
        return self._shared.deliver()

    def close(self) -> None:
        """End the threads; what they had prepared is dropped. Waits for the item in the making, not for the queue."""
        self._shared.stop()
        if self._started:
            for thread in self._threads:
                thread.join(_PATIENCE)

    def _make_here(self) -> Made:
        try:
            return self._shared.work(self._shared.take())
        except BaseException:
            self._shared.stop()  # as with threads: after a failure the streams are in no state to go on
            raise


class _Shared:
    """What the consumer and the threads share. Every field below `changed` is read and written under it."""

    def __init__(self, take: Callable[[], Any], work: Callable[[Any], Any], depth: int) -> None:
        self.take = take
        self.work = work
        self.depth = depth
        self.changed = threading.Condition()
        self.stopped = False
        self.taking = False
        self.taken = 0  # items begun; also the number of the next one
        self.delivered = 0
        self.ready: dict[int, tuple[Any, BaseException | None]] = {}

    def stop(self) -> None:
        with self.changed:
            self.stopped = True
            self.ready.clear()
            self.changed.notify_all()

    def claim(self) -> int | None:
        """Wait until the next item may be taken, and reserve the taking of it. None: the end."""
        with self.changed:
            self.changed.wait_for(
                lambda: self.stopped or (not self.taking and self.taken < self.delivered + self.depth)
            )
            if self.stopped:
                return None
            self.taking = True
            return self.taken

    def release(self) -> None:
        """Let another thread take the next item."""
        with self.changed:
            self.taking = False
            self.taken += 1
            self.changed.notify_all()

    def publish(self, number: int, made: Any, error: BaseException | None = None) -> None:
        with self.changed:
            if not self.stopped:
                self.ready[number] = (made, error)
                self.changed.notify_all()

    def deliver(self) -> Any:
        """Wait for the next item in order and hand it out, or raise what happened to it."""
        with self.changed:
            self.changed.wait_for(lambda: self.stopped or self.delivered in self.ready)
            if self.stopped:
                raise StopIteration
            made, error = self.ready.pop(self.delivered)
            self.delivered += 1
            self.changed.notify_all()
        if error is not None:
            self.stop()
            raise error
        return made


def _serve(shared: _Shared) -> None:
    """A thread: take an item, let go of the streams, make it, publish it."""
    while (number := shared.claim()) is not None:
        try:
            taken = shared.take()
        except BaseException as error:
            # The taking stays reserved: after a failure the streams are in no state to go on.
            shared.publish(number, None, error)
            return
        shared.release()
        try:
            made = shared.work(taken)
        except BaseException as error:
            shared.publish(number, None, error)
            return
        shared.publish(number, made)
