"""`cotenant submit`: hand a job to the server; it runs whether this terminal lives or not."""

from __future__ import annotations

import json
import os

from cotenant.ui.cli import ask, logs, place, show, waiting
from cotenant.ui.cli.problems import Usage

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.client import Client
    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]


def configure(parser: Parser, _: str) -> None:
    submit = parser.command(
        act,
        takes_command=True,
        usage="cotenant submit [options] -- CMD [ARG …]",
        example="cotenant submit --gpus 1 --hours 4 --follow -- python train.py --lr 3e-4\n"
        "  cotenant submit --gpus 0 --wait --shell 'make test | tail'",
    )
    submit.add_argument("--shell", metavar="TEXT", help="a line for /bin/sh instead of -- CMD")
    submit.add_argument(
        "--spec", metavar="FILE", help="a whole specification as JSON (- is standard input); options go before it"
    )
    submit.add_argument("--template", metavar="NAME", help="make it from a template; cotenant templates lists them")
    submit.add_argument(
        "-P", "--param", action="append", default=[], metavar="K=V", help="a parameter of the template; may be repeated"
    )
    what = submit.add_argument_group("what it is")
    what.add_argument("--name", help="short name")
    what.add_argument("--purpose", help="why; everybody sees it")
    what.add_argument("--project", help="what belongs together over months")
    what.add_argument("--experiment", help="runs to compare with each other")
    what.add_argument(
        "--kind", choices=("train", "evaluate", "inference", "export", "custom"), help="sort of work (custom)"
    )
    what.add_argument("--label", action="append", default=[], metavar="K=V", help="may be repeated")
    what.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="K=V",
        help="a hyper-parameter, kept with the run; may be repeated",
    )
    needs = submit.add_argument_group("what it needs")
    needs.add_argument("-g", "--gpus", metavar="N|MIN-MAX", help="cards; 0: a place without a card (1)")
    needs.add_argument("--pool", help="where it may run (the server's default pool)")
    needs.add_argument("--hours", type=ask.number, metavar="H", help="time limit (the pool's default)")
    needs.add_argument(
        "--priority", choices=("critical", "high", "normal", "batch"), help="who comes first in line (normal)"
    )
    needs.add_argument("--gpu-memory-mib", type=int, metavar="M", help="cards with at least this memory")
    needs.add_argument("--gpu-model", metavar="TEXT", help="cards whose model's name holds this")
    needs.add_argument("--cpus", type=int, metavar="N", help="processors booked on the host (none)")
    needs.add_argument("--memory-mib", type=int, metavar="M", help="memory booked on the host (none)")
    needs.add_argument("--disk-mib", type=int, metavar="M", help="disk booked on the host (none)")
    needs.add_argument("--nodes", type=int, metavar="N", help="hosts, each with all of the above (1)")
    needs.add_argument("--exclusive-host", action="store_true", help="nobody else on its hosts while it runs")
    needs.add_argument(
        "--host-label", action="append", default=[], metavar="K=V", help="only hosts with it; may be repeated"
    )
    needs.add_argument(
        "--prefer",
        action="append",
        default=[],
        metavar="HOST|K=V",
        help="hosts, or their labels; may be repeated, best first",
    )
    runs = submit.add_argument_group("how it runs")
    runs.add_argument(
        "-C", "--workdir", metavar="DIR", help="directory on the host (this one, where the server is on this machine)"
    )
    runs.add_argument("--own-dir", action="store_true", help="start in the attempt's own empty directory")
    runs.add_argument(
        "-e",
        "--env",
        action="append",
        default=[],
        metavar="K[=V]",
        help="a variable; without =V its value here; may be repeated",
    )
    runs.add_argument(
        "--secret",
        action="append",
        default=[],
        metavar="K=FILE",
        help="a variable with the content of a file on the host",
    )
    runs.add_argument("--pty", action="store_true", help="give it a terminal")
    runs.add_argument("--stop-grace", type=int, metavar="S", help="seconds between TERM and KILL (10)")
    runs.add_argument("--max-attempts", type=int, metavar="N", help="tries in all (1)")
    runs.add_argument("--retry-on", metavar="CLASS,…", help="failure classes that get a new attempt (gpu,host,lost)")
    runs.add_argument("--resumable", action="store_true", help="a new attempt can go on from a checkpoint")
    runs.add_argument("--not-preemptible", action="store_true", help="never stopped for a higher priority")
    runs.add_argument("--checkpoint-dir", metavar="DIR", help="directory on the host that holds checkpoints")
    runs.add_argument("--checkpoint-interval", type=int, metavar="S", help="seconds between saves")
    runs.add_argument("--checkpoint-signal", metavar="SIG", help="signal that asks it to save, such as SIGUSR1")
    runs.add_argument(
        "--resume-arg", metavar="TEXT", help="argument that takes the checkpoint's path, such as --resume={path}"
    )
    when = submit.add_argument_group("when it may start")
    when.add_argument(
        "--after",
        action="append",
        default=[],
        metavar="JOB[:ok|any|failed]",
        help="once that job, element (JOB.3) or range (JOB.0-9) has ended so (ok); may be repeated",
    )
    when.add_argument("--not-before", metavar="TIME", help="not earlier: an ISO time, or seconds from now")
    when.add_argument("--not-after", metavar="TIME", help="give up if it has not started by then")
    many = submit.add_argument_group("many of it")
    many.add_argument("--array", type=int, metavar="N", help="run it N times, with {index} from 0 to N-1")
    many.add_argument(
        "--array-params",
        metavar="FILE",
        help="run it for each set of values: a JSON list of objects, or {NAME: [values]}",
    )
    many.add_argument("--max-parallel", type=int, metavar="N", help="at most so many of them at once (all)")
    then = submit.add_argument_group("and then")
    then.add_argument("-w", "--wait", action="store_true", help="wait until it is over; exit with its code")
    then.add_argument("-f", "--follow", action="store_true", help="the same, showing what it prints")
    then.add_argument("--no-queue", action="store_true", help="refuse instead of waiting where it cannot start now")
    then.add_argument("--dry-run", action="store_true", help="say what would happen; submit nothing")
    then.add_argument("--request-id", metavar="ID", help="the same id again is the same submit (a new one)")


