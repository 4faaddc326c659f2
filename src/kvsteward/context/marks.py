"""The budget of a session and its marks, in tokens.

    0 ........ low ............... high ...... hard ........ budget
              after a compaction   compact    | room for the answer

`hard` leaves room for the answer, so that prompt + answer stay inside the budget. At `high` the history is compacted,
in one big step down to `low`. The further apart the marks, the rarer the steps and the prefills that they cost, and
the more tokens are held. `best_span` weighs the two; docs/marks.md derives it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from math import inf, sqrt

from kvsteward.context.block import MIN_BLOCK_TOKENS, plan_text, stages
from kvsteward.context.hygiene import Hygiene
from kvsteward.context.layout import View
from kvsteward.context.patterns import compiled
from kvsteward.context.plan import PlanRules
from kvsteward.context.tokens import Estimator
from kvsteward.errors import ConfigError

NO_LIMIT = 1 << 62
_PREPARE_SHARE = 0.1
"""Of the way from the low to the high mark: what is left of it when the summary is asked for."""
_LEAST_SPAN = 0.25
"""Of the low mark: marks that are closer together would compact at nearly every turn."""


@dataclass(frozen=True, slots=True)
class Load:
    """What a session's turns are like. `growth_tokens`: what a turn adds; `fixed_tokens`: what stands in front and is
    the same after a compaction; `miss_ratio`: how often a turn finds its cache gone; `plan_tokens`: the Plan, which
    stands first in the condensed part and stays, too."""

    growth_tokens: float
    fixed_tokens: int = 0
    miss_ratio: float = 0.0
    plan_tokens: int = 0


def load_of(view: View, tools_tokens: int, miss_ratio: float, estimator: Estimator) -> Load | None:
    """Measured on a view. None while it has fewer than two rounds."""
    rounds = sum(item.role == "assistant" for item in view.items)
    if rounds < 2:
        return None
    grown = sum(item.tokens for item in view.items) / rounds
    plan = estimator.text(plan_text(view.epoch.plan)) if view.epoch.plan else 0
    return Load(grown, tools_tokens + sum(item.tokens for item in view.pinned), miss_ratio, plan)


@dataclass(frozen=True, slots=True)
class Cycle:
    """The compactions from one rewriting of the condensed part to the next. `left_tokens`: how long a prompt is after
    one, in the mean, and `swing_tokens` by how much it differs from that (the root of the mean square); `again_tokens`:
    what one of them prefills besides what is new in its turn, in the mean."""

    left_tokens: float
    swing_tokens: float
    again_tokens: float


def cycle_of(load: Load, room: float, kept_tokens: float) -> Cycle:
    """Of sessions like `load` with `room` for the condensed part (without the Plan) and `kept_tokens` of rounds that
    stay behind it. What stands in front of the condensed part is found in the cache, and so is what was in it before a
    section was appended."""
    lengths, written = zip(*stages(room), strict=True)
    mean = sum(lengths) / len(lengths)
    swing = sqrt(sum((length - mean) ** 2 for length in lengths) / len(lengths))
    again = kept_tokens + sum(written) / len(written) - load.growth_tokens
    return Cycle(load.fixed_tokens + load.plan_tokens + kept_tokens + mean, swing, max(0.0, again))


def best_span(load: Load, cycle: Cycle, memory_price: float) -> float:
    """Tokens from `cycle.left_tokens` to the high mark that cost least: with g = growth, r = misses, m = what a token
    held for a turn is worth in tokens of prefill, and A, d = what a compaction prefills again and the swing,

        sqrt(2 g A (1 - r) / (r + m) - d²) - g / 2

    Infinite where holding costs nothing. docs/marks.md derives it."""
    price = load.miss_ratio + memory_price
    if price <= 0:
        return inf
    square = 2 * load.growth_tokens * cycle.again_tokens * (1 - load.miss_ratio) / price
    return sqrt(max(0.0, square - cycle.swing_tokens**2)) - load.growth_tokens / 2


@dataclass(frozen=True, slots=True)
class Policy:
    """How a session's context is kept. Ratios are of the budget."""

    high_water_ratio: float = 0.85
    """The latest; where tokens in memory have a price, a session is compacted earlier (`best_span`)."""
    low_water_ratio: float = 0.40
    block_ratio: float = 0.25
    """The most that the condensed part may take."""
    keep_rounds: int = 3
    """Rounds (an assistant message and all up to the next) kept verbatim at a compaction."""
    tool_limit_tokens: int | None = None
    """A tool result over this is reduced on entry. Default: a sixteenth of the budget, 160 at the least, 4,096 at the
    most."""
    summary: str = "engine"
    """"engine" asks the model, in the background, before a compaction; "extractive" never does."""
    selective: float | None = None
    """Of a long prose result, the share of its tokens that is kept at most: the sentences that an engine finds least
    predictable (`context.selective`). None: the distillers choose, and nobody is asked."""
    prose: str = "extractive"
    """Who makes long prose results shorter: "extractive", the distiller, or "engine", its model, while the turn waits
    (`context.paraphrase`)."""
    answer_tokens: int = 512
    """Room kept for the answer where the request sets no limit (an eighth of the budget at the most)."""
    memory_price: float = 0.0
    """What a token that is held for a turn is worth in tokens of prefill, besides what misses make it cost."""
    plan: PlanRules = field(default_factory=PlanRules)
    """What stays word for word."""
    hygiene: Hygiene = field(default_factory=Hygiene)
    """What is kept out of the front of the prompt."""
    keep: tuple[str, ...] = ()
    """Regular expressions of values that the condensed part always keeps."""
    compact: bool = True
    """False: nothing is condensed; a conversation that does not fit is refused."""
    reduce: bool = True
    """False: nothing is shortened on entry."""
    about: str = ""
    """What the policy is for, in a sentence."""

    def __post_init__(self) -> None:
        if not 0 < self.low_water_ratio < self.high_water_ratio <= 1:
            raise ConfigError(
                "the marks must satisfy 0 < low < high <= 1, not "
                f"low {self.low_water_ratio} and high {self.high_water_ratio}"
            )
        if self.summary not in {"engine", "extractive"}:
            raise ConfigError(f"summary must be 'engine' or 'extractive', not {self.summary!r}")
        if self.prose not in {"extractive", "engine"}:
            raise ConfigError(f"trace.prose must be 'extractive' or 'engine', not {self.prose!r}", param="trace.prose")
        for wrong, setting, why in (
            (
                self.prose == "engine" and not self.reduce,
                "trace.prose",
                "trace.reduce: false shortens nothing on entry",
            ),
            (
                self.prose == "engine" and self.selective is not None,
                "trace.prose",
                "trace.selective chooses the same texts",
            ),
            (
                self.plan.unsure == "engine" and not self.compact,
                "plan.unsure",
                "with compact: false all stays as it came",
            ),
        ):
            if wrong:
                raise ConfigError(
                    f"{setting}: engine has nothing to do: {why}", hint="Set one of the two.", param=setting
                )
        for pattern in self.keep:
            compiled(pattern, "fact.keep")
        for name, least in (("keep_rounds", 1), ("answer_tokens", 1), ("tool_limit_tokens", 32), ("memory_price", 0)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}", param=name)
        for name, share in (("block", self.block_ratio), ("selective", self.selective)):
            if share is not None and not 0 < share < 1:
                raise ConfigError(f"{name} is a share between 0 and 1, not {share}", param=name)

    def marks(self, budget_tokens: int, max_output_tokens: int | None, load: Load | None = None) -> Marks:
        """The marks for one turn. A request that wants a long answer gets an earlier high-water mark, and so does a
        session of a deployment whose memory is short."""
        reserve = max_output_tokens or min(self.answer_tokens, budget_tokens // 8)
        hard = budget_tokens - min(reserve, budget_tokens // 2)
        high = min(int(budget_tokens * self.high_water_ratio), hard)
        low = min(int(budget_tokens * self.low_water_ratio), int(high * 0.75))
        block = int(budget_tokens * self.block_ratio)
        if load is not None:
            kept = self.keep_rounds * load.growth_tokens
            room = min(block, max(MIN_BLOCK_TOKENS, low - load.fixed_tokens - load.plan_tokens - kept))
            cycle = cycle_of(load, room, kept)
            best = min(low, cycle.left_tokens) + best_span(load, cycle, self.memory_price)
            high = int(min(high, max(best, low * (1 + _LEAST_SPAN))))
        tool_limit = self.tool_limit_tokens or min(4_096, max(160, budget_tokens // 16))
        return Marks(
            budget=budget_tokens,
            hard=hard,
            high=high,
            low=low,
            block=block,
            tool_limit=tool_limit,
            text_limit=max(tool_limit, budget_tokens // 4),
        )


def compaction_near(view: View, tokens: int, marks: Marks, policy: Policy) -> bool:
    """Whether a few more rounds like the newest would reach the high-water mark, after a turn that left `tokens` in the
    view."""
    if not policy.compact or len(view.items) < 2 or tokens > marks.budget:
        return False
    recent, rounds = 0, 0
    for item in reversed(view.items):
        recent += item.tokens
        rounds += item.role == "assistant"
        if rounds == policy.keep_rounds:
            break
    return tokens + recent >= marks.high or tokens >= marks.prepare


@dataclass(frozen=True, slots=True)
class Marks:
    """All in tokens. `tool_limit` and `text_limit` bound one tool result and one message of any other role."""

    budget: int
    hard: int
    high: int
    low: int
    block: int
    tool_limit: int
    text_limit: int

    @property
    def prepare(self) -> int:
        """Where the summary for the coming compaction is asked for at the latest."""
        return self.high - int((self.high - self.low) * _PREPARE_SHARE)

    def unlimited(self) -> Marks:
        """The same marks for messages of any length."""
        return replace(self, tool_limit=NO_LIMIT, text_limit=NO_LIMIT)

    def scaled(self, factor: float) -> Marks:
        """The same marks in units of an estimate that is off by a known factor."""
        return replace(
            self,
            hard=int(self.hard * factor),
            high=int(self.high * factor),
            low=int(self.low * factor),
            block=int(self.block * factor),
        )
