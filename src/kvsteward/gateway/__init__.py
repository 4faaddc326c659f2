"""The HTTP face of kvsteward."""
