"""Reading of checkpoints: files, tensors, formats of quantized weights, fingerprints."""
