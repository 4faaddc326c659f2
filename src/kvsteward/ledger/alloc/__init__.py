"""What each engine charges a request: blocks, pages, groups, padding, slots. One file per engine."""