def act(args: argparse.Namespace) -> int:
    client = ask.client(args)
    spec = specification(args, here=place.is_loopback(client.place.url))
    spec["request_id"] = args.request_id
    spec["when_full"] = "refuse" if args.no_queue else None
    spec["dry_run"] = True if args.dry_run else None
    job = client.call_tool("submit_job", spec)
    if args.dry_run or not (args.wait or args.follow):
        if args.json:
            show.as_json(job)
        elif args.dry_run:
            from cotenant.ui.cli.job import tell

            tell(job)
        else:
            show.out(job["job_id"])
            _notes(job)
        return 0
    show.say(f"{job['job_id']} {show.ours(waiting.reason(job))}")
    _notes(job)
    try:
        job = _to_the_end(client, job, follow=args.follow and not args.json)
    except KeyboardInterrupt:
        show.say(
            f"{job['job_id']} goes on without you. See it with `cotenant logs -f {job['job_id']}`, stop it with `cotenant job cancel`."
        )
        raise
    if args.json:
        show.as_json(job)
    else:
        from cotenant.ui.cli.job import ending

        show.say(ending(job))
    return waiting.exit_code(job)


def _notes(job: Answer) -> None:
    if job.get("deduplicated"):
        show.say("the same job was submitted a moment ago and is not over: this is that job")
    if job.get("near_cap"):
        show.say("you are close to the cap of this pool")


def _to_the_end(client: Client, job: Answer, *, follow: bool) -> Answer:
    if follow:
        for answer in logs.follow(client, job["job_id"]):
            logs.write(answer)
    return waiting.for_job(client, job["job_id"])


def specification(args: argparse.Namespace, *, here: bool) -> Answer:
    """The arguments of submit_job. `here` says that the host's directories are ours.

    Raises:
        Usage: no command, two commands, or an option that cannot mean anything.
    """
    spec: Answer = dict(_read_spec(args.spec)) if args.spec else {}
    given = [x for x in (args.command_line, args.shell) if x]
    if len(given) > 1:
        raise Usage("Give the command either after -- or with --shell.")
    if args.command_line:
        ask.one_program(args.command_line, "cotenant submit [options] --shell 'LINE'")
    if given:
        spec["command"] = given[0]
    if args.template:
        spec |= {"template": args.template, "params": _values(args.param, "--param") or {}}
    elif args.param:
        raise Usage("--param needs --template.")
    if not spec.get("command") and not spec.get("template"):
        raise Usage("What shall it run? Put the command after --: cotenant submit --gpus 1 -- python train.py")
    plain = (
        "name", "purpose", "project", "experiment", "kind", "pool", "hours", "priority", "gpu_memory_mib", "gpu_model", "cpus",
        "memory_mib", "disk_mib", "nodes", "max_attempts",
    )  # fmt: skip
    found: Answer = {key: getattr(args, key) for key in plain}
    found |= {
        "gpus": _cards(args.gpus),
        "labels": ask.named(args.label, "--label"),
        "config": _values(args.config),
        "prefer": args.prefer or None,
        "host_labels": ask.named(args.host_label, "--host-label"),
        "exclusive_host": args.exclusive_host or None,
        "workdir": _workdir(args, spec, here),
        "env": _env(args.env),
        "secrets": [
            {"env": k, "file": os.path.abspath(v)} for k, v in (ask.named(args.secret, "--secret") or {}).items()
        ]
        or None,
        "pty": args.pty or None,
        "stop_grace_s": args.stop_grace,
        "retry_on": ask.split_words(args.retry_on, "--retry-on") if args.retry_on else None,
        "resumable": args.resumable or None,
        "preemptible": False if args.not_preemptible else None,
        "checkpoint": _checkpoint(args),
        "array": _array(args, spec),
        "after": _after(args.after),
        "start_window": _window(args),
    }
    spec |= {key: value for key, value in found.items() if value is not None}
    return spec


