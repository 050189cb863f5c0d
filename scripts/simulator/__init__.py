"""The simulator: production routers, roles, schedulers, caches and transfer sessions in virtual time."""
