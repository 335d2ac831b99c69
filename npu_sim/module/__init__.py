"""Compilation of a PyTorch module, an `ExportedProgram` or a `.pt2` file to a callable that runs on a device."""
