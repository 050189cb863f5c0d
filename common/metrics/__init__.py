"""What gateway and nodes share to count events and to show them to Prometheus."""
