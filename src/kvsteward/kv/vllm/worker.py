"""What the worker's connector does in a step, and what it says of it.

A fault of ours must not reach the engine, and must not leave wrong KV behind: what could not be loaded is reported as
bad blocks, which vLLM computes, and nothing is saved until the scheduler has heard of it.

Knows copies and moves, nothing of vLLM. Invariant: each numbered step is reported exactly once, as done or as failed.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from kvsteward.kv.vllm.copies import Copies, Place
from kvsteward.kv.vllm.loads import Moves

log = logging.getLogger("vllm.kvsteward")


@dataclass(slots=True)
class Report:
    """Steps that workers have done, and those that failed; each with how many workers say so."""

    done: dict[int, int] = field(default_factory=dict)
    failed: dict[int, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.done or self.failed)

    def add(self, other: Report) -> None:
        for mine, theirs in ((self.done, other.done), (self.failed, other.failed)):
            for number, ranks in theirs.items():
                mine[number] = mine.get(number, 0) + ranks


class Worker:
    def __init__(self, copies: Copies) -> None:
        self.copies = copies
        self._report = Report()
        self._bad: set[int] = set()
        self._failed = 0
        """The newest step that failed here."""

    def before(self, moves: Moves, place: Place | None) -> None:
        """Before the step writes anything: blocks that were freed since the last one."""
        try:
            if place is not None:
                self.copies.attach(place)
            if moves.late and self._may_save(moves):
                self.copies.save(moves.late)
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine goes on; `_fail` tells
            self._fail(moves, error)

    def load(self, moves: Moves) -> None:
        """Before the forward."""
        if moves.bad:
            self._bad.update(moves.bad)
            self._failed = max(self._failed, moves.number)
        if not moves.loads:
            return
        try:
            self.copies.load(moves.loads)
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine goes on; `_fail` tells
            self._bad.update(block for _, block in moves.loads)
            self._fail(moves, error)

    def save(self, moves: Moves) -> None:
        """After the forward; ends the step."""
        if not moves.number:
            return
        try:
            if moves.saves and self._may_save(moves):
                self.copies.save(moves.saves)
        except Exception as error:  # noqa: BLE001  # whatever it is, the engine goes on; `_fail` tells
            self._fail(moves, error)
        kind = self._report.done if self._may_save(moves) else self._report.failed
        kind[moves.number] = kind.get(moves.number, 0) + 1

    def report(self) -> Report | None:
        report, self._report = self._report, Report()
        return report if report else None

    def bad(self) -> set[int]:
        bad, self._bad = self._bad, set()
        return bad

    def _may_save(self, moves: Moves) -> bool:
        return self._failed <= moves.seen

    def _fail(self, moves: Moves, error: Exception) -> None:
        if self._failed <= moves.seen:
            log.error("kvsteward: KV could not be copied; the blocks are computed instead", exc_info=error)
        self._failed = max(self._failed, moves.number)
