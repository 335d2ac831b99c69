"""Products and lookups with quantized weights, and products of rows that are rounded to bytes."""
