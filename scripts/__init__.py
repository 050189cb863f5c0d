"""What a user types: one module per command, and the supervisor that runs all roles on one machine."""
