"""Native code for the CPU, compiled at the first start, and its calls."""
