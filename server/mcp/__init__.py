"""The MCP side of the server: what a tool is, how its answer looks on the wire, who watches which resource.

`sdk.py` holds every use of parts of the MCP SDK that are private or provisional. The tools, resources and prompts
themselves live in their own folders and are handed in by the composition root.
"""
