"""`cotenant templates`: what `cotenant submit --template` can fill in."""

from __future__ import annotations

from cotenant.ui.cli import ask, show

TYPE_CHECKING = False  # typing itself would cost every command 5 ms of CPU; checkers know the name
if TYPE_CHECKING:
    import argparse
    from typing import Any

    from cotenant.ui.cli.entry import Parser

    Answer = dict[str, Any]


def configure(parser: Parser, _: str) -> None:
    templates = parser.command(act, example="cotenant templates finetune")
    templates.add_argument("name", nargs="?", metavar="NAME", help="one of them, with its parameters and its job")


def act(args: argparse.Namespace) -> int:
    client = ask.client(args)
    answer = client.read_resource("cotenant://templates" + (f"/{args.name}" if args.name else ""))
    if args.json:
        show.as_json(answer)
    elif args.name:
        _tell(answer)
    else:
        rows = ((t["name"], " ".join(_short(p) for p in t["params"]), t["description"]) for t in answer["templates"])
        show.table(
            rows,
            ("TEMPLATE", "PARAMETERS", "WHAT FOR"),
            empty="No template: put NAME.toml into templates/ of the data directory.",
        )
        for file, said in answer["broken"].items():
            show.say(f"{show.cell(file)} is broken: {show.ours(said)}")
    return 0


def _short(param: Answer) -> str:
    return f"{param['name']}=" if param["required"] else f"{param['name']}={_value(param['default'])}"


def _value(value: Any) -> str:
    import json

    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def _tell(template: Answer) -> None:
    import json

    show.pairs([("template", template["name"]), ("what for", template["description"])])
    rows = (
        (
            p["name"], p["type"], "has to be given" if p["required"] else _value(p["default"]), _limits(p), p["description"],
        )
        for p in template["params"]
    )  # fmt: skip
    show.out()
    show.table(rows, ("PARAMETER", "TYPE", "DEFAULT", "LIMITS", "WHAT FOR"), empty="It has no parameters.")
    show.out()
    for line in json.dumps(template["job"], indent=2, ensure_ascii=False).splitlines():
        show.out(show.harmless(line))


def _limits(param: Answer) -> str | None:
    if param["choices"]:
        return " | ".join(_value(choice) for choice in param["choices"])
    if param["pattern"]:
        return str(param["pattern"])
    low, high = param["min"], param["max"]
    if low is None and high is None:
        return None
    return f"{'' if low is None else f'{low:g}'}..{'' if high is None else f'{high:g}'}"
