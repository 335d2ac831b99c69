"""Serving a language model to many users at once: batches over a paged KV cache, an engine, a server."""
