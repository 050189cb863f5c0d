"""The commands, one module for each, and the supervisor that runs all roles on one machine."""
