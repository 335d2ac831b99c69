"""Serving a language model to many users at once: an engine that batches over a paged KV cache, and an HTTP server."""
