"""A node and its gateways: the connections, who owns which request, and what each gateway may send."""
