"""Products and lookups with quantized weights, and products of activation rows that are quantized to bytes."""
