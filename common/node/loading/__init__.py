"""How a node comes to its model: memory, weights, and the role that is built over them."""
