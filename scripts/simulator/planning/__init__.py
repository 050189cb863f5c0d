"""Searches for the fewest nodes that hold objectives under a load (``simulate --plan``)."""
