"""How many nodes the present load needs (``/v1/advice``): what is measured, and what follows from it."""
