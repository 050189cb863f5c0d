"""Which requests may enter: TLS, hosts, origins, API keys, and the checks that every route makes."""
