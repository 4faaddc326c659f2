"""The budget of a session and its marks, in tokens.

    0 ........ low ............... high ...... hard ........ budget
              after a compaction   compact    | room for the answer

`hard` leaves room for the answer, so that prompt + answer stay inside the budget. At `high` the history is compacted,
in one big step down to `low`. The further apart the marks, the rarer the steps, and the more of the prompt is found in
the engine's prefix cache: with g new tokens a turn, an epoch has (high - low) / g turns and (high^2 - low^2) / 2g
prompt tokens, of which about `high` are prefilled. So the share that is not cached is 2g x high / (high^2 - low^2).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from kvsteward.context.hygiene import Hygiene
from kvsteward.context.patterns import compiled
from kvsteward.context.plan import PlanRules
from kvsteward.errors import ConfigError

NO_LIMIT = 1 << 62
_PREPARE_SHARE = 0.1
"""Of the way from the low to the high mark: what is left of it when the summary is asked for."""


@dataclass(frozen=True, slots=True)
class Policy:
    """How a session's context is kept. Ratios are of the budget."""

    high_water_ratio: float = 0.85
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
    answer_tokens: int = 512
    """Room kept for the answer where the request sets no limit (an eighth of the budget at the most)."""
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
        for pattern in self.keep:
            compiled(pattern, "fact.keep")
        for name, least in (("keep_rounds", 1), ("answer_tokens", 1), ("tool_limit_tokens", 32)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, not {value}", param=name)
        if not 0 < self.block_ratio < 1:
            raise ConfigError(f"the block's share must be between 0 and 1, not {self.block_ratio}", param="block")

    def marks(self, budget_tokens: int, max_output_tokens: int | None) -> Marks:
        """The marks for one turn. A request that wants a long answer gets an earlier high-water mark."""
        reserve = max_output_tokens or min(self.answer_tokens, budget_tokens // 8)
        hard = budget_tokens - min(reserve, budget_tokens // 2)
        high = min(int(budget_tokens * self.high_water_ratio), hard)
        low = min(int(budget_tokens * self.low_water_ratio), int(high * 0.75))
        tool_limit = self.tool_limit_tokens or min(4_096, max(160, budget_tokens // 16))
        return Marks(
            budget=budget_tokens,
            hard=hard,
            high=high,
            low=low,
            block=int(budget_tokens * self.block_ratio),
            tool_limit=tool_limit,
            text_limit=max(tool_limit, budget_tokens // 4),
        )


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

    def unlimited(self) -> Marks:
        """The same marks for messages of any length."""
        return replace(self, tool_limit=NO_LIMIT, text_limit=NO_LIMIT)

    @property
    def prepare(self) -> int:
        """Where the summary for the coming compaction is asked for at the latest."""
        return self.high - int((self.high - self.low) * _PREPARE_SHARE)

    def scaled(self, factor: float) -> Marks:
        """The same marks in units of an estimate that is off by a known factor."""
        return replace(
            self,
            hard=int(self.hard * factor),
            high=int(self.high * factor),
            low=int(self.low * factor),
            block=int(self.block * factor),
        )
