"""The processes of a tensor-parallel node: rank 0 is the node's own process, and starts the others."""
