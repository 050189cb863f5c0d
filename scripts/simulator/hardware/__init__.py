"""Cost models: how long steps and transfers take for a model on a kind of hardware."""
