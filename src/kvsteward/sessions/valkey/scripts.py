"""What the server does in one step, in Lua. Each script touches one slot only.

A script that begins with `#!lua` is refused as a whole by a server that is out of memory, read-only or cannot write its
file, so none is left half done. Knows the layout of `rows`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvsteward.sessions.valkey.link import Script

_CHUNK = 1000
"""Arguments of one command: Lua's stack holds some thousands."""

COMMIT = Script("""#!lua
-- KEYS: a session's, the row first. ARGV: the version that the row must have ('' for none), then commands: how many
-- arguments, the name, which key, the arguments. 1 if they were done, 0 if the version is another.
if (redis.call('HGET', KEYS[1], 'v') or '') ~= ARGV[1] then return 0 end
local at, last = 2, #ARGV
while at <= last do
  local count = tonumber(ARGV[at])
  redis.call(ARGV[at + 1], KEYS[tonumber(ARGV[at + 2])], unpack(ARGV, at + 3, at + 2 + count))
  at = at + 3 + count
end
return 1
""")

WIPE = Script(COMMIT.text.replace("#!lua", "#!lua flags=allow-oom", 1))
"""As COMMIT, for commands that only remove: also where memory is full."""

DRAFT = Script("""#!lua
-- KEYS: row, entries, drafts. ARGV: turn, parent, head, text. 1: kept; 0: no such session; -1: no such parent.
if redis.call('HEXISTS', KEYS[1], 's') == 0 then return 0 end
if ARGV[2] ~= redis.call('HGET', KEYS[1], 'root') and redis.call('HEXISTS', KEYS[2], ARGV[2]) == 0 then return -1 end
local old = redis.call('HGET', KEYS[3], ARGV[1])
local number = old and string.match(old, '^%d+') or redis.call('HINCRBY', KEYS[1], 'drafts', 1)
redis.call('HSET', KEYS[3], ARGV[1], number .. ' ' .. ARGV[3] .. '\\n' .. ARGV[4])
return 1
""")

_PACKED = """
local parts, lengths = {}, {}
local function keep(part) parts[#parts + 1], lengths[#lengths + 1] = part, #part end
local function packed() return table.concat(lengths, ' '), table.concat(parts) end
"""
"""Short parts of an answer are joined, their lengths beside them (see `unpacked`): a client takes one string apart much
faster than thousands. Not for messages: to join long strings costs the server more than it saves."""

WALK = Script(f"""#!lua flags=no-writes
-- KEYS: row, entries. ARGV: an entry, most steps. From there to the first message, packed: each entry, and what stands
-- beside it. Nil: no such session.
if redis.call('HEXISTS', KEYS[1], 's') == 0 then return false end
{_PACKED}
local at = ARGV[1]
for _ = 1, tonumber(ARGV[2]) do
  local meta = redis.call('HGET', KEYS[2], at)
  if not meta then break end
  keep(at)
  keep(meta)
  at = string.match(meta, '^%["([^"\\\\]*)"')
  if not at then break end
end
return {{packed()}}
""")

LOG = Script(f"""#!lua flags=no-writes
-- KEYS: row, entries, order. ARGV: a place, most entries. From that place on as they came: the next place (-1: that was
-- all), then packed: each entry, and what stands beside it. Nil: no such session.
if redis.call('HEXISTS', KEYS[1], 's') == 0 then return false end
{_PACKED}
local at, count = tonumber(ARGV[1]), tonumber(ARGV[2])
local names = redis.call('LRANGE', KEYS[3], at, at + count - 1)
for _, name in ipairs(names) do
  local meta = redis.call('HGET', KEYS[2], name)
  if meta then
    keep(name)
    keep(meta)
  end
end
return {{#names < count and -1 or at + count, packed()}}
""")

SEARCH = Script(f"""#!lua flags=no-writes
-- KEYS: row, entries, order, raw. ARGV: a place, most entries, most bytes that are looked at, then texts. From that
-- place on as they came: the next place (-1: that was all), then, of each message that holds one of the texts, packed:
-- its place, the entry, what stands beside it. Nil: no such session.
if redis.call('HEXISTS', KEYS[1], 's') == 0 then return false end
{_PACKED}
local at, count, most, seen = tonumber(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]), 0
local names = redis.call('LRANGE', KEYS[3], at, at + count - 1)
local after = #names < count and -1 or at + count
for read, name in ipairs(names) do
  local raw = redis.call('HGET', KEYS[4], name) or ''
  for text = 4, #ARGV do
    if string.find(raw, ARGV[text], 1, true) then
      local meta = redis.call('HGET', KEYS[2], name)
      if meta then
        keep(tostring(at + read - 1))
        keep(name)
        keep(meta)
      end
      break
    end
  end
  seen = seen + #raw
  if seen > most and read < #names then
    after = at + read
    break
  end
end
return {{after, packed()}}
""")

VECTORS = Script("""#!lua
-- KEYS: row, entries, vectors, their order. ARGV: entry, field, value. 1 if it is kept, 0 if the entry is no more.
if redis.call('HEXISTS', KEYS[1], 's') == 0 or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then return 0 end
redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
redis.call('ZADD', KEYS[4], redis.call('HINCRBY', KEYS[1], 'vectors', 1), ARGV[2])
return 1
""")

DROP = Script("""#!lua flags=allow-oom
-- KEYS: a sorted set. ARGV: member, low, high. Removes the member if its score is between them.
local score = tonumber(redis.call('ZSCORE', KEYS[1], ARGV[1]) or 'nan')
if score >= tonumber(ARGV[2]) and score <= tonumber(ARGV[3]) then return redis.call('ZREM', KEYS[1], ARGV[1]) end
return 0
""")


class Changes:
    """Commands for COMMIT, as its words. Mutable."""

    def __init__(self) -> None:
        self.words: list[Any] = []

    def add(self, name: str, key: int, *arguments: Any) -> None:
        self.words += (len(arguments), name, key, *arguments)

    def add_all(self, name: str, key: int, arguments: Sequence[Any]) -> None:
        """One command, or several where the arguments are many. Their number is even, or each stands for itself."""
        for start in range(0, len(arguments), _CHUNK):
            self.add(name, key, *arguments[start : start + _CHUNK])


def unpacked(lengths: bytes, parts: bytes) -> list[bytes]:
    """The parts of a packed answer."""
    found: list[bytes] = []
    at = 0
    for length in map(int, lengths.split()):
        found.append(parts[at : at + length])
        at += length
    return found
