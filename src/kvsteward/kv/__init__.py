"""Guests inside an engine's process: KV block store, vLLM and transformers plug-ins.

Knows nothing of HTTP, the gateway or the context pipeline, and imports nothing that its host has not already got.
"""
