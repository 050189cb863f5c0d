"""What a node says of itself over HTTP: its health, its metrics, and the numbers behind them."""
