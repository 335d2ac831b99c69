"""Fuses runs of calls into one kernel that stays resident on every multiprocessor."""
