"""NVIDIA cards through pynvml, read by one thread that may hang.

Owns every NVML call and what each NVML error means for a card or the whole driver. Must not know: attempts, leases. The
driver is asked in a thread, because a sick one answers after seconds or never, and a call cannot be cancelled: the looker
waits no longer than its deadline, says "hanging", and goes on without the card that hangs. Facts behind this, measured:

- DriverNotLoaded, LibraryNotFound, LibRmVersionMismatch and Unknown at init are four different conditions. Unknown is
  transient (a container whose device cgroup was rebuilt); a mismatch (an upgrade without reboot) lasts until a new
  process loads the new library, since the loaded one stays for the life of this one.
- GetProcessUtilization and others say NotFound or NotSupported for "nothing": no error.
- Memory v1 counts what the driver reserves as used; v2 tells them apart.
- An event wait on a set with a lost card answers GpuIsLost at once, so the set is made anew without it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
import time
from typing import Any, Callable, Collection, Dict, List, Optional, Set, Tuple

from cotenant.hostd.cards import Cards, Driver, NoCards, OnCard, Sighting
from cotenant.hostd.nvlink import read_links
from cotenant.hostd.protocol import CardLinks

#: A look waits this long. A healthy driver takes about 1 ms a card.
DEADLINE_S = 2.0
#: While the driver is away, it is asked this often whether it came back.
RETRY_S = 5.0
#: How often it is asked which cards are joined: that changes with the hardware alone, or when a link breaks.
LINKS_EVERY_S = 300.0
#: Xid numbers after which a card must not get new work before a person or a reset: double-bit ECC, row remapping failure,
#: NVLink, fallen off the bus, uncontained ECC, GSP timeouts, and their newer kin (NVIDIA's Xid catalogue).
CRITICAL_XIDS = frozenset({48, 62, 64, 74, 79, 95, 109, 119, 120, 136, 140, 143, 154})
_XID_EVENT = 0x8
_MIB = 1024 * 1024
#: How a card is called that has not told its uuid.
_NAMELESS = "card "


def open_nvml() -> Cards:
    """The NVIDIA cards of this machine, or NoCards with the reason why none can be seen."""
    try:
        import pynvml
    except ImportError:
        return NoCards("no_library", "the Python package nvidia-ml-py (pynvml) is not beside hostd")
    return NvmlCards(pynvml)


class NvmlCards:
    """Cards through one pynvml module. All calls run in one thread at a time."""

    busy_interval_s: Optional[float] = 1.0
    idle_interval_s: Optional[float] = 5.0

    def __init__(self, pynvml: Any, deadline_s: float = DEADLINE_S) -> None:
        self._nvml = pynvml
        self._deadline_s = deadline_s
        self._driver = Driver("error", "the driver was not asked yet")
        self._last: Dict[str, Sighting] = {}
        self._links: Tuple[CardLinks, ...] = ()
        self._was_ok = False
        self._order: Dict[str, int] = {}
        self._reader: Optional[_Reader] = None
        self._stuck: List[_Reader] = []
        self._looking = asyncio.Lock()

    @property
    def driver(self) -> Driver:
        return self._driver

    @property
    def links(self) -> Tuple[CardLinks, ...]:
        return self._links

    @property
    def needs_new_process(self) -> bool:
        # The old library stays loaded for the life of the process, so this one can never speak to the new driver. Only
        # after it once could: else the library on disk is the wrong one, and a new process would find the same.
        return self._was_ok and self._driver.status == "version_mismatch"

    def last(self) -> List[Sighting]:
        return sorted(self._last.values(), key=lambda card: self._order.get(card.uuid, len(self._order)))

    async def look(self, uuids: Optional[Collection[str]] = None) -> List[Sighting]:
        async with self._looking:
            await self._look(uuids)
        return [card for card in self.last() if uuids is None or card.uuid in uuids]

    async def _look(self, uuids: Optional[Collection[str]]) -> None:
        self._stuck = [reader for reader in self._stuck if reader.busy]
        hanging: Set[str] = {reader.at for reader in self._stuck if reader.at}
        for uuid in hanging:
            self._mark(uuid, "sick", "the driver does not answer for this card")
        if self._reader is not None:
            self._reader.nameless = {at for at in hanging if at.startswith(_NAMELESS)}
        while True:
            if self._reader is None:
                if any(not reader.at for reader in self._stuck) or len(self._stuck) > 8:
                    self._all_hang()  # a call about the whole driver hangs: another thread would hang likewise
                    return
                self._reader = _Reader(self._nvml, self._stuck[-1] if self._stuck else None)
                self._reader.nameless = {at for at in hanging if at.startswith(_NAMELESS)}
            reader = self._reader
            answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()
            reader.ask(_Question(uuids, frozenset(hanging), answer))
            # asyncio.wait, not wait_for: before Python 3.12 that could swallow the cancellation of its caller.
            await asyncio.wait({answer}, timeout=self._deadline_s)
            if not answer.done():
                self._reader = None
                self._stuck.append(reader)
                self._take(reader.partial)
                if not reader.at:
                    self._all_hang()
                    return
                hanging.add(reader.at)
                self._mark(reader.at, "sick", "the driver does not answer for this card")
                continue
            result = answer.result()
            self._take(result.cards)
            self._driver = result.driver
            if result.driver.status == "ok":
                self._links = result.links
            self._was_ok = self._was_ok or result.driver.status == "ok"
            if result.driver.status == "ok" and self._stuck:
                self._driver = dataclasses.replace(
                    result.driver, status="hanging", message=f"no answer for {', '.join(sorted(hanging))}"
                )
            if result.driver.status != "ok":
                for uuid in self._last:
                    if uuid not in hanging:
                        self._mark(uuid, "unverified", result.driver.message or result.driver.status)
            elif result.present is not None:
                nameless = any(at.startswith(_NAMELESS) for at in hanging)  # one of those may be what is missing
                self._order = {uuid: number for number, uuid in enumerate(result.present)}
                for uuid in self._last:
                    if uuid not in result.present and uuid not in hanging and not nameless:
                        self._mark(uuid, "lost", "the driver does not show this card any more")
            return

    def _take(self, cards: List[Sighting]) -> None:
        for card in cards:
            before = self._last.get(card.uuid)
            if before is not None and card.name == "":  # nothing but its loss is known: keep what it was
                card = dataclasses.replace(
                    before,
                    health=card.health,
                    reason=card.reason,
                    processes=(),
                    xids=card.xids,
                    memory_used_mib=None,
                    util_pct=None,
                    temperature_c=None,
                    power_w=None,
                    seen_at=card.seen_at,
                )
            self._last[card.uuid] = card

    def _mark(self, uuid: str, health: str, reason: str) -> None:
        before = self._last.get(uuid)
        if before is not None and (before.health, before.reason) != (health, reason):
            self._last[uuid] = dataclasses.replace(
                before,
                health=health,
                reason=reason,
                processes=(),
                memory_used_mib=None,
                util_pct=None,
                temperature_c=None,
                power_w=None,
                seen_at=time.monotonic(),
            )

    def _all_hang(self) -> None:
        self._driver = dataclasses.replace(self._driver, status="hanging", message="the driver does not answer")
        for uuid in self._last:
            self._mark(uuid, "sick", "the driver does not answer")

    def close(self) -> None:
        if self._reader is not None:
            self._reader.ask(None)


@dataclasses.dataclass(frozen=True)
class _Question:
    uuids: Optional[Collection[str]]
    without: "frozenset[str]"
    answer: "asyncio.Future[_Answer]"


@dataclasses.dataclass(frozen=True)
class _Answer:
    driver: Driver
    cards: List[Sighting]
    links: Tuple[CardLinks, ...] = ()
    present: Optional[Tuple[str, ...]] = (
        None  # what the driver shows, in its order; None after a look at some cards only
    )


class _Reader:
    """The one thread that calls NVML.

    `at` is the uuid it is busy with, "card N" while card N has not told its name, "" for a call about the whole driver.
    """

    def __init__(self, nvml: Any, before: Optional["_Reader"]) -> None:
        self.at = ""
        self.nameless: Set[str] = set()  # cards that hang and could not even be asked for their name
        self._left_out: Set[str] = set()  # those of them that were passed over when the cards were looked for
        self.busy = False
        self.partial: List[Sighting] = []
        self._n = nvml
        self._ready = False
        self._retry_at = 0.0
        self._driver = Driver("error", "the driver was not asked yet")
        self._handles: Dict[str, Tuple[int, Any, Optional[str]]] = {}  # uuid -> index, handle, parent uuid
        self._fixed: Dict[str, Dict[str, Any]] = {}
        self._xids: Dict[str, Tuple[int, ...]] = {}
        self._links: Tuple[CardLinks, ...] = ()
        self._links_at = 0.0  # when they are read next
        self._events: Any = None
        self._watched: Set[str] = set()
        if before is not None:
            # What the stuck one knows: to find the cards anew would ask the card that hangs for its name.
            self._ready, self._driver = before._ready, before._driver
            self._handles, self._fixed, self._xids = dict(before._handles), dict(before._fixed), dict(before._xids)
            self._events, self._watched = before._events, set(before._watched)
            self._left_out = set(before._left_out)
            self._links, self._links_at = before._links, before._links_at
        self._question: Optional[_Question] = None
        self._asked = threading.Semaphore(0)
        threading.Thread(target=self._run, name="nvml", daemon=True).start()

    def ask(self, question: Optional[_Question]) -> None:
        """Answer `question` through its future; None ends the thread."""
        self._question = question
        self.busy = question is not None
        self._asked.release()

    def _run(self) -> None:
        while True:
            self._asked.acquire()
            question = self._question
            if question is None:
                return
            self.at, self.partial = "", []
            try:
                result = self._answer(question)
            except Exception as error:  # noqa: BLE001 (it has raised TypeError on "not available")
                result = _Answer(Driver("error", f"pynvml failed: {error!r}"), [])
            self.busy = False
            loop = question.answer.get_loop()
            try:
                loop.call_soon_threadsafe(_settle, question.answer, result)
            except RuntimeError:
                return  # the loop has ended

    # ---- the driver

    def _answer(self, question: _Question) -> _Answer:
        if not self._ready and not self._open():
            return _Answer(self._driver, [])
        n = self._n
        try:
            # Asks for nothing that a card could delay; says at once when the driver has gone.
            n.nvmlDeviceGetCount()
        except n.NVMLError as error:
            self._close(error)
            if not self._open():
                return _Answer(self._driver, [])
        if self._left_out - self.nameless:
            self._find_cards()  # one that hung answers by now
            self._watch_events()
        self._collect_xids()
        cards = self.partial
        for uuid, (index, handle, parent) in self._handles.items():
            if uuid in question.without or (question.uuids is not None and uuid not in question.uuids):
                continue
            self.at = uuid
            cards.append(self._read(uuid, index, handle, parent))
            self.at = ""
        if question.uuids is None and time.monotonic() >= self._links_at:
            self._read_links(question.without)
        present = tuple(self._handles) if question.uuids is None else None
        return _Answer(self._driver, cards, self._links, present)

    def _read_links(self, without: "frozenset[str]") -> None:
        whole = {uuid: handle for uuid, (_, handle, parent) in self._handles.items() if parent is None}
        asked = {uuid: handle for uuid, handle in whole.items() if uuid not in without}

        def at(uuid: str) -> None:
            self.at = uuid

        found = read_links(self._n, asked, at)
        # of a card that hangs what was known stays
        self._links = tuple(pair for pair in self._links if {pair.a, pair.b} & without) + found
        self._links_at = time.monotonic() + LINKS_EVERY_S

    def _open(self) -> bool:
        n = self._n
        if time.monotonic() < self._retry_at:
            return False
        try:
            n.nvmlInit()
            version, cuda = _text(n.nvmlSystemGetDriverVersion()), n.nvmlSystemGetCudaDriverVersion()
            self._driver = Driver("ok", None, version, f"{cuda // 1000}.{cuda % 1000 // 10}")
            self._find_cards()
        except n.NVMLError as error:
            self._driver = Driver(*_driver_error(n, error))
            self._retry_at = time.monotonic() + RETRY_S
            return False
        self._ready = True
        self._watch_events()
        return True

    def _close(self, error: Exception) -> None:
        """The driver has gone. Shut NVML down, so that the next try asks it anew."""
        self._ready = False
        self._retry_at = 0.0
        self._driver = Driver(*_driver_error(self._n, error))
        self._handles, self._fixed, self._events, self._watched = {}, {}, None, set()
        self._left_out = set()
        with contextlib.suppress(self._n.NVMLError):
            self._n.nvmlShutdown()

    def _find_cards(self) -> None:
        n = self._n
        known = {index: (uuid, handle) for uuid, (index, handle, parent) in self._handles.items() if parent is None}
        handles: Dict[str, Tuple[int, Any, Optional[str]]] = {}
        left_out = set()
        for index in range(n.nvmlDeviceGetCount()):
            at = f"{_NAMELESS}{index}"
            if at in self.nameless:
                left_out.add(at)
                if index in known:
                    handles[known[index][0]] = (index, known[index][1], None)
                continue
            self.at = at  # so that a hanging one takes only itself out, also when the cards are first looked for
            try:
                handle = n.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(n.nvmlDeviceGetUUID(handle))
                instances = {_text(n.nvmlDeviceGetUUID(one)): one for one in self._find_instances(handle)}
            except n.NVMLError:
                continue  # lost before it was ever seen: it has no name that we could tell
            finally:
                self.at = ""
            if not instances:
                handles[uuid] = (index, handle, None)
            for name, instance in instances.items():
                handles[name] = (index, instance, uuid)
        if handles.keys() != self._handles.keys():
            self._links_at = 0.0
        self._handles, self._left_out = (
            handles,
            left_out,
        )  # at once: who takes over from a reader that hangs has the old ones

    def _find_instances(self, handle: Any) -> List[Any]:
        """The MIG instances of a card; none where MIG is off. With MIG on the card itself runs nothing."""
        n = self._n
        found = []
        try:
            current, _pending = n.nvmlDeviceGetMigMode(handle)
            if current != 1:
                return []
            for number in range(n.nvmlDeviceGetMaxMigDeviceCount(handle)):
                try:
                    found.append(n.nvmlDeviceGetMigDeviceHandleByIndex(handle, number))
                except n.NVMLError_NotFound:
                    continue
        except n.NVMLError:
            return found
        return found

    # ---- Xid events

    def _watch_events(self) -> None:
        n = self._n
        try:
            self._events = n.nvmlEventSetCreate()
        except n.NVMLError:
            self._events = None
            return
        for uuid, (_index, handle, parent) in self._handles.items():
            if parent is not None:
                continue
            self.at = uuid
            try:
                n.nvmlDeviceRegisterEvents(handle, _XID_EVENT, self._events)
                self._watched.add(uuid)
            except n.NVMLError:
                pass  # a laptop's card has no events, a lost one gives none
            finally:
                self.at = ""

    def _collect_xids(self) -> None:
        n = self._n
        for _ in range(64):
            if self._events is None:
                return
            try:
                event = n.nvmlEventSetWait_v2(self._events, 0)
            except n.NVMLError_Timeout:
                return
            except n.NVMLError_GpuIsLost:
                self._events, before = None, len(self._watched)
                self._watched = set()
                self._watch_events()  # without the lost ones, else the set says nothing but "lost" from now on
                if len(self._watched) in (0, before):
                    return
                continue
            except n.NVMLError:
                return
            try:
                uuid = _text(n.nvmlDeviceGetUUID(event.device))
            except n.NVMLError:
                uuid = self._uuid_of(event.device)
            number = int(event.eventData)
            if number in CRITICAL_XIDS and uuid:
                self._xids[uuid] = (*self._xids.get(uuid, ()), number)[-16:]

    def _uuid_of(self, device: Any) -> str:
        wanted = _address(device)
        for uuid, (_index, handle, _parent) in self._handles.items():
            if _address(handle) == wanted:
                return uuid
        return ""

    # ---- one card

    def _read(self, uuid: str, index: int, handle: Any, parent: Optional[str]) -> Sighting:
        n = self._n
        xids = self._xids.get(parent or uuid, ())
        health, reason = "ok", None
        if 79 in xids:
            health, reason = "lost", "Xid 79: the card has fallen off the bus"
        elif xids:
            health, reason = "sick", "critical Xid " + ", ".join(str(number) for number in xids)
        try:
            if uuid not in self._fixed:
                self._fixed[uuid] = self._read_fixed(handle)
            used = self._used_mib(handle)
            running, why = self._running(handle)
            if running is None and health == "ok":
                health, reason = "unverified", why
            elif health == "ok" and self._maybe(n.nvmlDeviceGetRemappedRows, handle, pick=3):
                health, reason = "sick", "row remapping has failed: the memory needs a person"
            power = self._maybe(n.nvmlDeviceGetPowerUsage, handle)
            utilization = self._maybe(n.nvmlDeviceGetUtilizationRates, handle)
            return Sighting(
                index=index,
                uuid=uuid,
                memory_used_mib=used,
                util_pct=None if utilization is None else int(utilization.gpu),
                temperature_c=self._maybe(n.nvmlDeviceGetTemperature, handle, n.NVML_TEMPERATURE_GPU),
                power_w=None if power is None else power // 1000,
                health=health,
                reason=reason,
                processes=running or (),
                mig_parent=parent,
                xids=xids,
                seen_at=time.monotonic(),
                **self._fixed[uuid],
            )
        except n.NVMLError_GpuIsLost:
            health, reason = "lost", reason if health == "lost" else "the driver says that the card is lost"
        except n.NVMLError as error:
            health, reason = "sick", f"the driver says: {error}"
        known = self._fixed.get(uuid, {"name": "", "memory_mib": 0})
        return Sighting(
            index=index,
            uuid=uuid,
            health=health,
            reason=reason,
            mig_parent=parent,
            xids=xids,
            seen_at=time.monotonic(),
            **known,
        )

    def _read_fixed(self, handle: Any) -> Dict[str, Any]:
        n = self._n
        capability = self._maybe(n.nvmlDeviceGetCudaComputeCapability, handle)
        pci = self._maybe(n.nvmlDeviceGetPciInfo, handle)
        return {
            "name": _text(n.nvmlDeviceGetName(handle)),
            "memory_mib": int(self._memory(handle).total) // _MIB,
            "compute_capability": None if capability is None else f"{capability[0]}.{capability[1]}",
            "pci_bus_id": None if pci is None else _text(pci.busId),
        }

    def _memory(self, handle: Any) -> Any:
        n = self._n
        try:
            return n.nvmlDeviceGetMemoryInfo(handle, version=n.nvmlMemory_v2)
        except (n.NVMLError_NotSupported, n.NVMLError_FunctionNotFound, n.NVMLError_InvalidArgument):
            return n.nvmlDeviceGetMemoryInfo(handle)  # drivers before 510

    def _used_mib(self, handle: Any) -> int:
        return int(self._memory(handle).used) // _MIB

    def _running(self, handle: Any) -> Tuple[Optional[Tuple[OnCard, ...]], Optional[str]]:
        """Compute, graphics and MPS processes; None with the reason when they cannot be told."""
        n = self._n
        found: Dict[int, OnCard] = {}
        lists: List[Tuple[Callable[[Any], Any], bool]] = [
            (n.nvmlDeviceGetComputeRunningProcesses, False),
            (n.nvmlDeviceGetMPSComputeRunningProcesses, False),
            (n.nvmlDeviceGetGraphicsRunningProcesses, True),
        ]
        for number, (ask, graphics) in enumerate(lists):
            try:
                for process in ask(handle):
                    memory = process.usedGpuMemory
                    pid = int(process.pid)
                    if pid not in found:
                        found[pid] = OnCard(pid, None if memory is None else int(memory) // _MIB, graphics)
            except (n.NVMLError_NotSupported, n.NVMLError_FunctionNotFound, n.NVMLError_NoPermission) as error:
                if number == 0:  # without this list nobody knows who computes here
                    return None, f"the processes on the card cannot be told: {error}"
        return tuple(found.values()), None

    def _maybe(self, ask: Callable[..., Any], *args: Any, pick: Optional[int] = None) -> Any:
        """What the driver says, or None where this card has no such thing. A lost card still raises."""
        n = self._n
        try:
            answer = ask(*args)
        except n.NVMLError_GpuIsLost:
            raise
        except n.NVMLError:
            return None
        return answer if pick is None else answer[pick]


def _driver_error(n: Any, error: Exception) -> Tuple[str, str]:
    """The word of HostFacts.nvml for an error about the whole driver, and a sentence."""
    if isinstance(error, n.NVMLError_LibraryNotFound):
        return "no_library", "libnvidia-ml.so.1 is not here: no NVIDIA driver is installed"
    if isinstance(error, n.NVMLError_DriverNotLoaded):
        return "no_driver", "the NVIDIA driver is not loaded"
    if isinstance(error, n.NVMLError_LibRmVersionMismatch):
        return "version_mismatch", "driver and library versions differ: upgraded without a reboot"
    if isinstance(error, n.NVMLError_Unknown):
        return (
            "error",
            "NVML says Unknown Error: transient in a container whose device rules were rebuilt, else the driver",
        )
    return "error", f"NVML says: {error}"


def _settle(answer: "asyncio.Future[_Answer]", result: _Answer) -> None:
    if not answer.done():
        answer.set_result(result)


def _address(handle: Any) -> Any:
    import ctypes

    return ctypes.cast(handle, ctypes.c_void_p).value


def _text(value: Any) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
