"""What a job asks for. Unknown keys are refused; so is, with a sentence, what nothing here can honour yet."""

from __future__ import annotations

import functools
import shlex
from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema, field_validator, model_validator

from cotenant.server.model import text
from cotenant.server.model.arrays import ArraySpec
from cotenant.server.model.conditions import AfterSpec, WindowSpec, read_after
from cotenant.server.model.indices import ARRAY_MAX

#: Where each field that parses but cannot be honoured yet is refused, and what to do instead.
NOT_YET: dict[str, str] = {
    "code": "Uploading code is not possible yet: put it on the host and set workdir.",
    "data": "Checking data paths is not possible yet: let the command check them.",
    "environment": "Preparing environments is not possible yet: call the interpreter you want in command.",
    "image": "No backend here runs containers: leave image out.",
    "health_check": "Health checks are not possible yet: let the command check itself.",
    "outputs": "Bringing outputs back is not possible yet: write them to a directory that you know.",
    "cleanup": "Cleaning up is not possible yet: nothing of yours is removed.",
    "watch": "Watching directories is not possible yet.",
    "backend_options": "The local backend has no options.",
}

FailureClass = Literal["oom", "gpu", "host", "signal", "time_limit", "code", "start", "lost", "preempted"]


_NO_COMMAND = 'must not be empty: give an argument list such as ["python","train.py"] or one shell string'

GpuCount = Annotated[int, Field(ge=0, le=64)]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, str_max_length=64_000)


class GpuRange(_Strict):
    """Any number of cards from `min` to `max`; the most that fits now is taken."""

    min: int = Field(ge=0, le=64)
    max: int = Field(ge=0, le=64)

    @model_validator(mode="after")
    def _ordered(self) -> GpuRange:
        if self.min > self.max:
            raise ValueError("min must not be above max")
        return self


class CheckpointSpec(_Strict):
    """How the job saves its progress: watched while it runs, and where a new attempt goes on from."""

    dir: str = Field(min_length=1, description="directory on the host that holds checkpoints; relative to workdir")
    interval_s: int | None = Field(default=None, ge=1, le=24 * 31 * 3600, description="seconds between saves")
    resume_arg: str | None = Field(
        default=None, description="argument that takes the checkpoint's path, e.g. --resume={path}"
    )
    manifest: str | None = Field(
        default=None, description="file written last: in a checkpoint's directory, or {name}.done beside it"
    )
    signal: str | None = Field(default=None, description="signal that asks for a save, e.g. SIGUSR1")


class SecretRef(_Strict):
    """A secret by reference: the process gets variable `env` with the content of `file`.

    The server reads it: an absolute path of a plain text file that belongs to the server's user, mode 0600.
    """

    env: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")
    file: str = Field(min_length=1, max_length=4096)


