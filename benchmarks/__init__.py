"""Measurements against peers, in one run and interleaved. They print ratios and medians; nothing here is a test."""
