"""Many requests at once: throughput, drafts, and clients that misbehave."""
