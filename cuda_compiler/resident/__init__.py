"""Runs of calls as one kernel that stays resident on every multiprocessor."""
