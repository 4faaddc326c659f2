"""One file for each root cause; `CHECKS` lists them in the order in which a person should read them.

To add one: write a file with a `CHECK`, add it here, and give it a positive, a negative and an unknown case in
`tests/lab/test_doctor_checks.py`.
"""

from __future__ import annotations

from kvsteward.lab.doctor.checks import (
    abandoned,
    allocator,
    card,
    chunked,
    context_limit,
    fragmentation,
    hybrid,
    idle_prefixes,
    kv_format,
    long_prompt,
    offload,
    preemption,
    prefix_broken,
    prefix_off,
    prefix_thrash,
    queue,
    ranks,
    replicated,
    saturated,
    state_pages,
)
from kvsteward.lab.doctor.finding import Check

CHECKS: tuple[Check, ...] = (
    preemption.CHECK,
    abandoned.CHECK,
    prefix_off.CHECK,
    prefix_broken.CHECK,
    prefix_thrash.CHECK,
    hybrid.CHECK,
    queue.CHECK,
    state_pages.CHECK,
    saturated.CHECK,
    kv_format.CHECK,
    idle_prefixes.CHECK,
    long_prompt.CHECK,
    chunked.CHECK,
    context_limit.CHECK,
    fragmentation.CHECK,
    replicated.CHECK,
    ranks.CHECK,
    card.CHECK,
    allocator.CHECK,
    offload.CHECK,
)
