"""Matrix products, with weights that are packed once or with operands that change."""
