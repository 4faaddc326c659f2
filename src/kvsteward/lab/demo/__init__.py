"""The demonstration: one long agent session against a real engine, passed through and managed, with the same budget."""
