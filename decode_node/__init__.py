"""The decode role: reserve pages, receive prompts, and run continuous decode batches."""
