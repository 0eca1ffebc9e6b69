"""Reports and measurements from hosts, on their way into the store."""
