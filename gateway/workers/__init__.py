"""The nodes: control plane, registry, router, and the models that they serve."""
