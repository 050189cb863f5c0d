"""A service in virtual time: its gateway, its nodes, and what passes between them."""
