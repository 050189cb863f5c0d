"""What the operating system lets a process have: files, processor cores, memory, stacks."""
