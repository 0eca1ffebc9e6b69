"""The doors for people."""
