"""From a model, GPUs and a workload to settings that start, each number explained, and a ladder of what to change."""

from __future__ import annotations

from kvsteward.ledger.plan.ladder import Step
from kvsteward.ledger.plan.overhead import Calibration, Interval, Overhead, calibrate
from kvsteward.ledger.plan.planner import Plan, make_plan
from kvsteward.ledger.plan.workload import Turn, Workload

__all__ = ["Calibration", "Interval", "Overhead", "Plan", "Step", "Turn", "Workload", "calibrate", "make_plan"]
