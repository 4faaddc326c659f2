"""Leaves a failing server alone: after some failures in a row it is down for a while, then one call may try again.

The while doubles with each failed try, up to a bound. Pure but for its lock; the clock comes in.
Invariant: while it is down, at most one call is let through per back-off.
"""

from __future__ import annotations

import threading


class Breaker:
    """`failures` in a row open it, for `backoff_s`, doubled up to `max_backoff_s`."""

    def __init__(self, failures: int = 3, backoff_s: float = 1.0, max_backoff_s: float = 30.0) -> None:
        self._allowed, self._first_s, self._max_s = failures, backoff_s, max_backoff_s
        self._lock = threading.Lock()
        self._failed = 0
        self._until_s: float | None = None
        self._wait_s = backoff_s
        self._trying = False
        self.opened = 0
        """How often it went from up to down."""
        self.reason = ""

    def allows(self, now_s: float) -> bool:
        """Whether to call. After a back-off the first one to ask may, the others wait for what comes of it."""
        with self._lock:
            if self._until_s is None:
                return True
            if now_s < self._until_s:
                return False
            self._until_s = now_s + self._wait_s
            self._trying = True
            return True

    def succeeded(self) -> None:
        with self._lock:
            self._failed, self._until_s, self._wait_s, self.reason = 0, None, self._first_s, ""
            self._trying = False

    def failed(self, now_s: float, reason: str) -> None:
        with self._lock:
            self._failed += 1
            self.reason = reason
            if self._until_s is not None:
                if self._trying:  # calls that were under way when it opened say nothing new
                    self._trying = False
                    self._wait_s = min(2 * self._wait_s, self._max_s)
                    self._until_s = now_s + self._wait_s
            elif self._failed >= self._allowed:
                self.opened += 1
                self._until_s = now_s + self._wait_s

    @property
    def up(self) -> bool:
        with self._lock:
            return self._until_s is None

    def state(self) -> str:
        """ "up", or why it is down."""
        with self._lock:
            return "up" if self._until_s is None else f"down: {self.reason}"
