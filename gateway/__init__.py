"""The gateway: speaks HTTP and text to clients, chooses a pair of nodes for each request, and relays the tokens."""
