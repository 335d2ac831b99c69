"""Products of matrices, with weights that are packed once or with any operand."""
