"""A node's own HTTP server with its health and its metrics, and the counts behind them."""
