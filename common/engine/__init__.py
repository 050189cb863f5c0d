"""The engine: runs step plans on a decoder model with paged KV. Only node processes import it, since it needs torch.

This file imports nothing, so that ``common.engine.models.config``, which needs no torch, loads quickly.
"""
