"""Pictures read ahead of the model by threads, a bounded number and size at a time. Knows streams and threads only."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from kvcli.jobs import Job, Stray
from kvcli.reading import Ready

PATIENCE = 0.5
"""Seconds that a picture waits for company from a slow stream of jobs."""


class Ahead:
    """Takes jobs from their stream and has them read by threads, ahead of the model.

    A thread of its own waits for the stream, which may be a pipe that stays open for hours. It stops while `depth`
    items, or pictures of `limit` bytes, are here or with the caller, who says of each when it is let go. The picture
    that crosses the limit is still read, so that one which is larger than all of it has its turn.
    """

    def __init__(
        self, jobs: Iterable[Job | Stray], reader: Callable[[Job, int], Ready], workers: int, depth: int, limit: int
    ) -> None:
        self._jobs, self._reader, self._workers = iter(jobs), reader, workers
        self._depth, self._limit = depth, max(1, limit)
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="kvcli-read")
        self._changed = threading.Condition()  # guards all that follows
        self._queue: deque[Future[Ready] | Stray] = deque()
        self._taken = self._unread = self._lent = 0
        self._bytes = self._largest = 0
        self._patience = PATIENCE
        self._error: BaseException | None = None
        self._ended = self._closed = False
        threading.Thread(target=self._feed, name="kvcli-feed", daemon=True).start()

    @property
    def empty(self) -> bool:
        """Whether nothing is left to take."""
        with self._changed:
            return self._ended and not self._queue

    @property
    def reading(self) -> bool:
        """Whether the next item is on its way and needs no more of the stream."""
        with self._changed:
            return bool(self._queue)

    def take(self) -> Ready | Stray | None:
        """The next item in the order of the jobs, to be let go later. None if none came within PATIENCE, or none can
        come: at the end, or before others are let go."""
        with self._changed:
            if not self._lent:
                self._patience = PATIENCE
            if not self._queue:
                start = time.monotonic()
                self._changed.wait_for(lambda: self._queue or self._ended or not self._has_room(), self._patience)
                self._patience -= time.monotonic() - start
            if not self._queue:
                return None
            head = self._queue[0]
            if not isinstance(head, Stray) and not self._changed.wait_for(head.done, PATIENCE):
                return None
            self._queue.popleft()
            self._lent += 1
            return head if isinstance(head, Stray) else head.result()

    def let_go(self, item: Ready | Stray) -> None:
        """An item that was taken is over: others may be read in its place."""
        with self._changed:
            self._lent -= 1
            if isinstance(item, Ready) and item.prepared is not None:
                self._bytes -= item.nbytes
                self._patience = PATIENCE
            self._changed.notify_all()

    def raise_error(self) -> None:
        """Raise what ended the stream of jobs, if that was an error."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Forget what has not been read yet. A thread that waits for the stream is left to itself."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _has_room(self) -> bool:
        # One more than there are threads is on its way, so that none has to wait for the stream.
        expected = self._bytes + self._unread * self._largest
        here = len(self._queue) + self._lent
        return here < self._depth and self._unread <= self._workers and expected < self._limit

    def _feed(self) -> None:
        try:
            while self._wait_for_room():
                self._add(next(self._jobs))
        except StopIteration:
            pass
        except BaseException as error:  # whatever it is, nobody else would hear of it in this thread
            self._error = error
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _wait_for_room(self) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self._closed or self._has_room())
            return not self._closed

    def _add(self, item: Job | Stray) -> None:
        with self._changed:
            if not self._closed:
                self._queue.append(item if isinstance(item, Stray) else self._submit(item))
                self._changed.notify_all()

    def _submit(self, job: Job) -> Future[Ready]:
        future = self._pool.submit(self._reader, job, self._taken)
        self._taken += 1
        self._unread += 1
        future.add_done_callback(self._was_read)
        return future

    def _was_read(self, future: Future[Ready]) -> None:
        if future.cancelled():
            return
        with self._changed:
            size = future.result().nbytes
            self._unread -= 1
            self._bytes += size
            self._largest = max(self._largest, size)
            self._changed.notify_all()
