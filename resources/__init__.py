"""MCP resources: live state under cotenant:// addresses, the same views that the tools show."""
