"""Claims of papers as simulations (``simulate --experiment``)."""
