"""What every part of Baton shares: messages, configuration, pages, the radix cache, scheduling and the step plan."""
