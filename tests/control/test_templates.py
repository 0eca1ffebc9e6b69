"""Templates: TOML files with typed parameters, and the jobs that are made from them."""

from __future__ import annotations

from pathlib import Path

import pytest
from bench import Bench

from cotenant import tools
from cotenant.resources.catalog import Catalog
from cotenant.server.errors import BadRequest, NotFound
from cotenant.server.model.spec import JobSpec
from cotenant.server.model.templates import BrokenTemplate, WrongParams, parse

ROOT = Path(__file__).resolve().parents[2]
FINETUNE = (ROOT / "examples" / "templates" / "finetune.toml").read_text()
SMALL = """
description = "small"
[params.lr]
type = "float"
min = 0.0
[params.n]
type = "int"
default = 2
[job]
command = "train --lr {lr}"
gpus = "{n}"
config = {lr = "{lr}", text = "lr={lr}"}
"""


def put(bench: Bench, **files: str) -> None:
    folder = bench.folder / "templates"
    folder.mkdir(exist_ok=True)
    for name, text in files.items():
        (folder / f"{name}.toml").write_text(text)


async def test_a_job_is_made_from_a_template(bench: Bench) -> None:
    put(bench, small=SMALL)
    a = await bench.caller("a", "alice")
    shown = await bench.control.jobs.submit(a, JobSpec(template="small", params={"lr": 1}), dry_run=True)
    assert shown.dry_run and shown.spec is not None
    assert (shown.spec["command"], shown.spec["gpus"], shown.spec["config"]) == (
        "train --lr 1.0", 2, {"lr": 1.0, "text": "lr=1.0"},
    )  # fmt: skip
    job = await bench.control.jobs.submit(a, JobSpec(template="small", params={"lr": 0.5, "n": 1}, name="mine"))
    await bench.settle()
    assert bench.machine.specs[bench.attempt(job.job_id)["id"]].argv == ("/bin/sh", "-c", "train --lr 0.5")
    assert (job.name, job.labels) == ("mine", {"template": "small"}), "what is given besides wins over the template"
    again = await bench.control.jobs.submit(a, JobSpec(template="small", params={"lr": 0.5, "n": 1}, name="mine"))
    assert again.job_id == job.job_id and again.deduplicated


async def test_everything_that_is_wrong_with_parameters_is_told_at_once(bench: Bench) -> None:
    put(bench, finetune=FINETUNE)
    a = await bench.caller("a", "alice")
    given = {"lr": 7, "epochs": 1.5, "model": "huge", "half": "yes", "colour": "red"}
    with pytest.raises(BadRequest) as refused:
        await bench.control.jobs.submit(a, JobSpec(template="finetune", params=given))
    for said in (
        "data is missing (str: directory", "lr must be at most 1", "epochs must be a whole number", 'model must be one of "small"',
        "half must be true or false", 'there is no "colour"; its parameters are data, model',
    ):  # fmt: skip
        assert said in str(refused.value)
    with pytest.raises(BadRequest, match="must match"):
        await bench.control.jobs.submit(a, JobSpec(template="finetune", params={"data": "relative"}))
    with pytest.raises(NotFound) as none:
        await bench.control.jobs.submit(a, JobSpec(template="finetun"))
    assert none.value.hint == 'There are: "finetune".'


async def test_the_example_makes_a_job_and_an_array_of_them(bench: Bench) -> None:
    put(bench, finetune=FINETUNE)
    a = await bench.caller("a", "alice")
    made = bench.control.jobs.templates.resolve(
        JobSpec(template="finetune", params={"data": "/data"}, array={"grid": {"seed": [1, 2]}})
    )
    assert made.gpus == 1 and made.name == "finetune base" and made.checkpoint is not None
    assert made.checkpoint.resume_arg == "--resume={path}" and made.config["half"] is True
    job = await bench.control.jobs.submit(a, JobSpec(template="finetune", params={"data": "/d"}, array=2))
    assert job.array is not None and job.array.size == 2


