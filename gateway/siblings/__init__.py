"""Several gateways behind one port: requests that one passes on to another, and answers of all of them."""
