"""The engine below its threads: sequences, the scheduler that plans steps over them, and the core that runs these."""
