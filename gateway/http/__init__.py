"""The HTTP side: routes, authentication, request bodies, response formats."""
