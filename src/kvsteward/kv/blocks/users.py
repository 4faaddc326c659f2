"""Which sessions use a block in Valkey, so that the end of one leaves what others use, in whichever process.

    kv:1:users:{NAME OF THE BLOCK}   sorted set: digest of a session's id -> the Unix time until which it counts; "*"
                                     where more than `MAX_USERS` use it: it is nobody's, and no session's end drops it

What stands in braces is all that a cluster looks at, so the users lie in the slot of their block and one script changes
both. A block that was written by a version that kept no users has none, and goes with the session that wrote it.

Makes commands, sends none. Invariant: the users of a block are bounded, and live as long as the longest of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

Command = tuple[Any, ...]
PREFIX = b"kv:1:"
MAX_USERS = 8

_KEEP = """
local function keep(key, left, ms)  -- left: what PTTL said before it was written
  if ms == '' then
    redis.call('PERSIST', key)
  elseif left == -2 or (left >= 0 and left < tonumber(ms)) then
    redis.call('PEXPIRE', key, ms)
  end
end
"""

_USE = f"""-- KEYS: the users of a block. ARGV: a session, until when, now, ms to live ('' for ever), how many at most.
{_KEEP}
local left = redis.call('PTTL', KEYS[1])
if not redis.call('ZSCORE', KEYS[1], '*') then
  redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', ARGV[3])
  redis.call('ZADD', KEYS[1], 'GT', ARGV[2], ARGV[1])
  if redis.call('ZCARD', KEYS[1]) > tonumber(ARGV[5]) then
    redis.call('DEL', KEYS[1])
    redis.call('ZADD', KEYS[1], 'inf', '*')
    if left > 0 then redis.call('PEXPIRE', KEYS[1], left) end
  end
end
keep(KEYS[1], left, ARGV[4])
return 1
"""

_LISTED = f"""-- KEYS: the index of a session. ARGV: ms to live ('' for ever), then keys of blocks.
{_KEEP}
local left = redis.call('PTTL', KEYS[1])
redis.call('SADD', KEYS[1], unpack(ARGV, 2))
keep(KEYS[1], left, ARGV[1])
return 1
"""

_LEAVE = """-- KEYS: a block, its users. ARGV: a session, now. Drops the block if no other session uses it: 1 if it did.
redis.call('ZREM', KEYS[2], ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[2], '-inf', ARGV[2])
if redis.call('ZCARD', KEYS[2]) > 0 then return 0 end
redis.call('DEL', KEYS[2])
return redis.call('UNLINK', KEYS[1])
"""

_TEXTS = {hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest(): text for text in (_USE, _LISTED, _LEAVE)}
_SHA = {text: sha for sha, text in _TEXTS.items()}


def use(name: bytes, session: str, *, now_s: float, ttl_ms: int | None) -> Command:
    """The session uses the block `name`. `ttl_ms` None: for ever."""
    until_s = "inf" if ttl_ms is None else now_s + ttl_ms / 1e3
    return ("EVALSHA", _SHA[_USE], 1, _key(name), _user(session), until_s, now_s, _ms(ttl_ms), MAX_USERS)


def listed(index: bytes, keys: Sequence[bytes], *, ttl_ms: int | None) -> Command:
    """Puts at most some hundred keys of blocks into the index of a session."""
    return ("EVALSHA", _SHA[_LISTED], 1, index, _ms(ttl_ms), *keys)


def leave(name: bytes, session: str, *, now_s: float, spared: bool) -> Command:
    """The session uses the block no more; it goes if nobody else does, unless it is `spared`."""
    if spared:
        return ("ZREM", _key(name), _user(session))
    return ("EVALSHA", _SHA[_LEAVE], 2, name, _key(name), _user(session), now_s)


def with_text(command: Command) -> Command:
    """For a server that does not know the script."""
    return ("EVAL", _TEXTS[command[1]], *command[2:])


def _key(name: bytes) -> bytes:
    return b"%susers:{%s}" % (PREFIX, name)


def _user(session: str) -> str:
    return hashlib.blake2b(session.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


def _ms(ttl_ms: int | None) -> int | str:
    return "" if ttl_ms is None else ttl_ms
