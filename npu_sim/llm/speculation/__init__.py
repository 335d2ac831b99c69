"""Speculative decoding: drafting the next tokens, and deciding how many drafted tokens a step should verify."""
