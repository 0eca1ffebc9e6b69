"""`cotenant mcp-stdio`: carries JSON-RPC frames between a client on standard input and output and a server's /mcp.

It understands as much of a frame as it needs to send it on: which era it speaks, what it answers, whether it may be
sent twice. What it does not know it passes on unchanged, so the server alone decides what exists.
"""
