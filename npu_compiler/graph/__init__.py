"""The graph: its data model, reading and writing it, and what its tensors are made of."""
