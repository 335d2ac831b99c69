"""Products and lookups with weights in few bits, and rows rounded to bytes."""
