"""The thread that decodes, one for all engines of a target."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from weakref import WeakKeyDictionary

from blockdraft.engine.request import Request
from blockdraft.engine.scheduler import Scheduler
from blockdraft.targets import Target

NAME = "blockdraft"
IDLE_SECONDS = 1.0  # without requests before the worker exits
JOIN_SECONDS = 0.01  # between two checks whether the thread must still exit

log = logging.getLogger(__name__)


class Worker:
    """Steps the schedulers of a target's engines interleaved, in a thread that exits after a while without requests.

    Args:
        target: Its lock is held during a step.
    """

    def __init__(self, target: Target) -> None:
        self._target_lock = target.lock
        self._lock = threading.Condition()
        self._leaves = False  # exit as soon as there are no requests
        self._schedulers: list[Scheduler] = []  # those with requests
        self.thread: threading.Thread | None = None

    def begin(self, scheduler: Scheduler, requests: Sequence[Request]) -> None:
        """Queue requests with a scheduler, and make sure that the thread runs."""
        with self._lock:
            self._leaves = False
            scheduler.add(requests)
            if scheduler not in self._schedulers:
                self._schedulers.append(scheduler)
            if self.thread is None or not self.thread.is_alive():
                # A daemon, so that a process that exits does not wait for all answers.
                self.thread = threading.Thread(target=self._work, name=NAME, daemon=True)
                self.thread.start()
            else:
                self._lock.notify()

    def join(self) -> None:
        """Wait for the thread to exit, unless it is the caller or has requests."""
        with self._lock:
            thread, busy = self.thread, any(not scheduler.idle for scheduler in self._schedulers)
            if thread is None or thread is threading.current_thread() or busy:
                return
            self._leaves = True
            self._lock.notify()
        while self._leaves and thread.is_alive():  # another engine may bring requests meanwhile
            thread.join(JOIN_SECONDS)
        if self.thread is not thread:
            thread.join()

    def end(self) -> None:
        """Cancel the requests of all engines, and wait for the thread to exit."""
        with self._lock:
            thread, self._leaves = self.thread, self.thread is not None
            for scheduler in self._schedulers:
                scheduler.cancel()
            self._lock.notify()
        if thread is not None:
            thread.join()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Wait for the end of the running step, and block further steps."""
        with self._target_lock, self._lock:
            yield

    def leave_to_parent(self) -> None:
        """Cancel all requests in a forked process, which has no worker thread.

        They go on in the parent. Listeners are not called.
        """
        self.thread = None
        for scheduler in self._schedulers:
            for request in scheduler.cancel():
                request.listener = None
                request.finish("cancelled")
                request.publish()

    def _busy(self) -> bool:
        """Forget schedulers without requests, and return whether any are left."""
        self._schedulers = [scheduler for scheduler in self._schedulers if not scheduler.idle]
        return bool(self._schedulers)

    def _due(self) -> list[Scheduler]:
        """Wait for requests, and return the schedulers that have some, or none if the thread must exit."""
        busy = self._schedulers
        if len(busy) == 1 and not busy[0].idle:  # the usual case needs no lock
            return busy
        with self._lock:
            self._lock.wait_for(lambda: self._busy() or self._leaves, IDLE_SECONDS)
            if not self._schedulers:
                self.thread, self._leaves = None, False
            return list(self._schedulers)

    def _work(self) -> None:
        while schedulers := self._due():
            for scheduler in schedulers:
                try:
                    with self._target_lock:
                        scheduler.step()
                except BaseException:  # a bug of ours; the scheduler has ended its requests
                    log.exception("A step failed.")


_workers: WeakKeyDictionary[Target, Worker] = WeakKeyDictionary()
_lock = threading.Lock()
_fork_locks = ExitStack()  # while the process is forked


def worker_of(target: Target) -> Worker:
    """Return the worker of a target."""
    with _lock:
        if target not in _workers:
            _workers[target] = Worker(target)
        return _workers[target]


def _before_fork() -> None:
    """Let the running step end before a fork, since no thread of the child would end it or release its locks."""
    _fork_locks.enter_context(_lock)
    for worker in _workers.values():
        _fork_locks.enter_context(worker.paused())


def _after_fork_in_child() -> None:
    _fork_locks.close()
    for worker in _workers.values():
        worker.leave_to_parent()


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(before=_before_fork, after_in_parent=_fork_locks.close, after_in_child=_after_fork_in_child)


def end_all() -> None:
    """End all workers before the process exits, since a thread inside a forward would crash."""
    for worker in list(_workers.values()):
        worker.end()
