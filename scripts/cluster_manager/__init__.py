"""Baton on a Ray cluster: places, restarts, upgrades and scales gateways and nodes on many hosts."""
