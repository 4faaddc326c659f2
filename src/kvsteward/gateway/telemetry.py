"""Counters and histograms of one gateway, in a registry of its own.

Invariant: two gateways in one process never share a metric.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from kvsteward.context.ask import Asked

SESSION_BUCKETS = tuple(float(1024 * 2**i) for i in range(11))
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Telemetry:
    """The gateway's own figures. Mutable."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        r = self.registry
        self.session_tokens = Histogram(
            "kvsteward:session_tokens",
            "Tokens resident for a session after a turn",
            buckets=SESSION_BUCKETS,
            registry=r,
        )
        self.turns = Counter("kvsteward:turns", "Turns by how they ended", ["outcome"], registry=r)
        self.prompt_tokens = Counter("kvsteward:prompt_tokens", "Prompt tokens of all turns", registry=r)
        self.cached_tokens = Counter("kvsteward:cached_tokens", "Prompt tokens found in the prefix cache", registry=r)
        self.output_tokens = Counter("kvsteward:output_tokens", "Tokens answered", registry=r)
        self.saved_tokens = Counter(
            "kvsteward:saved_tokens", "Prompt tokens that were in the log but not sent", registry=r
        )
        self.compactions = Counter("kvsteward:compactions", "Compactions", registry=r)
        self.again_tokens = Counter(
            "kvsteward:compaction_prefill_tokens",
            "Prompt tokens prefilled again because a compaction changed what stands before them",
            registry=r,
        )
        self.summaries = Counter(
            "kvsteward:summaries",
            "Summaries by the engine: prepared, failed, skipped, given_up; and at a compaction used, repaired, "
            "replaced, late",
            ["outcome"],
            registry=r,
        )
        self.reductions = Counter("kvsteward:reductions", "Messages reduced on entry", registry=r)
        self.selective_saved = Counter(
            "kvsteward:selective_saved_tokens", "Tokens that selective context left out", registry=r
        )
        self.selective_time = Histogram(
            "kvsteward:selective_seconds",
            "Time that a turn waited for log-probabilities of a text's window",
            buckets=_SECONDS,
            registry=r,
        )
        self.asks = Counter(
            "kvsteward:asks",
            "Questions to the engine's model on our own account, by what for (prose, class) and what became of them: "
            "used, refused, failed; and of those for classes skipped, given_up, late",
            ["purpose", "outcome"],
            registry=r,
        )
        self.asked_tokens = Counter(
            "kvsteward:asked_tokens", "Tokens of such questions and their answers", ["purpose"], registry=r
        )
        self.asked_time = Histogram(
            "kvsteward:ask_seconds",
            "Time that such a question took; a turn waits for those about prose",
            ["purpose"],
            buckets=_SECONDS,
            registry=r,
        )
        self.recalls = Counter("kvsteward:recalls", "Calls of the recall tool that were answered", registry=r)
        self.recall_searches = Counter(
            "kvsteward:recall_searches",
            "Searches by meaning: fused, or why they went by words alone: timeout, unavailable, refused, unusable, "
            "resting, no_vectors",
            ["outcome"],
            registry=r,
        )
        self.embedded = Counter(
            "kvsteward:embedded_texts",
            "Passages of logs: stored, adopted (known from a branch), refused by the endpoint; and sessions: failed, "
            "given_up, dropped",
            ["outcome"],
            registry=r,
        )
        self.exact_counts = Counter("kvsteward:exact_counts", "Prompts that the engine was asked to count", registry=r)
        self.ttft = Histogram("kvsteward:ttft_seconds", "Time to the first token", buckets=_SECONDS, registry=r)
        self.queue_time = Histogram(
            "kvsteward:queue_seconds", "Time waited for KV budget", buckets=_SECONDS, registry=r
        )
        self.prepare_time = Histogram(
            "kvsteward:prepare_seconds", "Time to resolve the session and build the view", buckets=_SECONDS, registry=r
        )
        self.unreleased = Counter(
            "kvsteward:unreleased_requests",
            "Requests that the engine went on with after their client had left",
            registry=r,
        )
        self.notes = Counter(
            "kvsteward:notes",
            "Notes to the engine of what a session waits for, by what became of them",
            ["outcome"],
            registry=r,
        )
        self.engine_up = Gauge(
            "kvsteward:engine_up",
            "1 for an engine that takes turns, 0 for one that is down or drained",
            ["engine"],
            registry=r,
        )
        self.running = Gauge("kvsteward:turns_running", "Turns that the engine works on", registry=r)
        self.waiting = Gauge("kvsteward:turns_waiting", "Turns that wait for KV budget", registry=r)
        self.sessions = Gauge("kvsteward:sessions", "Sessions by state", ["state"], registry=r)
        self.resident_tokens = Gauge(
            "kvsteward:resident_tokens", "Tokens in the KV pool by the session ledger", registry=r
        )
        self.capacity_tokens = Gauge(
            "kvsteward:kv_capacity_tokens", "Tokens that the engine's KV pool holds", registry=r
        )

    def count_asked(self, asked: Asked) -> None:
        self.asks.labels(asked.purpose, asked.outcome).inc()
        self.asked_tokens.labels(asked.purpose).inc(asked.tokens)
        self.asked_time.labels(asked.purpose).observe(asked.seconds)

    def text(self) -> bytes:
        return generate_latest(self.registry)
