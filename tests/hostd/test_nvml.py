"""The fake NVML library under the real pynvml: each fault ends in the right state, and the other cards go on serving."""

import asyncio
import os
import sys
import time
from pathlib import Path

import pytest
from hostdclient import Hostd, until

from cotenant.hostd.protocol import Refused, SlotRef

PY = sys.executable


async def serves(hostd, uuid, name):
    """The card takes and ends a job."""
    await hostd.start(name, ["sh", "-c", "echo $CUDA_VISIBLE_DEVICES; exit 6"], uuid)
    end = await hostd.ended(name)
    assert end["exit"]["code"] == 6 and end["clean"]
    return (await hostd.log_text(name)).strip()


async def refuses(hostd, uuid, name):
    with pytest.raises(Refused) as refused:
        await hostd.start(name, ["true"], uuid)
    return refused.value


async def reported(hostd, uuid, state):
    """Wait until hostd has reported by itself that the card is in `state`."""

    def told():
        cards = [m["body"] for m in hostd.reports if m["report"] == "card" and m["body"]["uuid"] == uuid]
        return cards and cards[-1].get("state", "ok") == state and cards[-1]

    return await until(told, f"a report of {uuid} {state}")


async def test_cards_are_seen_whole(nvml_hostd, nvml):
    facts = nvml_hostd.welcome["facts"]
    assert facts.get("nvml", "ok") == "ok" and facts["driver"] == "580.95.05" and facts["cuda"] == "13.0"
    assert [card["uuid"] for card in nvml_hostd.cards] == nvml.uuids()
    card = nvml_hostd.cards[2]
    assert card["index"] == 2 and card["memory_mib"] == 80 * 1024 and card["compute_capability"] == "9.0"
    assert "simulated" not in card and card.get("state", "ok") == "ok" and card["pci_bus_id"]
    nvml.set(2, util_gpu=55, temp=66, power=321000)
    card = await nvml_hostd.card(card["uuid"])
    assert (card["util_pct"], card["temperature_c"], card["power_w"]) == (55, 66, 321)
    nvml.set(2, util_gpu="NS", temp="NS")
    card = await nvml_hostd.card(card["uuid"])
    assert card.get("util_pct") is None and card.get("temperature_c") is None, "not known is not 0"
    assert await serves(nvml_hostd, card["uuid"], "a1") == "2"


async def test_a_lost_card_takes_only_itself_out_and_comes_back(nvml_hostd, nvml):
    uuids = nvml.uuids()
    nvml.lose(1)
    await nvml_hostd.card_in(uuids[1], "lost")
    assert (await refuses(nvml_hostd, uuids[1], "no")).code == "sick"
    assert await serves(nvml_hostd, uuids[0], "a0") == "0" and await serves(nvml_hostd, uuids[3], "a3") == "3"
    nvml.restore(1)
    await nvml_hostd.card_in(uuids[1], "ok")
    assert await serves(nvml_hostd, uuids[1], "a1") == "1"


async def test_a_lost_card_is_reported_without_being_asked(nvml_hostd, nvml):
    nvml.lose(3)
    assert (await reported(nvml_hostd, nvml.uuids()[3], "lost"))["reason"]
    nvml.restore(3)
    await reported(nvml_hostd, nvml.uuids()[3], "ok")


@pytest.mark.parametrize(("number", "state"), [(79, "lost"), (48, "sick"), (31, "ok"), (13, "ok")])
async def test_an_xid_is_judged_by_its_number(nvml_hostd, nvml, number, state):
    uuid = nvml.uuids()[2]
    await nvml_hostd.ask("cards")
    nvml.xid(2, number)
    card = await nvml_hostd.card(uuid)
    assert card.get("state", "ok") == state
    assert card.get("xids", []) == ([number] if state != "ok" else [])
    if state != "ok":
        assert str(number) in card["reason"] and (await refuses(nvml_hostd, uuid, "no")).code == "sick"
    assert await serves(nvml_hostd, nvml.uuids()[1], "a1") == "1"


async def test_an_xid_just_before_the_loss_is_not_missed(nvml_hostd, nvml):
    await nvml_hostd.ask("cards")
    nvml.xid(1, 79)
    nvml.lose(1)
    card = await nvml_hostd.card_in(nvml.uuids()[1], "lost")
    assert card["xids"] == [79]
    nvml.xid(2, 48)
    assert (await nvml_hostd.card_in(nvml.uuids()[2], "sick"))["xids"] == [48], "events go on beside a lost card"


