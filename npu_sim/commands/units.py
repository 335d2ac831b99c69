"""Formatting of numbers with units for the commands."""


def format_time(seconds: float) -> str:
    """Format seconds in a unit that fits: 0.0123 as "12.3 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.4g} {unit}"
    return f"{1e6 * seconds:.4g} µs"
