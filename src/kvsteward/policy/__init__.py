"""Decisions as pure functions: each returns its reason and its numbers. Knows no HTTP, no clock and no engine's
name."""
