"""Gateways announce themselves in etcd, and nodes find them there."""
