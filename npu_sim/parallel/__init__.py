"""Groups of processes that run one model together, each on a device of its own."""
