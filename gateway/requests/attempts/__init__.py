"""What continues a request whose attempt ended without its fault: recovery, moves, trials and their budget."""
