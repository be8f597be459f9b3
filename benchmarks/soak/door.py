"""The one place that knows how an engine is called: `submit` from any thread, `close` at the end.

An engine without `submit` is driven by a thread of `Pump`, which is enough to try the load out; what such an engine
loses when a part raises, it loses here too.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

from blockdraft import Completion, Engine, SamplingParams
from blockdraft.errors import BlockdraftError


def open_door(engine: Engine) -> Any:
    """Something with `submit(prompt, params)`, whose handles know `result(timeout)` and `cancel()`, and `close()`."""
    return engine if hasattr(engine, "submit") else Pump(engine)


def outcome(handle: Any, seconds: float) -> Completion | None:
    """The completion; None where the request ended in an error. Raises TimeoutError where it does not end."""
    try:
        completion: Completion = handle.result(seconds)
    except BlockdraftError:
        return None
    return None if completion.finish_reason == "error" else completion


def planned_bytes(engine: Any, door: Any) -> int:
    """What the engine itself says that it takes at most."""
    if isinstance(door, Pump):
        return door.planned
    own = engine.memory_bytes
    return int(own() if callable(own) else own)


class PumpedHandle:
    def __init__(self, prompt: list[int], params: SamplingParams) -> None:
        self.prompt, self.params = prompt, params
        self.request: Any = None
        self.error: Exception | None = None
        self.cancelled, self.ended = False, threading.Event()

    def cancel(self) -> None:
        self.cancelled = True
        if self.request is not None:
            self.request.cancel()

    def result(self, timeout: float | None = None) -> Completion:
        if not self.ended.wait(timeout):
            raise TimeoutError(f"no answer in {timeout} seconds")
        if self.error is not None:
            raise BlockdraftError(str(self.error)) from self.error
        completion: Completion = self.request.completion()
        return completion


class Pump:
    """Runs a `Scheduler` in a thread of its own."""

    def __init__(self, engine: Engine) -> None:
        from blockdraft.engine import Scheduler

        self._engine, self._new_scheduler = engine, lambda: Scheduler(engine)
        self._asked: queue.SimpleQueue[PumpedHandle] = queue.SimpleQueue()
        self._closing, self.planned = False, 0
        self._thread = threading.Thread(target=self._run, name="pump")
        self._thread.start()

    def submit(self, prompt: list[int], params: SamplingParams) -> PumpedHandle:
        handle = PumpedHandle(prompt, params)
        self._asked.put(handle)
        return handle

    def close(self) -> None:
        self._closing = True
        self._thread.join()

    def _run(self) -> None:
        scheduler, open_ones = self._new_scheduler(), list[PumpedHandle]()
        while not self._closing or open_ones or not self._asked.empty():
            try:
                while True:
                    handle = self._asked.get(timeout=0 if open_ones else 0.01)
                    handle.request = scheduler.submit(handle.prompt, handle.params)
                    if handle.cancelled:
                        handle.request.cancel()
                    open_ones.append(handle)
            except queue.Empty:
                pass
            if not open_ones:
                continue
            try:
                scheduler.step()
                running = scheduler.running
                self.planned = max(self.planned, self._engine.memory_bytes(running) if running else 0)
            except Exception as error:
                for handle in open_ones:
                    handle.error = error
                    handle.ended.set()
                scheduler, open_ones = self._new_scheduler(), []
            for handle in [handle for handle in open_ones if handle.request.finish_reason is not None]:
                open_ones.remove(handle)
                handle.ended.set()
