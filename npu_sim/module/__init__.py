"""The front door: a PyTorch module, an `ExportedProgram` or a `.pt2` file as a callable that runs on a device."""