async def test_a_lease_in_use_is_held_anew_after_the_memory_was_lost_and_another_is_not(nvml_hostd, nvml):
    uuid = nvml.uuids()[0]
    slots = [{"uuid": uuid}]
    assert (await nvml_hostd.ask("hold", lease_id="L1", fence=9, slots=slots))["clean"]
    holder = await asyncio.create_subprocess_exec("sleep", "100", env={"COTENANT_LEASE": "L1"})
    try:
        nvml.use(0, holder.pid, mem="3G")
        await nvml_hostd.kill()
        nvml_hostd.state.rename(nvml_hostd.state.with_name("elsewhere"))
        await nvml_hostd.again()
        assert nvml_hostd.welcome["needs_floor"]
        assert not (await nvml_hostd.ask("set_floor", fence=9))["needs_floor"]
        with pytest.raises(Refused) as refused:
            await nvml_hostd.ask("hold", lease_id="L2", fence=10, slots=slots)
        assert refused.value.code == "occupied" and str(holder.pid) in refused.value.message
        await nvml_hostd.ask("hold", lease_id="L1", fence=10, slots=slots)
        assert (await nvml_hostd.card(uuid)).get("state", "ok") == "ok", "it is the holder's"
    finally:
        holder.kill()
        await holder.wait()


async def test_a_foreign_process_makes_a_card_occupied_and_is_not_touched(nvml_hostd, nvml):
    uuid = nvml.uuids()[0]
    stranger = await asyncio.create_subprocess_exec("sleep", "100", "--", env={"SECRET_ARG": "x"})
    try:
        nvml.use(0, stranger.pid, mem="3G")
        card = await nvml_hostd.card_in(uuid, "occupied")
        assert card["processes"] == [
            {
                "pid": stranger.pid,
                "user": card["processes"][0]["user"],
                "program": "sleep",
                "memory_mib": 3072,
                "state": "S",
            }
        ]
        refused = await refuses(nvml_hostd, uuid, "no")
        assert refused.code == "occupied" and str(stranger.pid) in refused.message
        assert refused.detail["processes"][0]["memory_mib"] == 3072
        check = await nvml_hostd.ask("check", slots=[{"uuid": uuid}])
        assert not check["clean"] and check["unclean"][0]["pid"] == stranger.pid
        assert await serves(nvml_hostd, nvml.uuids()[1], "a1") == "1"
        assert stranger.returncode is None
    finally:
        stranger.kill()
        await stranger.wait()
    await nvml_hostd.card_in(uuid, "ok")
    assert await serves(nvml_hostd, uuid, "a0") == "0"


async def test_a_process_that_nobody_here_can_see_counts_too(nvml_hostd, nvml):
    uuid = nvml.uuids()[1]
    nvml.foreign(1, 4_000_000, mem="1G")
    card = await nvml_hostd.card_in(uuid, "occupied")
    assert card["processes"][0]["pid"] == 4_000_000 and card["processes"][0].get("user") is None
    nvml.evict(1)
    await nvml_hostd.card_in(uuid, "ok")


async def test_memory_that_no_process_explains_makes_a_card_occupied(nvml_hostd, nvml):
    nvml.set(0, mem_used="9G")
    card = await nvml_hostd.card_in(nvml.uuids()[0], "occupied")
    assert card.get("processes", []) == [] and "MiB" in card["reason"]
    assert (await refuses(nvml_hostd, nvml.uuids()[0], "no")).code == "occupied"


async def test_residents_may_stay(tmp_path, nvml, nvml_libdir):
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir), residents=["python3", os.path.basename(PY)]) as hostd:
        nvml.use(0, os.getpid(), mem="100M", kind="G")
        card = await hostd.card(nvml.uuids()[0])
        program = card["processes"][0]["program"]
        if program in ("python3", os.path.basename(PY)):
            assert card["processes"][0]["resident"] and card.get("state", "ok") == "ok"
        else:
            assert card["state"] == "occupied", program


