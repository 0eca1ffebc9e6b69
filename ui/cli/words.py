"""What the server says to agents, in the command line's own words.

The server's sentences name MCP tools and their arguments, since agents read them. A person at a terminal has commands and
options instead, so before such a sentence is shown each name gives way to what does the same here. `--json` shows the
server's words as they came. What others wrote stands in sentences as quoted JSON strings and is left alone.
"""

from __future__ import annotations

import re

#: Every MCP tool -> the command that calls it.
TOOLS: dict[str, str] = {
    "quota_status": "cotenant quota",
    "list_gpus": "cotenant gpus",
    "acquire_lease": "cotenant lease acquire",
    "heartbeat": "cotenant lease heartbeat",
    "release_lease": "cotenant lease release",
    "list_leases": "cotenant lease list",
    "hand_over": "cotenant lease hand-over",
    "submit_job": "cotenant submit",
    "get_job": "cotenant job show",
    "list_jobs": "cotenant job list",
    "wait_job": "cotenant job wait",
    "tail_logs": "cotenant logs",
    "cancel_job": "cotenant job cancel",
    "retry_job": "cotenant job retry",
    "signal_job": "cotenant job signal",
    "checkpoint_job": "cotenant job checkpoint",
    "hold_job": "cotenant job hold",
    "release_job": "cotenant job release",
    "explain_job": "cotenant job explain",
    "estimate_wait": "cotenant estimate",
    "suggest_resources": "cotenant suggest",
    "modify_job": "cotenant job modify",
    "list_queues": "cotenant queues",
    "list_hosts": "cotenant hosts",
    "list_agents": "cotenant agents",
    "list_events": "cotenant events",
}

#: Every argument of those tools, and every field of an operation -> the option or word that stands for it. What has none
#: of its own is given to submit in a file (see SPEC).
ARGUMENTS: dict[str, str] = {
    "attempt": "--attempt",
    "autopilot": "--autopilot",
    "checkpoint": "--checkpoint-dir",
    "command": "the command",
    "config": "--config",
    "confirm_token": "the confirmation",
    "cpus": "--cpus",
    "cursor": "--cursor",
    "detail": "--detail",
    "disk_mib": "--disk-mib",
    "dry_run": "--dry-run",
    "env": "--env",
    "exclusive_host": "--exclusive-host",
    "experiment": "--experiment",
    "expires_s": "--expires (in seconds)",
    "gpu_memory_mib": "--gpu-memory-mib",
    "gpu_model": "--gpu-model",
    "gpus": "--gpus",
    "holder": "--holder",
    "host": "--host",
    "host_labels": "--host-label",
    "hours": "--hours",
    "indices": "--indices",
    "job_id": "JOB",
    "kind": "--kind",
    "label": "--label",
    "labels": "--label",
    "lease_id": "LEASE",
    "limit": "--limit",
    "lines": "--lines",
    "max_attempts": "--max-attempts",
    "max_parallel": "--max-parallel",
    "max_priority": "--max-priority",
    "max_wait_s": "--timeout",
    "memory_mib": "--memory-mib",
    "name": "--name",
    "nodes": "--nodes",
    "object_id": "LEASE or JOB",
    "only": "--failed",
    "own_only": "--own-only",
    "params": "--param",
    "owner": "--owner",
    "pool": "--pool",
    "pools": "--pools",
    "preemptible": "--not-preemptible",
    "prefer": "--prefer",
    "priority": "--priority",
    "project": "--project",
    "pty": "--pty",
    "purpose": "--purpose",
    "rank": "--rank",
    "reason": "--reason",
    "request_id": "--request-id",
    "resumable": "--resumable",
    "retry_on": "--retry-on",
    "run_id": "--run",
    "scopes": "--scopes",
    "secrets": "--secret",
    "severity": "--severity",
    "signal": "SIGNAL",
    "since": "--since",
    "state": "--state",
    "stop_grace_s": "--stop-grace",
    "template": "--template",
    "stream": "--stream",
    "suspend": "job suspend",
    "to": "TO",
    "toolset": "--tools",
    "ttl_s": "--ttl",
    "types": "--type",
    "wait_s": "--wait",
    "when_full": "--queue",
    "workdir": "--workdir",
}

#: Fields of a job that only a file of `cotenant submit --spec` can set.
SPEC = frozenset({
    "after", "array", "backend_options", "cleanup", "code", "compute_capability", "cuda", "data", "driver", "environment",
    "health_check", "image", "max_suspend_h", "on_host_loss", "outputs", "runner", "start_window", "watch",
})  # fmt: skip

