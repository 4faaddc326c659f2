"""What the model gets to see: reduction on entry, compaction, and the pipeline that runs them. Knows no sockets.

A step that must ask something of the engine yields the question and is sent the answer.
"""