async def test_our_own_job_on_its_card_is_explained_and_its_peak_is_kept(nvml_hostd, nvml):
    uuid = nvml.uuids()[2]
    begun = await nvml_hostd.start("a1", ["sh", "-c", "sleep 100 & wait"], uuid)
    nvml.use(2, begun["pid"], mem="5G")
    card = await nvml_hostd.card(uuid)
    assert card.get("state", "ok") == "ok" and card["processes"][0]["attempt_id"] == "a1"
    child = await until(lambda: Path(f"/proc/{begun['pid']}/task/{begun['pid']}/children").read_text().split())
    nvml.use(2, int(child[0]), mem="7G")
    seen = (await nvml_hostd.card(uuid))["processes"]
    assert {one["attempt_id"] for one in seen} == {"a1"} and {one["lease_id"] for one in seen} == {"lease-a1"}
    # telemetry comes once a second while something runs, and with it the peak
    sampled = len(nvml_hostd.link.telemetry)
    await until(lambda: len(nvml_hostd.link.telemetry) >= sampled + 2, "two samples")
    await nvml_hostd.kill()
    await nvml_hostd.again()
    assert (await nvml_hostd.card(uuid)).get("state", "ok") == "ok", "still explained after a restart"
    await nvml_hostd.stop("a1")
    end = await nvml_hostd.ended("a1")
    assert end["exit"]["peak_card_memory_mib"] == {uuid: 12 * 1024} and end["clean"]


async def test_what_stays_on_the_card_after_the_end_keeps_the_slot_unclean_until_it_goes(nvml_hostd, nvml):
    """A job that left work to a daemon outside its tree, as `docker run` does."""
    uuid = nvml.uuids()[0]
    await nvml_hostd.start("a1", ["sleep", "0.3"], uuid)
    nvml.foreign(0, 4_000_001, mem="2G")
    end = await nvml_hostd.ended("a1")
    assert end["state"] == "exited" and not end["clean"] and end["unclean"][0]["pid"] == 4_000_001
    assert (await refuses(nvml_hostd, uuid, "a2")).code == "occupied"
    nvml.evict(0)
    report = await until(lambda: next((m for m in nvml_hostd.reports if m["report"] == "clean"), None))
    assert report["body"]["lease_id"] == "lease-a1" and report["body"]["check"]["clean"]
    assert await serves(nvml_hostd, uuid, "a3") == "0"


async def test_a_process_under_a_direct_lease_is_explained_and_must_go_after_it(nvml_hostd, nvml):
    uuid = nvml.uuids()[1]
    check = await nvml_hostd.ask("hold", lease_id="L1", fence=9, slots=[{"uuid": uuid}])
    assert check["clean"]
    worker = await asyncio.create_subprocess_exec("sleep", "100", env={"COTENANT_LEASE": "L1"})
    try:
        await until(lambda: b"sleep" in Path(f"/proc/{worker.pid}/cmdline").read_bytes())
        nvml.use(1, worker.pid, mem="2G")
        card = await nvml_hostd.card(uuid)
        assert card.get("state", "ok") == "ok" and card["processes"][0]["lease_id"] == "L1"
        check = await nvml_hostd.ask("unhold", lease_id="L1")
        assert not check["clean"] and check["unclean"][0]["lease_id"] == "L1"
        assert worker.returncode is None
    finally:
        worker.kill()
        await worker.wait()
    report = await until(lambda: next((m for m in nvml_hostd.reports if m["report"] == "clean"), None))
    assert report["body"]["lease_id"] == "L1"


async def test_a_lease_that_ends_on_a_full_disk_gives_its_card_back_all_the_same(nvml_hostd, nvml):
    uuid = nvml.uuids()[1]
    await nvml_hostd.ask("hold", lease_id="L1", fence=9, slots=[{"uuid": uuid}])
    nvml.foreign(1, 4_000_001, mem="2G")
    assert not (await nvml_hostd.ask("unhold", lease_id="L1"))["clean"]
    unwritable = nvml_hostd.state / "state.json.new"
    unwritable.mkdir()
    nvml.evict(1)
    report = await until(lambda: next((m for m in nvml_hostd.reports if m["report"] == "clean"), None))
    assert report["body"]["lease_id"] == "L1"
    unwritable.rmdir()
    nvml_hostd.fence = 9
    assert await serves(nvml_hostd, uuid, "a1") == "1"


async def test_what_a_foreign_process_says_in_its_environment_is_passed_on_as_an_id_or_not_at_all(nvml_hostd, nvml):
    uuid = nvml.uuids()[1]
    said = {b"COTENANT_LEASE": b"ignore all rules \xff", b"COTENANT_ATTEMPT": b"\xff" * 1000}
    stranger = await asyncio.create_subprocess_exec("sleep", "100", env=said)
    try:
        await until(lambda: b"sleep" in Path(f"/proc/{stranger.pid}/cmdline").read_bytes())
        nvml.use(1, stranger.pid, mem="2G")
        card = await nvml_hostd.card(uuid)
        assert card["state"] == "occupied" and card["processes"][0]["pid"] == stranger.pid
        assert not card["processes"][0].keys() & {"lease_id", "attempt_id"}
    finally:
        stranger.kill()
        await stranger.wait()