class JobSpec(_Strict):
    """A job. Durations in seconds or hours as named, memory in MiB, cards counted whole."""

    command: tuple[str, ...] | str = Field(
        default="",
        description="argument list, or one shell string run by /bin/sh -c; has to be given without a template",
    )
    template: str | None = Field(default=None, max_length=64, description="make it from this, see cotenant://templates")
    params: Annotated[dict[str, bool | int | float | str] | None, WithJsonSchema({"type": ["object", "null"]})] = Field(
        default=None, description="the template's: NAME to value"
    )
    name: str = Field(default="", max_length=200, description="short name for people")
    purpose: str = Field(default="", max_length=2000, description="why, for people and for an agent that forgot")
    project: str = Field(default="", max_length=200, description="what belongs together over months")
    experiment: str = Field(default="", max_length=200, description="runs to compare with each other")
    kind: Literal["train", "evaluate", "inference", "export", "custom"] = "custom"
    config: dict[str, Any] = Field(default_factory=dict, description="hyper-parameters, kept with the run")
    labels: dict[str, str] = Field(default_factory=dict, description="for finding it again: KEY to VALUE")
    workdir: str | None = Field(default=None, description="absolute directory on the host; default: the attempt's own")
    pty: bool = Field(default=False, description="give the command a terminal; stdout and stderr are then one stream")
    env: dict[str, str] = Field(default_factory=dict, description="environment variables; no secrets here, see secrets")
    secrets: tuple[SecretRef, ...] = Field(default=(), max_length=32, description="secrets by file on the host")
    gpus: GpuCount | GpuRange = Field(
        default=1, description="cards: a number, or {min,max}; 0 = a place without a card"
    )
    gpu_memory_mib: int = Field(default=0, ge=0, le=2**31, description="MiB that each card must have at least")
    gpu_model: str = Field(default="", max_length=200, description="part of the card's model name")
    compute_capability: str = Field(default="", pattern=r"^(\d{1,2}\.\d)?$", description="at least, e.g. 8.0")
    cuda: str = Field(
        default="", pattern=r"^(\d{1,2}\.\d{1,2})?$", description="the driver's CUDA version at least, e.g. 12.4"
    )
    driver: str = Field(default="", pattern=r"^[0-9.]{0,20}$", description="the driver's version at least")
    cpus: int = Field(default=0, ge=0, le=4096, description="processors booked on the host; 0 = none")
    memory_mib: int = Field(default=0, ge=0, le=2**31, description="host memory booked, MiB; 0 = none")
    disk_mib: int = Field(default=0, ge=0, le=2**31, description="disk booked on the host, MiB; 0 = none")
    nodes: int = Field(
        default=1, ge=1, le=64, description="hosts; gpus, cpus, memory and disk are for each (see docs/gangs.md)"
    )
    exclusive_host: bool = Field(default=False, description="nobody else on its hosts while it runs")
    host_labels: dict[str, str] = Field(default_factory=dict, description="labels its hosts must have: KEY to VALUE")
    hours: float | None = Field(
        default=None, gt=0, le=24 * 31, description="time limit; default: the pool's default_hours"
    )
    prefer: tuple[str, ...] = Field(default=(), description="hosts, or labels of hosts as KEY=VALUE, in order")
    pool: str | None = Field(default=None, max_length=64, description="default: the server's default pool")
    priority: Literal["critical", "high", "normal", "batch"] = "normal"
    max_attempts: int = Field(default=1, ge=1, le=20, description="tries in all")
    retry_on: tuple[FailureClass, ...] = Field(
        default=("gpu", "host", "lost"), description="failure classes that get a new attempt"
    )
    preemptible: bool = Field(default=True, description="may be stopped for a higher priority")
    resumable: bool = Field(default=False, description="a new attempt can go on from a checkpoint")
    checkpoint: CheckpointSpec | None = Field(default=None, description="where and how it saves its progress")
    on_host_loss: Literal["wait", "failover"] = "wait"
    stop_grace_s: int = Field(default=10, ge=0, le=3600, description="seconds between TERM and KILL")
    max_suspend_h: int = Field(
        default=24, ge=0, le=24 * 31, description="hours an attempt may be suspended in all; 0 = not at all"
    )
    runner: Literal["process", "podman", "docker", "apptainer"] = "process"
    image: str | None = None
    code: dict[str, Any] | None = None
    data: tuple[str, ...] | None = None
    environment: dict[str, Any] | None = None
    # told in a line: four kinds of objects in full would cost every list of tools a kilobyte
    array: Annotated[
        Annotated[int, Field(ge=1, le=ARRAY_MAX)] | ArraySpec | None,
        WithJsonSchema({"type": ["integer", "object", "null"]}),
    ] = Field(
        default=None,
        description="many of it: n, or {n | params: [{NAME: value}] | grid: {NAME: [values]}, max_parallel};"
        " {index}, {NAME} in command, env, config",
    )
    after: Annotated[
        tuple[AfterSpec, ...] | None,
        BeforeValidator(read_after),
        WithJsonSchema({"type": ["array", "null"], "items": {"type": ["string", "object"]}}),
    ] = Field(
        default=None,
        max_length=1000,
        description="jobs that must end first: ids, elements job_x.0-9, or {job, when: ok|any|failed}",
    )
    start_window: Annotated[WindowSpec | None, WithJsonSchema({"type": ["object", "null"]})] = Field(
        default=None, description="{not_before, not_after}: ISO times or seconds from now; given up when it closes"
    )
    health_check: dict[str, Any] | None = None
    cleanup: dict[str, Any] | str | None = None
    outputs: tuple[str, ...] | None = None
    watch: tuple[str, ...] | None = None
    backend_options: dict[str, Any] | None = None

    @field_validator("command")
    @classmethod
    def _command(cls, value: tuple[str, ...] | str) -> tuple[str, ...] | str:
        if not value or (not isinstance(value, str) and not value[0]):
            raise ValueError(_NO_COMMAND)
        if "\0" in (value if isinstance(value, str) else "".join(value)):
            raise ValueError("must not hold a NUL character")
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for key, item in value.items():
            if not key or "=" in key or "\0" in key + item:
                raise ValueError(
                    f"{text.quoted(key)} cannot be the name of a variable, or its value holds a NUL character"
                )
            if key.startswith("COTENANT_") or key in ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"):
                raise ValueError(f"{key} is set by Cotenant from the lease and cannot be given")
        return value

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, value: str | None) -> str | None:
        if value is not None and (not value.startswith("/") or "\0" in value):
            raise ValueError("must be an absolute path on the host")
        return value

    @model_validator(mode="after")
    def _saves(self) -> JobSpec:
        if self.checkpoint is not None:
            if not self.checkpoint.dir.startswith("/") and self.workdir is None:
                raise ValueError("checkpoint.dir must be absolute, or workdir given")
            name = self.checkpoint.signal
            if name is not None and name.upper().removeprefix("SIG") not in ("USR1", "USR2", "HUP", "INT", "WINCH"):
                raise ValueError("checkpoint.signal must be SIGUSR1, SIGUSR2, SIGHUP, SIGINT or SIGWINCH")
        return self

    @model_validator(mode="after")
    def _possible(self) -> JobSpec:
        if self.template is None:
            if "command" not in self.model_fields_set:
                raise ValueError(f"command: {_NO_COMMAND}")
            if self.params is not None:
                raise ValueError("params: are those of a template: give template too")
        for field, sentence in NOT_YET.items():
            if getattr(self, field) is not None:
                raise ValueError(f"{field}: {sentence}")
        if self.runner != "process":
            raise ValueError("runner: no backend here runs containers: leave runner out.")
        if self.on_host_loss != "wait":
            raise ValueError("on_host_loss: failover is not possible yet: leave it out, the job waits for its host.")
        return self

    @property
    def argv(self) -> tuple[str, ...]:
        """What is executed."""
        return ("/bin/sh", "-c", self.command) if isinstance(self.command, str) else self.command

    @property
    def command_line(self) -> str:
        """The command as a person would type it."""
        return self.command if isinstance(self.command, str) else shlex.join(self.command)

    @property
    def program(self) -> str:
        """The program's name, which everybody may see; the command itself is for those who may look inside."""
        return (
            "shell"
            if isinstance(self.command, str)
            else text.clean(self.command[0].rsplit("/", 1)[-1], 60) or "command"
        )

    @property
    def prefer_hosts(self) -> tuple[str, ...]:
        return tuple(name for name in self.prefer if "=" not in name)

    @property
    def prefer_labels(self) -> tuple[tuple[str, str], ...]:
        pairs = (name.partition("=") for name in self.prefer if "=" in name)
        return tuple((key, value) for key, _, value in pairs)

    @property
    def many(self) -> ArraySpec | None:
        """The array that it is, or None for a single job."""
        return ArraySpec(n=self.array) if isinstance(self.array, int) else self.array

    @property
    def gpus_min(self) -> int:
        return self.gpus if isinstance(self.gpus, int) else self.gpus.min

    @property
    def gpus_max(self) -> int:
        return self.gpus if isinstance(self.gpus, int) else self.gpus.max

    def find_secret(self) -> tuple[str, str] | None:
        """(field, what it seems to be) of the first value that looks like a credential, or None."""
        argv = (self.command,) if isinstance(self.command, str) else self.command
        if (what := text.find_secret_in_argv(argv)) is not None:
            return "command", what
        for field in ("name", "purpose", "project", "experiment", "workdir", "gpu_model"):
            if (what := text.find_secret(getattr(self, field) or "")) is not None:
                return field, what
        if (many := self.many) is not None and (secret := many.find_secret()) is not None:
            return secret
        checkpoint = self.checkpoint.model_dump(exclude_none=True) if self.checkpoint is not None else {}
        others = (
            ("prefer", self.prefer),
            ("secrets", [ref.file for ref in self.secrets]),
            ("checkpoint", checkpoint.values()),
        )
        for field, values in others:
            if (what := text.find_secret(" ".join(str(value) for value in values))) is not None:
                return field, what
        for key, value in self.env.items():
            if text.secret_name(key) and value:
                return f"env.{key}", "a secret by its name"
            if (what := text.find_secret(value)) is not None:
                return f"env.{key}", what
        for where, mapping in (("labels", self.labels), ("host_labels", self.host_labels), ("config", self.config)):
            for path, value in _leaves(mapping, where):
                if text.password_name(path.rsplit(".", 1)[-1]) and isinstance(value, str) and value:
                    return path, "a secret by its name"
                if (what := text.find_secret(f"{path}={value}")) is not None:
                    return path, what
        return None


@functools.lru_cache(maxsize=1024)
def parse_kept(kept: str) -> JobSpec:
    """The spec that a job's row keeps. One object for equal texts: a job's life reads its own several times."""
    return JobSpec.model_validate_json(kept)


def _leaves(value: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Every single value of nested JSON, with the path to it."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _leaves(item, path)
    else:
        yield path, value
