"""Code that several parts of Baton share: configuration, messages, cache, scheduling, engine, node process."""
