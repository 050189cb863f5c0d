"""Checkpoints with quantized matrices, which are decoded when they are loaded; a module for each format."""
