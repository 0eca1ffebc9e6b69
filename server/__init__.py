"""The control plane: records, deciding, the links to hosts. docs/architecture.md is its map."""