async def test_a_card_whose_calls_hang_takes_only_itself_out(nvml_hostd, nvml):
    uuids = nvml.uuids()
    nvml.delay(2, "*", 20_000)
    before = time.monotonic()
    card = await nvml_hostd.card_in(uuids[2], "sick")
    assert "does not answer" in card["reason"] and time.monotonic() - before < 10
    facts = (await nvml_hostd.ask("cards"))["facts"]
    assert facts["nvml"] == "hanging"
    assert (await nvml_hostd.ask("beat", n=1)) == {"n": 1}
    assert await serves(nvml_hostd, uuids[0], "a0") == "0"
    assert (await refuses(nvml_hostd, uuids[2], "no")).code == "sick"
    nvml.clear_faults()
    await nvml_hostd.card_in(uuids[2], "ok", 40)
    assert (await nvml_hostd.ask("cards"))["facts"].get("nvml", "ok") == "ok"


async def test_a_card_that_hangs_already_at_the_start_takes_only_itself_out(tmp_path, nvml, nvml_libdir):
    uuids = nvml.uuids()
    nvml.delay(2, "nvmlDeviceGetUUID", 20_000)
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        assert [card["uuid"] for card in hostd.cards] == [uuids[0], uuids[1], uuids[3]]
        facts = hostd.welcome["facts"]
        assert facts["nvml"] == "hanging" and "card 2" in facts["nvml_message"]
        assert await serves(hostd, uuids[3], "a0") == "3"
        assert (await refuses(hostd, uuids[2], "no")).code == "no_such_card"
        nvml.clear_faults()
        await hostd.card_in(uuids[2], "ok", 40)
        assert (await hostd.ask("cards"))["facts"].get("nvml", "ok") == "ok"
        assert await serves(hostd, uuids[2], "a2") == "2"


async def test_a_driver_that_hangs_altogether_leaves_hostd_answering(nvml_hostd, nvml):
    begun = await nvml_hostd.start("a1", ["sleep", "100"], nvml.uuids()[0])
    nvml.delay(None, "nvmlDeviceGetCount", 15_000)
    await nvml_hostd.card_in(nvml.uuids()[1], "sick")
    assert (await nvml_hostd.ask("cards"))["facts"]["nvml"] == "hanging"
    await nvml_hostd.start("cpu", ["sh", "-c", "exit 8"])
    assert (await nvml_hostd.ended("cpu"))["exit"]["code"] == 8
    os.kill(begun["pid"], 0)
    nvml.clear_faults()
    await nvml_hostd.card_in(nvml.uuids()[1], "ok", 40)
    await nvml_hostd.stop("a1")
    assert (await nvml_hostd.ended("a1"))["clean"]


async def test_the_driver_goes_and_comes_back(nvml_hostd, nvml):
    uuids = nvml.uuids()
    begun = await nvml_hostd.start("a1", ["sleep", "100"], uuids[0])
    nvml.unload_driver()
    await nvml_hostd.card_in(uuids[1], "unverified")
    assert (await nvml_hostd.ask("cards"))["facts"]["nvml"] == "no_driver"
    assert (await refuses(nvml_hostd, uuids[1], "no")).code == "unverified"
    await until(lambda: any(m["report"] == "facts" for m in nvml_hostd.reports), "a report of the driver's state")
    os.kill(begun["pid"], 0)
    nvml.load_driver()
    await nvml_hostd.card_in(uuids[1], "ok")
    assert await serves(nvml_hostd, uuids[1], "a2") == "1"


async def test_indices_shift_after_a_reload_and_uuids_do_not(nvml_hostd, nvml):
    uuids = nvml.uuids()
    assert await serves(nvml_hostd, uuids[2], "before") == "2"
    nvml.remove(0)
    nvml.unload_driver()
    await nvml_hostd.card_in(uuids[2], "unverified")
    nvml.load_driver()
    await nvml_hostd.card_in(uuids[2], "ok")
    assert await serves(nvml_hostd, uuids[2], "after") == "1"
    assert (await nvml_hostd.card(uuids[0]))["state"] == "lost"


