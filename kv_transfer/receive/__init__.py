"""The decode node's end of transfers."""
