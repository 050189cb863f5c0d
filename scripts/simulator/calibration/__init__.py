"""Fits the simulator's costs to a live service (``simulate --calibrate``)."""
