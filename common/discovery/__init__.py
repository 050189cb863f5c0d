"""How nodes learn the addresses of gateways, and how gateways announce theirs in etcd."""
