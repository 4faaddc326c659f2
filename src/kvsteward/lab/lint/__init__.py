"""`kvsteward lint`: what breaks the prefix cache in recorded requests, where, at what cost, and what mends it."""
