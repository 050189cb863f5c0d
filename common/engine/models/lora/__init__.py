"""LoRA adapters: their files, and their products beside those of the model."""
