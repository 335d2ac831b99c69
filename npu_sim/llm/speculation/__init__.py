"""Speculative decoding: guesses at the next tokens, and how many of them are worth a step."""