@pytest.mark.parametrize(
    ("code", "word"), [(9, "no_driver"), (18, "version_mismatch"), (999, "error"), (12, "no_library")]
)
async def test_what_is_wrong_at_the_start_is_told_apart(tmp_path, nvml, nvml_libdir, code, word):
    nvml.set(None, init_error=code)
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        assert hostd.welcome["facts"]["nvml"] == word and hostd.welcome["facts"]["nvml_message"]
        assert hostd.cards == [] if "cards" in hostd.welcome else True
        await hostd.start("cpu", ["sh", "-c", "exit 8"])
        assert (await hostd.ended("cpu"))["exit"]["code"] == 8


async def test_after_an_upgrade_of_the_driver_hostd_starts_over_and_nothing_ends(nvml_hostd, nvml):
    """The loaded library stays for the life of a process: only a new one can speak to the new driver."""
    uuid = nvml.uuids()[0]
    begun = await nvml_hostd.start("a1", ["sleep", "100"], uuid)
    nvml.set(None, init_error=18)
    nvml.unload_driver()
    await nvml_hostd.card_in(uuid, "unverified")
    nvml.load_driver()
    link = nvml_hostd.link
    await until(lambda: link.closed, "the old process's end")
    line = await asyncio.wait_for(nvml_hostd.process.stdout.readline(), 30)
    assert line.startswith(b"ready ")
    welcome = await nvml_hostd.greet()
    assert welcome["facts"]["nvml"] == "version_mismatch" and welcome["attempts"][0]["pid"] == begun["pid"]
    nvml.set(None, init_error=None, driver="590.1")
    await nvml_hostd.card_in(uuid, "ok")
    assert (await nvml_hostd.ask("cards"))["facts"]["driver"] == "590.1"
    await nvml_hostd.stop("a1")
    assert (await nvml_hostd.ended("a1"))["exit"]["reason"] == "cancel"


async def test_processes_that_cannot_be_told_make_a_card_unverified(nvml_hostd, nvml):
    nvml.error(1, "nvmlDeviceGetComputeRunningProcesses", 3)
    await nvml_hostd.card_in(nvml.uuids()[1], "unverified")
    assert (await refuses(nvml_hostd, nvml.uuids()[1], "no")).code == "unverified"
    assert await serves(nvml_hostd, nvml.uuids()[0], "a0") == "0"


async def test_an_error_of_one_card_is_its_own(nvml_hostd, nvml):
    nvml.error(1, "nvmlDeviceGetMemoryInfo", 999)
    assert "Unknown" in (await nvml_hostd.card_in(nvml.uuids()[1], "sick"))["reason"]
    nvml.error(2, "nvmlDeviceGetTemperature", 999)
    card = await nvml_hostd.card(nvml.uuids()[2])
    assert card.get("state", "ok") == "ok" and card.get("temperature_c") is None


async def test_mig_instances_are_cards_of_their_own(tmp_path, nvml, nvml_libdir):
    nvml.mig(3, ["1g.10gb", "3g.40gb"])
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        instances = [card for card in hostd.cards if card.get("mig_parent")]
        assert len(hostd.cards) == 5 and [card["memory_mib"] for card in instances] == [10 * 1024, 40 * 1024]
        assert {card["mig_parent"] for card in instances} == {nvml.uuid(3)}
        assert await serves(hostd, instances[0]["uuid"], "a1") == instances[0]["uuid"]
        await hostd.start("a2", ["printenv", "CUDA_VISIBLE_DEVICES"], nvml.uuids()[0], visible_by="uuid")
        await hostd.ended("a2")
        assert (await hostd.log_text("a2")).strip() == nvml.uuids()[0]


async def test_a_second_hostd_sees_the_cards_that_the_first_has_leased(nvml_hostd, tmp_path, nvml, nvml_libdir):
    uuids = nvml.uuids()
    await nvml_hostd.start("a1", ["sleep", "100"], uuids[0])
    await nvml_hostd.ask("hold", lease_id="L1", fence=99, slots=[{"uuid": uuids[1]}])
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir), name="second", lock_dir=nvml_hostd.locks) as second:
        for number, uuid in enumerate(uuids[:2]):
            assert (await refuses(second, uuid, f"no{number}")).code == "locked"
        assert await serves(second, uuids[2], "yes") == "2"
        # the shim keeps its card locked while its hostd is dead
        await nvml_hostd.kill()
        assert (await refuses(second, uuids[0], "no2")).code == "locked"
        await nvml_hostd.again()
        assert (await refuses(second, uuids[1], "no3")).code == "locked"
        await nvml_hostd.stop("a1")
        assert (await nvml_hostd.ended("a1"))["clean"]
        await nvml_hostd.ask("unhold", lease_id="L1")
        assert await serves(second, uuids[0], "yes2") == "0" and await serves(second, uuids[1], "yes3") == "1"
        assert (await second.start("whole", ["true"], slots=(SlotRef(uuids[3]),)))["pid"]


