"""The engine: a decoder model over paged KV, driven by step plans. Imported by node processes only; needs torch.

Nothing is imported here, so that ``common.engine.model_config`` (which needs no torch) stays cheap to load.
"""
