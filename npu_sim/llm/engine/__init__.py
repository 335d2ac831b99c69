"""The engine without its threads: sequences, the scheduler that plans steps, and the core that runs them."""
