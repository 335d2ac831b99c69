"""Groups of processes that run one model together, a device each."""
