"""Grammars of structured output: their conversion to Lark, and the processes that compile them."""
