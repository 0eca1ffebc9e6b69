"""Which cards of a machine are joined by NVLink, and by how many links.

Two cards are joined directly, link by link, or through switches: then every card with links to them reaches every other
with the fewer of both cards' links. Must not know: threads and deadlines (nvml.py).
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Mapping, Tuple

from cotenant.hostd.protocol import CardLinks

#: NVML's word for a switch at the other end of a link (NVML_NVLINK_DEVICE_TYPE_SWITCH).
_SWITCH = 2
#: More links than any card has; a driver says itself where they end.
_LINKS_MAX = 64


def read_links(nvml: Any, handles: Mapping[str, Any], at: Callable[[str], None]) -> Tuple[CardLinks, ...]:
    """The joined pairs among whole cards, by uuid. `at` is told of the card that is asked next, "" at the end.

    A card that does not know NVLink, or whose links cannot be read, counts as joined to none.
    """
    buses: Dict[str, str] = {}
    for uuid, handle in handles.items():
        at(uuid)
        try:
            buses[_bus(nvml.nvmlDeviceGetPciInfo(handle))] = uuid
        except nvml.NVMLError:
            continue
    direct: Dict[Tuple[str, str], int] = {}
    switched: Dict[str, int] = {}
    for uuid, handle in handles.items():
        at(uuid)
        for peer in _peers(nvml, handle):
            if peer == "":
                switched[uuid] = switched.get(uuid, 0) + 1
            elif peer in buses and buses[peer] != uuid:
                pair = uuid, buses[peer]
                direct[pair] = direct.get(pair, 0) + 1
    at("")
    found: List[CardLinks] = []
    names = sorted(handles)
    for number, one in enumerate(names):
        for two in names[number + 1 :]:
            # each end counts its links; one that could be asked at one end only is a link all the same
            links = max(direct.get((one, two), 0), direct.get((two, one), 0))
            links += min(switched.get(one, 0), switched.get(two, 0))
            if links:
                found.append(CardLinks(one, two, links))
    return tuple(found)


def _peers(nvml: Any, handle: Any) -> List[str]:
    """The other end of each active link of a card: a PCI bus id, or "" for a switch."""
    found = []
    for link in range(_LINKS_MAX):
        try:
            if not nvml.nvmlDeviceGetNvLinkState(handle, link):
                continue
        except nvml.NVMLError:
            break  # no NVLink at all, or no link with that number
        try:
            if nvml.nvmlDeviceGetNvLinkRemoteDeviceType(handle, link) == _SWITCH:
                found.append("")
                continue
        except nvml.NVMLError:
            pass  # older drivers do not say; the address tells a card as well
        try:
            found.append(_bus(nvml.nvmlDeviceGetNvLinkRemotePciInfo(handle, link)))
        except nvml.NVMLError:
            continue
    return found


def _bus(info: Any) -> str:
    text = info.busId
    return (text.decode("ascii", "replace") if isinstance(text, bytes) else str(text)).lower()
