"""Protocols without I/O: what the bytes of a request, a stream and an error mean. Knows no sockets and no sessions."""
