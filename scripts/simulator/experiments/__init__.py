"""Claims of papers as simulations that anybody can repeat (``simulate --experiment``)."""