async def test_a_broken_file_is_named_with_its_line_and_hurts_no_other(bench: Bench) -> None:
    put(bench, small=SMALL, typo=SMALL.replace("[job]", "[job"), twice='name = "small"\n[job]\ncommand = "x"\n')
    found = bench.control.jobs.templates.list()
    assert [template.name for template in found.templates] == ["small"]
    assert set(found.broken) == {"typo.toml", "twice.toml"} and "line 9" in found.broken["typo.toml"]
    a = await bench.caller("a", "alice")
    with pytest.raises(BadRequest, match='"typo" is broken'):
        await bench.control.jobs.submit(a, JobSpec(template="typo"))
    job = await bench.control.jobs.submit(a, JobSpec(template="small", params={"lr": 0.1, "n": 1}))
    assert job.labels == {"template": "small"}
    put(bench, typo=SMALL)
    assert "typo" in [template.name for template in bench.control.jobs.templates.list().templates], "read again"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[params.x]\ntype = 'int'\n", "needs a table [job]"),
        ("[job]\ncommand = 'x'\ngpu = 1\n", "job.gpu is no field of a job (at line 3)"),
        (
            "[job]\ncommand = 'x'\n[params.x]\ntype = 'number'\n",
            "needs a type: int, float, str, bool, choice (at line 3)",
        ),
        ("[job]\ncommand = 'x'\n[params.x]\ntype = 'int'\npattern = 'a'\n", "makes no sense for type int (at line 3)"),
        ("[job]\ncommand = 'x'\n[params.x]\ntype = 'int'\ndefault = 'a'\n", "its default must be a whole number"),
        ("[job]\ncommand = 'x'\n[params.x]\ntype = 'str'\npattern = '('\n", "no regular expression"),
        ("[job]\ncommand = 'x'\n[params.x]\ntype = 'choice'\n", "needs choices"),
        ("[job]\ncommand = 'x'\n[params.index]\ntype = 'int'\n", "is not index"),
        ("what = 1\n[job]\ncommand = 'x'\n", '"what" is not known'),
        ("[job]\ncommand = 'x'\n[params.x]\ntype = 'int'\nrequired = 1\n", "true or false"),
    ],
)
def test_what_is_no_template_is_told_with_the_place(text: str, said: str) -> None:
    with pytest.raises(BrokenTemplate) as broken:
        parse(text, "t")
    assert said in str(broken.value)


def test_values_keep_their_type_only_where_a_name_stands_alone() -> None:
    template = parse(
        "[params.n]\ntype='int'\n[params.s]\ntype='str'\nrequired=false\n[params.b]\ntype='bool'\ndefault=false\n"
        "[job]\ncommand=['x','{n}','{s}','{b}','{{n}}']\ngpus='{n}'\nresumable='{b}'\nenv={N='{n}'}\n",
        "t",
    )
    assert template.resolve({"n": 3}) == {
        "command": ["x", "3", "", "false", "{n}"], "gpus": 3, "resumable": False, "env": {"N": "3"},
    }  # fmt: skip
    with pytest.raises(WrongParams, match="whole number"):
        template.resolve({"n": True})


async def test_templates_are_resources(bench: Bench) -> None:
    put(bench, finetune=FINETUNE)
    a = await bench.caller("a", "alice")
    catalog = Catalog()
    listed = [item["uri"] for item in await catalog.whole(bench.control, a)]
    assert {"cotenant://templates", "cotenant://templates/finetune"} <= set(listed)
    one = await catalog.read(bench.control, a, "cotenant://templates/finetune")
    assert [p.name for p in one.params] == ["data", "model", "lr", "epochs", "cards", "half"]
    assert await catalog.complete(bench.control, a, "name", "fin", of="cotenant://templates/{name}") == ["finetune"]
    with pytest.raises(NotFound):
        await catalog.read(bench.control, a, "cotenant://templates/none")


def test_a_command_has_to_be_given_where_there_is_no_template() -> None:
    tool = next(tool for tool in tools.ALL if tool.name == "submit_job")
    for given in ({}, {"params": {"lr": 1}, "command": "x"}, {"command": ""}):
        with pytest.raises(BadRequest, match=r"must not be empty|give template too"):
            tool.parse(given)
    spec = tool.parse({"template": "t", "params": {"lr": 1e-4, "n": 3, "b": True, "s": "x"}})["spec"]
    assert spec.params == {"lr": 1e-4, "n": 3, "b": True, "s": "x"}