def _read_spec(path: str) -> Answer:
    value = read_json(path)
    if not isinstance(value, dict):
        raise Usage(f"{path} must hold one JSON object.")
    return value


def read_json(path: str) -> Any:
    """What a file holds (- is standard input).

    Raises:
        Usage: it cannot be read, or is not JSON.
    """
    import sys

    try:
        if path == "-":
            return json.load(sys.stdin)
        with open(path, "rb") as file:
            return json.load(file)
    except OSError as exc:
        raise Usage(f"{path} cannot be read: {exc.strerror}.") from exc
    except ValueError as exc:
        raise Usage(f"{path} is not JSON: {exc}.") from exc


def _after(words: list[str]) -> list[Answer] | None:
    out = []
    for word in words:
        job, colon, when = word.partition(":")
        if colon and when not in ("ok", "any", "failed"):
            raise Usage(f"--after {word}: after the colon comes ok, any or failed.")
        out.append({"job": job, "when": when or "ok"})
    return out or None


def _window(args: argparse.Namespace) -> Answer | None:
    """Times as they are, numbers as seconds from now."""
    found: Answer = {}
    for name in ("not_before", "not_after"):
        text = getattr(args, name)
        if text is not None:
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = text
    return found or None


def _array(args: argparse.Namespace, spec: Answer) -> Answer | None:
    if args.array is not None and args.array_params:
        raise Usage("Give either --array or --array-params.")
    given = spec.get("array")
    found: Answer = dict(given) if isinstance(given, dict) else {} if given is None else {"n": given}
    if args.array is not None:
        found = {"n": args.array}
    elif args.array_params:
        value = read_json(args.array_params)
        if not isinstance(value, (list, dict)):
            raise Usage(f"{args.array_params} must hold a list of objects, or one object with a list for each name.")
        found = {"params" if isinstance(value, list) else "grid": value}
    if args.max_parallel is not None:
        if not found:
            raise Usage("--max-parallel needs --array or --array-params.")
        found["max_parallel"] = args.max_parallel
    return found or None


def _cards(text: str | None) -> int | Answer | None:
    if text is None:
        return None
    low, dash, high = text.partition("-")
    if low.isdigit() and (not dash or high.isdigit()):
        return {"min": int(low), "max": int(high)} if dash else int(low)
    raise Usage(f"--gpus takes a number or MIN-MAX, not {text!r}.")


def _values(words: list[str], option: str = "--config") -> Answer | None:
    """K=V with V as JSON where it is some (numbers, true, lists), else as text."""
    out: Answer = {}
    for key, text in (ask.named(words, option) or {}).items():
        try:
            out[key] = json.loads(text)
        except ValueError:
            out[key] = text
    return out or None


def _workdir(args: argparse.Namespace, spec: Answer, here: bool) -> str | None:
    if args.own_dir:
        if args.workdir:
            raise Usage("Give either --workdir or --own-dir.")
        spec.pop("workdir", None)
        return None
    if args.workdir:
        return os.path.abspath(args.workdir) if here else str(args.workdir)
    if not here or "workdir" in spec:
        return None
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise Usage("The current directory is gone. Go to another, or give --workdir DIR or --own-dir.") from None


def _env(words: list[str]) -> dict[str, str] | None:
    out: dict[str, str] = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not mark:
            if (here := os.environ.get(name)) is None:
                raise Usage(f"--env {name}: there is no such variable here; give {name}=VALUE.")
            value = here
        out[name] = value
    return out or None


def _checkpoint(args: argparse.Namespace) -> Answer | None:
    if not args.checkpoint_dir:
        if args.checkpoint_interval or args.resume_arg or args.checkpoint_signal:
            raise Usage("--checkpoint-interval, --checkpoint-signal and --resume-arg need --checkpoint-dir.")
        return None
    values = {
        "dir": args.checkpoint_dir,
        "interval_s": args.checkpoint_interval,
        "resume_arg": args.resume_arg,
        "signal": args.checkpoint_signal,
    }
    return {key: value for key, value in values.items() if value is not None}
