"""Looks at a live engine for a while and says what is wrong with its KV cache, why, and what to change."""