# ---- which cards are joined


def joined(hostd, nvml, uuids=()):
    """{(card, card): links} by number, as the welcome or the newest report says."""
    number = {uuid: n for n, uuid in enumerate(uuids or nvml.uuids())}
    told = [m["body"]["links"] for m in hostd.reports if m["report"] == "links"]
    pairs = told[-1] if told else hostd.welcome.get("links", [])
    return {tuple(sorted((number[p["a"]], number[p["b"]]))): p["links"] for p in pairs}


async def test_cards_without_nvlink_are_joined_to_none(nvml_hostd, nvml):
    assert "links" not in nvml_hostd.welcome and joined(nvml_hostd, nvml) == {}


@pytest.mark.parametrize(
    ("peers", "wanted"),
    [
        # pairs with bridges, one of the links down
        (["1,1", "0,-", "3,3", "2,2"], {(0, 1): 2, (2, 3): 2}),
        (["1,-", "0,-", "3", "2"], {(0, 1): 1, (2, 3): 1}),
        # a ring, and one diagonal
        (["1,3", "0,2,3", "1,3", "0,2,1"], {(0, 1): 1, (0, 3): 1, (1, 2): 1, (2, 3): 1, (1, 3): 1}),
        # switches join all; one card has fewer links up
        (["S,S,S,S", "S,S,S,S", "S,S,S,-", "S,S,S,S"], {(0, 1): 4, (0, 2): 3, (0, 3): 4, (1, 2): 3, (1, 3): 4, (2, 3): 3}),
        # two cards behind a switch, the others alone
        (["S,S", "S,S", None, "-,-"], {(0, 1): 2}),
    ],
)  # fmt: skip
async def test_who_is_joined_with_whom(tmp_path, nvml, nvml_libdir, peers, wanted):
    for gpu, ends in enumerate(peers):
        nvml.set(gpu, nvpeers=ends)
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        assert joined(hostd, nvml) == wanted


async def test_a_card_whose_links_hang_takes_only_itself_out(tmp_path, nvml, nvml_libdir):
    for gpu, ends in enumerate(["1,1", "0,0", "3", "2"]):
        nvml.set(gpu, nvpeers=ends)
    nvml.delay(0, "nvmlDeviceGetNvLinkState", 60_000)
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        states = [card.get("state", "ok") for card in hostd.cards]
        assert states == ["sick", "ok", "ok", "ok"]
        assert (2, 3) in joined(hostd, nvml)
        assert await serves(hostd, nvml.uuid(1), "a1")


@pytest.mark.parametrize("fn", ["nvmlDeviceGetNvLinkState", "nvmlDeviceGetNvLinkRemotePciInfo"])
async def test_links_that_cannot_be_read_are_none(tmp_path, nvml, nvml_libdir, fn):
    for gpu, ends in enumerate(["1", "0", "3", "2"]):
        nvml.set(gpu, nvpeers=ends)
    nvml.error(0, fn, 3)
    nvml.error(1, fn, 3)
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        assert joined(hostd, nvml) == {(2, 3): 1}
        assert [card.get("state", "ok") for card in hostd.cards] == ["ok"] * 4


async def test_a_divided_card_has_no_links(tmp_path, nvml, nvml_libdir):
    for gpu, ends in enumerate(["S", "S", "S", "S"]):
        nvml.set(gpu, nvpeers=ends)
    nvml.mig(3, ["1g.10gb", "3g.40gb"])
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        assert joined(hostd, nvml) == {(0, 1): 1, (0, 2): 1, (1, 2): 1}


async def test_a_card_that_comes_later_brings_its_links(tmp_path, nvml, nvml_libdir):
    for gpu, ends in enumerate(["1", "0", "3", "2"]):
        nvml.set(gpu, nvpeers=ends)
    uuids = nvml.uuids()
    nvml.unload_driver()
    async with Hostd(tmp_path, env=nvml.env(nvml_libdir)) as hostd:
        assert joined(hostd, nvml, uuids) == {}
        nvml.load_driver()
        await until(lambda: joined(hostd, nvml, uuids) == {(0, 1): 1, (2, 3): 1}, "the links are told")
