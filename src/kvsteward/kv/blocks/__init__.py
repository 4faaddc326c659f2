"""A store of KV blocks with tiers: host memory, disk, Valkey.

    pool = HostPool(block_bytes=2 << 20, capacity_bytes=8 << 30)
    store = BlockStore(pool, [DiskTier(...), ValkeyTier(...)])
    store.put(key(fingerprint, block_hash), block, session="agent-7")
    ticket = store.stage(keys, deadline_s=0.5)      # background; poll() says how many leading blocks are in host memory
    store.get_into(keys[0], out)

`fingerprint` and `key` say whose KV a block is, `record` how it is written down; `store` is what callers see, `behind`
writes to the lower tiers, `bringing` reads from them.

Knows nothing of vLLM, HTTP or what is in a block. Invariant: what comes back is what was put under that key by the same
model, layout and tenant, or it is a miss; and no call waits for a disk or a socket.
"""

from kvsteward.kv.blocks.account import StoreFigures
from kvsteward.kv.blocks.fingerprint import Fingerprint, key
from kvsteward.kv.blocks.host import HostPool
from kvsteward.kv.blocks.order import LRU, Order, Ranked
from kvsteward.kv.blocks.record import Miss, Reason
from kvsteward.kv.blocks.store import BlockStore
from kvsteward.kv.blocks.tickets import Filling, Ticket

__all__ = [
    "LRU",
    "BlockStore",
    "Filling",
    "Fingerprint",
    "HostPool",
    "Miss",
    "Order",
    "Ranked",
    "Reason",
    "StoreFigures",
    "Ticket",
    "key",
]
