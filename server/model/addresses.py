"""Addresses of what can be watched, where they are no resource of their own."""

from __future__ import annotations

#: The list of resources of every caller; `list_of` is that of one owner's callers.
LIST = "list"
#: The lists of tools and prompts; ours never change while the server runs.
TOOLS_LIST = "tools"
PROMPTS_LIST = "prompts"


def list_of(owner: str) -> str:
    """The address that changes when an owner's part of resources/list does: living jobs and leases."""
    return f"{LIST}/{owner}"


def owner_of_list(address: str) -> str | None:
    """Whose list an address is: an owner, an empty string for everybody's, None where it is no list."""
    if address == LIST:
        return ""
    return address.removeprefix(f"{LIST}/") if address.startswith(f"{LIST}/") else None
