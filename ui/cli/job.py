"""`cotenant job`: look at jobs, wait for them, stop them, start them again."""

from __future__ import annotations

from cotenant.ui.cli import ask, show, waiting
from cotenant.ui.cli.fleet import clock
from cotenant.ui.cli.problems import EXIT_REFUSED, Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]


def configure(parser: Parser, _: str) -> None:
    listing = parser.sub(
        "list", act_list, "jobs, newest first", example="cotenant job list --state failed --since 2026-09-01T00:00:00Z"
    )
    listing.add_argument("--state", help="active, waiting, final, or one state (all)")
    for name, what in (
        ("pool", "in this pool"),
        ("owner", "of this owner"),
        ("holder", "of this caller"),
        ("host", "on this host"),
    ):
        listing.add_argument(f"--{name}", help=f"only {what}")
    listing.add_argument("--label", metavar="K=V", help="only with this label")
    listing.add_argument("--array", metavar="JOB", help="the elements of this array that have started")
    listing.add_argument("--since", metavar="TIME", help="only submitted at or after this ISO time")
    listing.add_argument("--limit", type=int, help="at most so many (20)")
    listing.add_argument("--cursor", help="go on where an earlier list ended")

    _on_job(parser, "show", act_show, "one job with its attempts and why it waits")
    explain = _on_job(parser, "explain", act_explain, "why a job waits, or how it ended, and what would help")
    explain.add_argument("--detail", action="store_true", help="also each host, and what fails there")
    wait = _on_job(parser, "wait", act_wait, "wait until a job is over; exit with its code")
    wait.add_argument(
        "--timeout", type=ask.number, metavar="S", help="give up after so many seconds (exit code 1); the job goes on"
    )
    cancel = _on_job(parser, "cancel", act_cancel, "stop a job for good")
    _on_elements(cancel)
    _as_operator(cancel)
    ask.yes_option(cancel)
    retry = _on_job(parser, "retry", act_retry, "run a job that is over once more, as a new job")
    _on_elements(retry)
    retry.add_argument("--failed", action="store_true", help="of an array: only the elements that failed")
    modify = _on_job(
        parser,
        "modify",
        act_modify,
        "change what a job asks for; it keeps its place in the line",
        more=" --priority high",
    )
    for name, kind, what in _CHANGES:
        modify.add_argument(f"--{name}", type=kind, help=what)
    modify.add_argument("--label", metavar="K=V", action="append", help="its labels from now on; again for more")
    _as_operator(modify)
    signal = _on_job(parser, "signal", act_signal, "send a signal to a running job's processes", more=" USR1")
    signal.add_argument("signal", metavar="SIGNAL", help="name or number, such as USR1, CONT, 12")
    _on_job(parser, "checkpoint", act_checkpoint, "tell a running job to save a checkpoint now, without stopping it")
    hold = _on_job(parser, "hold", act_hold, "keep a waiting job from starting")
    _on_elements(hold)
    _as_operator(hold, reason_for="why; recorded")
    release = _on_job(parser, "release", act_release, "let a held job start")
    _on_elements(release)
    _as_operator(release)
    suspend = _on_job(parser, "suspend", act_suspend, "freeze a running job's processes; it keeps its cards")
    _as_operator(suspend, reason_for="why; recorded")
    resume = _on_job(parser, "resume", act_resume, "let a suspended job go on")
    _as_operator(resume)
    hand_over = _on_job(
        parser,
        "hand-over",
        act_hand_over,
        "offer a job to another caller, or accept one offered to you",
        more=" bob-claude",
    )
    hand_over.add_argument("to", metavar="TO", help="who shall have it; your own name to accept an offer")
    evict = _on_job(parser, "evict", act_evict, "take a running job off its cards (people only)", more=' --reason "…"')
    evict.add_argument("--reason", required=True, help="why; the owner and the audit see it")
    evict.add_argument("--now", action="store_true", help="do not give it time to save first")
    ask.yes_option(evict)
    abandon = _on_job(
        parser,
        "abandon",
        act_abandon,
        "give a lost job up, though its process may still run (people only)",
        more=' --reason "…"',
    )
    abandon.add_argument("--reason", required=True, help="why; recorded")
    ask.yes_option(abandon)