#: Whole phrases, looked for before single names: they read wrongly word by word.
_PHRASES: tuple[tuple[str, str], ...] = (
    (r"Correct the arguments and call \w+ again\.", "Correct them and give the command again."),
    (r"\w+ was not called:", "The command was not carried out:"),
    (r"there is no such argument", "the specification has no such field"),
    (r"Call without confirm_token to be asked anew\.", "Give the command again to be asked anew."),
    (r"wait_job on its id", "`cotenant lease wait` with its id"),
    (r"wait with wait_job", "wait with `cotenant job wait`"),
    (r"release it \(release_job\)", "release it (`cotenant job release`)"),
    (r"(?:with|call) heartbeat\b", "with `cotenant lease heartbeat`"),
    (r"secrets=\[\{env, file\}\]", "--secret NAME=FILE"),
    (r'stream="err"', "--stream err"),
    (r"\bgpus=0", "--gpus 0"),
    (r'Give "reason"', "Give --reason"),
    (r"Leave it out to start from the newest", "Leave --cursor out to start from the newest"),
    (r"Use the cursor for more", "Use --cursor for more"),
)
#: How a full pool is waited for: `lease acquire` is told to, `run` and `submit` do it unless told otherwise.
_WAITING = (
    (r'when_full="queue" waits for it in order', "With --queue it waits for its turn"),
    (r'when_full="queue"', "--queue"),
)
_WAITING_ALREADY = (
    (r'when_full="queue" waits for it in order', "Without --no-queue it waits for its turn"),
    (r'with when_full="queue"', "without --no-queue"),
    (r'when_full="queue"', "leaving --no-queue out"),
)
#: Where a command takes as a word of its own what elsewhere is an option.
_POSITIONAL: dict[str, dict[str, str]] = {
    "token": {"name": "NAME", "token": "NAME|ID"},
    "host": {"host": "HOST"},
}
#: `heartbeat` alone is the field's word for a renewal, in both worlds.
_NAMES = sorted((set(TOOLS) - {"heartbeat"}) | {name for name in {*ARGUMENTS, *SPEC} if "_" in name}, key=len)[::-1]
#: What is left alone: JSON strings (others' words) and commands that are there already.
_KEPT = r'"(?:[^"\\]|\\.)*"|`[^`]*`'


def for_people(text: str, command: str = "") -> str:
    """`text` of the server with commands and options for tools and arguments; `command` is the one that was given."""
    if not text:
        return text
    waiting: tuple[tuple[str, str], ...] = _WAITING_ALREADY if command in ("run", "submit") else _WAITING
    phrases: tuple[tuple[str, str], ...] = (*waiting, *_PHRASES)
    pattern = (
        "|".join(f"(?P<p{i}>{phrase})" for i, (phrase, _) in enumerate(phrases))
        + f"|(?P<kept>{_KEPT})"
        + rf"|(?:\b(?:[Cc]all |run )?)(?P<name>\b(?:{'|'.join(_NAMES)})\b)"
        + r"|(?P<place>^- (?P<field>[a-z_]+)(?P<inner>[.\w]*): )"
        + r"|(?P<start>^(?:[a-z_]+: )?)(?P<value>[a-z_]+)(?P<of>\.[\w.]+)?(?= (?:is|must be|seems to hold) )"
    )

    def said(match: re.Match[str]) -> str:
        for i, (_, instead) in enumerate(phrases):
            if match[f"p{i}"] is not None:
                return instead
        if match["kept"] is not None:
            return str(match[0])
        if match["name"] is not None:
            name = str(match["name"])
            if name in TOOLS:
                return ("run " if match[0] != name else "") + f"`{TOOLS[name]}`"
            return str(match[0]).replace(name, option(name))
        if match["place"] is not None:
            return f"- {option(match['field'], command)}{match['inner'].replace('.', ' ')}: "
        inner = str(match["of"] or "").replace(".", " ")
        return f"{match['start']}{option(match['value'], command)}{inner}"

    return re.sub(pattern, said, text, flags=re.MULTILINE)


def option(name: str, command: str = "") -> str:
    """What stands for an argument here; a word that is none is left as it is."""
    if (word := _POSITIONAL.get(command, {}).get(name)) is not None:
        return word
    if name in SPEC:
        return f"{name} (of --spec)"
    return ARGUMENTS.get(name, name)
