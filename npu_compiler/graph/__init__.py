"""The graph: its data model, reading and writing it, and the dtypes, formats and recipes of its tensors."""