#: Options of `job modify`: how they are read, and what they say.
_CHANGES = (
    ("priority", str, "critical, high, normal or batch"),
    ("hours", float, "time limit"),
    ("pool", str, "another pool; there it goes to the end of the line"),
    ("gpus", int, "cards"),
    ("gpu-memory-mib", int, "MiB that each card must have at least"),
    ("gpu-model", str, "part of the card's model name"),
    ("cpus", int, "processors booked on the host"),
    ("memory-mib", int, "host memory booked, MiB"),
    ("disk-mib", int, "disk booked on the host, MiB"),
    ("max-attempts", int, "tries in all"),
    ("max-parallel", int, "elements of an array at once"),
    ("name", str, "short name for people"),
    ("purpose", str, "why"),
)


def _on_job(parser: Parser, name: str, act: Any, what: str, *, more: str = "") -> argparse.ArgumentParser:
    sub = parser.sub(name, act, what, example=f"cotenant job {name} JOB{more}")
    sub.add_argument("job", metavar="JOB")
    return sub


def _on_elements(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--indices", metavar="I,I-J", help="of an array: only these elements, as 3-9,12")


def _as_operator(parser: argparse.ArgumentParser, *, reason_for: str = "why; recorded") -> None:
    parser.add_argument("--reason", default="", help=reason_for)
    parser.add_argument("--operate", action="store_true", help="act on anybody's job (people only; needs --reason)")


def _operate(args: argparse.Namespace, verb: str, **more: Any) -> Answer:
    if getattr(args, "indices", None) is not None:
        raise Usage("--operate acts on whole jobs: leave --indices out, or act with the owner's token.")
    if not args.reason.strip():
        raise Usage("--operate needs --reason: it is recorded and the owner sees it.")
    return ask.client(args).operate(verb, {"job_id": args.job, **more}, args.reason)


def act_list(args: argparse.Namespace) -> int:
    names = ("state", "pool", "owner", "holder", "host", "label", "since", "array", "limit", "cursor")
    answer = ask.client(args).call_tool("list_jobs", {name: getattr(args, name) for name in names})
    if args.json:
        show.as_json(answer)
        return 0
    table(answer["jobs"], empty="No job.")
    if answer.get("cursor"):
        show.say(f"{answer['total']} in all; there are more: --cursor {answer['cursor']}")
    return 0


def table(jobs: list[Answer], *, empty: str) -> None:
    """Jobs as a table: for how long they ran, and why they wait or how they ended."""
    rows = (
        (
            j["job_id"], standing(j), j["name"], j["holder"], j["pool"], j["gpus"], j["priority"], j.get("host"),
            show.span(j.get("running_s")), f"{show.span(j['age_s'])} ago", j.get("exit_code"), j.get("blocker") or ended_because(j),
        )
        for j in jobs
    )  # fmt: skip
    heads = ("JOB", "STATE", "NAME", "HOLDER", "POOL", "GPUS", "PRIORITY", "HOST", "RUN", "SUBMITTED", "EXIT", "WHY")
    show.table(rows, heads, empty=empty)


def standing(job: Answer) -> str:
    """A job's state in one cell; of an array also how many of its elements are where."""
    array = job.get("array")
    if not array:
        return str(job["state"])
    kinds = ("pending", "held", "running", "succeeded", "failed", "cancelled")
    counts = [f"{array[kind]} {kind}" for kind in kinds if array[kind]]
    return f"{job['state']}: {', '.join(counts)}"


def ended_because(row: Answer) -> str | None:
    """Why an ended job ended as it did, in one cell; None where there is nothing to explain, or it may not be seen."""
    if row["state"] == "succeeded" or not row.get("message") or row.get("array"):
        return None
    said = show.ours(row["message"])
    return f"{row['failure_class']}: {said}" if row.get("failure_class") else said


def act_show(args: argparse.Namespace) -> int:
    job = ask.client(args).call_tool("get_job", {"job_id": args.job})
    if args.json:
        show.as_json(job)
    else:
        tell(job)
    return 0


def act_explain(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("explain_job", {"job_id": args.job, "detail": args.detail or None})
    if args.json:
        show.as_json(answer)
        return 0
    show.out(show.ours(answer["summary"]))
    show.blockers(answer)
    if answer.get("starts_by"):
        show.out(f"it starts by {clock(answer['starts_by'])} at the latest")
    for attempt in answer["attempts"]:
        show.out(show.ours(attempt))
    for host in answer.get("hosts", ()):
        why = "; ".join(show.ours(b["message"]) for b in host["blockers"]) or "would do now"
        show.out(f"  {show.cell(host['host'])}: {why}")
    if answer.get("hosts_left_out"):
        show.out(f"  and {answer['hosts_left_out']} more hosts")
    for step in answer["next_actions"]:
        show.out(f"next: {show.ours(step)}")
    return 0


def act_wait(args: argparse.Namespace) -> int:
    job = waiting.for_job(ask.client(args), args.job, timeout_s=args.timeout)
    if args.json:
        show.as_json(job)
    elif job["state"] in waiting.JOB_FINAL:
        show.say(ending(job))
    else:
        show.say(f"{job['job_id']} is still {waiting.reason(job)}")
    return waiting.exit_code(job) if job["state"] in waiting.JOB_FINAL else EXIT_REFUSED


def ending(job: Answer) -> str:
    """How a final job ended, in one line."""
    code = job.get("exit_code")
    parts = [f"{job['job_id']} {job['state']}"]
    if code is not None:
        parts.append(f"exit code {code}")
    if job.get("running_s") is not None:
        parts.append(f"ran {show.span(job['running_s'])}")
    if job.get("failure_class"):
        parts.append(str(job["failure_class"]))
    return show.ours(", ".join(parts) + (f": {job['message']}" if job.get("message") else ""))


def attempt_ending(attempt: Answer) -> str:
    """The same of one attempt of a job."""
    parts = [f"attempt {attempt['epoch']} {attempt['state']}"]
    if attempt.get("exit_code") is not None:
        parts.append(f"exit code {attempt['exit_code']}")
    if attempt.get("failure_class"):
        parts.append(str(attempt["failure_class"]))
    return show.ours(", ".join(parts) + (f": {attempt['message']}" if attempt.get("message") else ""))


def act_cancel(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Stop job {args.job} for good?")
    if args.operate:
        answer = _operate(args, "job.cancel")
    else:
        # Asked twice is the rule for what is final: the first answer brings the token that the second must carry.
        wanted = {"job_id": args.job, "indices": args.indices}
        answer = client.call_tool("cancel_job", wanted)
        if answer.get("status") == "confirmation_required":
            answer = client.call_tool("cancel_job", {**wanted, "confirm_token": answer["confirm_token"]})
    if args.json:
        show.as_json(answer)
    else:
        show.out(show.ours(str(answer.get("message") or f"{args.job} {answer.get('state', 'cancelled')}")))
    return EXIT_REFUSED if answer.get("status") == "not_cancelled" else 0


def act_retry(args: argparse.Namespace) -> int:
    only = "failed" if args.failed else None
    job = ask.client(args).call_tool("retry_job", {"job_id": args.job, "only": only, "indices": args.indices})
    if args.json:
        show.as_json(job)
    else:
        show.out(str(job["job_id"]))
    return 0


def act_modify(args: argparse.Namespace) -> int:
    names = [name.replace("-", "_") for name, _, _ in _CHANGES]
    change: Answer = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if args.label:
        change["labels"] = ask.named(args.label, "--label")
    if not change:
        raise Usage("Say what shall be different, such as --priority high; see cotenant job modify --help.")
    if args.operate:
        return _brief(args, _operate(args, "job.modify", change=change))
    wanted = {"job_id": args.job, "reason": args.reason or None, **change}
    return _brief(args, ask.client(args).call_tool("modify_job", wanted))


def act_signal(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("signal_job", {"job_id": args.job, "signal": _signal_name(args.signal)})
    if args.json:
        show.as_json(answer)
    else:
        show.out(
            f"{answer['signal']} {'delivered to' if answer['delivered'] else 'not delivered to'} {answer['attempt_id']}"
        )
    return 0 if answer["delivered"] else EXIT_REFUSED


def act_checkpoint(args: argparse.Namespace) -> int:
    answer = ask.client(args).call_tool("checkpoint_job", {"job_id": args.job})
    if args.json:
        show.as_json(answer)
    elif answer["status"] == "saved":
        show.out(f"saved: {show.cell(answer.get('checkpoint') or '-')}")
    else:
        show.out(
            f"{answer['attempt_id']} {'was told to save' if answer['told'] else 'will be told when its host answers'}"
        )
    return 0


def _signal_name(word: str) -> str:
    """USR1 for 10: kill takes numbers, the server names. Raises Usage for a number that is no signal."""
    import signal

    if not word.isascii() or not word.isdigit():
        return word
    try:
        return signal.Signals(int(word)).name
    except ValueError:
        raise Usage(f"There is no signal {word}; `kill -l` lists them.") from None


def act_hold(args: argparse.Namespace) -> int:
    if args.operate:
        return _brief(args, _operate(args, "job.hold"))
    wanted = {"job_id": args.job, "indices": args.indices, "reason": args.reason or None}
    return _brief(args, ask.client(args).call_tool("hold_job", wanted))


def act_release(args: argparse.Namespace) -> int:
    if args.operate:
        return _brief(args, _operate(args, "job.unhold"))
    wanted = {"job_id": args.job, "indices": args.indices, "reason": args.reason or None}
    return _brief(args, ask.client(args).call_tool("release_job", wanted))


def act_suspend(args: argparse.Namespace) -> int:
    if args.operate:
        return _brief(args, _operate(args, "job.suspend"))
    wanted = {"job_id": args.job, "suspend": True, "reason": args.reason or None}
    return _brief(args, ask.client(args).call_tool("hold_job", wanted))


def act_resume(args: argparse.Namespace) -> int:
    if args.operate:
        return _brief(args, _operate(args, "job.resume"))
    wanted = {"job_id": args.job, "reason": args.reason or None}
    return _brief(args, ask.client(args).call_tool("release_job", wanted))


def act_hand_over(args: argparse.Namespace) -> int:
    return hand_over(args, args.job)


def hand_over(args: argparse.Namespace, object_id: str) -> int:
    """Pass a job or a lease on, or accept it."""
    answer = ask.client(args).call_tool("hand_over", {"object_id": object_id, "to": args.to})
    if args.json:
        show.as_json(answer)
    elif answer["status"] == "offered":
        show.out(f"{object_id} is offered to {show.cell(args.to)} until {clock(answer.get('until'))}")
    else:
        show.out(f"{object_id} belongs to {show.cell(answer['holder'])} now")
    return 0


def act_evict(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(args, f"Take job {args.job} off its cards?")
    return _brief(args, client.operate("job.evict", {"job_id": args.job, "now": args.now}, args.reason))


def act_abandon(args: argparse.Namespace) -> int:
    client = ask.client(args)
    ask.sure(
        args, f"Give up job {args.job}? Its process may still run and its cards stay taken until the host answers."
    )
    return _brief(args, client.operate("job.abandon", {"job_id": args.job}, args.reason))


def _brief(args: argparse.Namespace, answer: Answer) -> int:
    if args.json:
        show.as_json(answer)
    else:
        show.out(f"{args.job} {show.ours(waiting.reason(answer)) if 'state' in answer else 'done'}")
    return 0


def _cards(job: Answer) -> str:
    """Those that it has, or how many it asked for."""
    held = show.slots(job)
    return held if held != "-" else f"{job['gpus']} wanted" if job["gpus"] else "none wanted"


def _elements(job: Answer) -> str | None:
    """Of an array how its elements stand, of an element where it belongs."""
    array = job.get("array")
    if array is None:
        return None if job.get("array_id") is None else f"number {job['array_index']} of {job['array_id']}"
    limit = f", at most {array['max_parallel']} at once" if array["max_parallel"] is not None else ""
    return f"{array['indices']} of {array['size']}; {standing(job).partition(': ')[2]}{limit}"


def _checkpoint(seen: Answer | None) -> str | None:
    if not seen:
        return None
    newest = f"{seen['path']} ({show.span(seen['age_s'])} old)" if seen.get("path") else "none complete"
    return "; ".join([newest, *(f"not {skipped}" for skipped in seen.get("skipped") or ())])


def _preemption(one: Answer) -> str:
    """A stop for a higher priority, or an eviction, in one line."""
    whom = "evicted" if one["reason"] == "evict" else "preempted"
    about = f"{whom} for {one['asker']}" if one["role"] == "victim" and one.get("asker") else whom
    if one["role"] == "asker":
        about = f"{one['victim']} is {whom} for it"
    parts = [f"{about}: {one['state']}", "saved" if one["saved"] else "not saved"]
    for key, word in (("grace_used_s", "grace used"), ("lost_s", "work lost")):
        if one.get(key) is not None:
            parts.append(f"{word} {show.span(one[key])}")
    if one.get("outcome"):
        parts.append(str(one["outcome"]))
    return show.ours(", ".join(parts))


def tell(job: Answer) -> None:
    """One job for a person."""
    if job.get("dry_run"):
        would = job.get("would_start")
        starts = (
            "it would wait"
            if would is False
            else "it would start at once"
            if would
            else "when it would start is not known"
        )
        show.out(f"dry run: nothing was submitted; {starts}")
    limit = f"{job['hours']:g} h ({'asked for' if job['hours_from'] == 'hours' else job['hours_from']})"
    left = f", {show.span(job['time_left_s'])} left" if job.get("time_left_s") is not None else ""
    show.pairs(
        [
            ("job", job["job_id"]),
            ("name", job["name"]),
            ("state", job["state"] + (f" ({job['stop_reason']})" if job.get("stop_reason") else "")),
            ("elements", _elements(job)),
            ("purpose", job["purpose"]),
            ("holder", f"{job['holder']} (owner {job['owner']})"),
            ("pool", f"{job['pool']}, {job['priority']}"),
            ("cards", _cards(job)),
            ("command", job.get("command")),
            ("workdir", job.get("workdir")),
            ("labels", " ".join(f"{k}={v}" for k, v in job["labels"].items())),
            ("submitted", f"{clock(job['submitted_at'])} ({show.span(job['age_s'])} ago)"),
            ("started", clock(job.get("started_at"))),
            ("ended", clock(job.get("ended_at"))),
            ("ran", show.span(job["running_s"]) if job.get("running_s") is not None else None),
            ("time limit", limit + left),
            ("exit code", job.get("exit_code")),
            ("failure", job.get("failure_class")),
            ("message", show.ours(job.get("message") or "")),
            ("suspended" if job.get("suspended_s") else "held", job.get("held_reason")),
            ("stood still", show.span(job["suspended_s"]) if job.get("suspended_s") else None),
            ("in line", job.get("queue_position")),
            (
                "after",
                " ".join(f"{on['job']}:{on['when']}{' (met)' if on['met'] else ''}" for on in job.get("after", ())),
            ),
            ("not before", clock(job.get("not_before"))),
            ("not after", clock(job.get("not_after"))),
            ("retry of", job.get("retry_of")),
            ("checkpoint", _checkpoint(job.get("checkpoint"))),
        ]
    )
    show.blockers(job)
    for one in job.get("preemptions") or ():
        show.out(_preemption(one))
    if job["attempts"]:
        show.out()
        rows = (
            (
                a["attempt_id"], a["epoch"], a["state"], a.get("host"), show.slots(a), clock(a.get("started_at")), a.get("exit_code"),
                (a.get("exit") or {}).get("signal_name"), a.get("failure_class") or a.get("message"),
            )
            for a in job["attempts"]
        )  # fmt: skip
        show.table(rows, ("ATTEMPT", "EPOCH", "STATE", "HOST", "CARDS", "STARTED", "EXIT", "SIGNAL", "WHY"), empty="")
    ranks = job["attempts"][-1].get("ranks") if job["attempts"] else None
    if ranks:
        show.out()
        lines = ((r["rank"], r["host"], r["state"], r.get("exit_code"), r.get("message")) for r in ranks)
        show.table(lines, ("RANK", "HOST", "STATE", "EXIT", "WHY"), empty="")
    for line in job.get("log_tail") or ():
        show.out(f"  | {show.harmless(line)}")
