"""The machine that runs tile programs: what they compute, and when."""
