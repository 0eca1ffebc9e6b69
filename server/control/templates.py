"""Templates of jobs that people keep in the data directory, and the submits that are made from them."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from cotenant.server.errors import BadRequest, NotFound
from cotenant.server.model.answers import ParamAnswer, TemplateAnswer, TemplateList
from cotenant.server.model.spec import JobSpec
from cotenant.server.model.templates import FILE_NAME, BrokenTemplate, Template, WrongParams, parse
from cotenant.server.model.text import clean, quoted

log = logging.getLogger(__name__)

FOLDER: Final = "templates"
#: Larger files are no templates that a person wrote.
BYTES_MAX: Final = 64 * 1024
FILES_MAX: Final = 500


class Templates:
    """Reads ``templates/*.toml``. A file that is broken is named with its line and does not hurt the others."""

    def __init__(self, data_dir: Path) -> None:
        self._folder = data_dir / FOLDER
        self._kept: dict[Path, tuple[tuple[int, int], Template | str]] = {}  # by file: (time and size, what it is)

    def _all(self) -> tuple[dict[str, Template], dict[str, str]]:
        """(templates by name, what is wrong with a file by its name)."""
        found: dict[str, Template] = {}
        broken: dict[str, str] = {}
        files = sorted(self._folder.glob("*.toml"))[:FILES_MAX] if self._folder.is_dir() else []
        for path in files:
            what = self._read(path)
            if isinstance(what, str):
                broken[path.name] = what
            elif what.name in found:
                broken[path.name] = f"another file is the template {quoted(what.name)} already"
            else:
                found[what.name] = what
        self._kept = {path: kept for path, kept in self._kept.items() if path in files}
        return found, broken

    def _read(self, path: Path) -> Template | str:
        """What a file holds, or what is wrong with it; read again when it was changed."""
        try:
            stat = path.stat()
            mark = (stat.st_mtime_ns, stat.st_size)
            if (kept := self._kept.get(path)) is not None and kept[0] == mark:
                return kept[1]
            if stat.st_size > BYTES_MAX:
                what: Template | str = f"it has {stat.st_size} bytes; a template has {BYTES_MAX} at most"
            elif FILE_NAME.fullmatch(path.stem) is None:
                what = "its file's name may have letters, digits, - and _, at most 64"
            else:
                what = parse(path.read_text("utf-8"), path.stem)
        except BrokenTemplate as error:
            what = str(error)
        except (OSError, UnicodeDecodeError) as error:
            return f"it cannot be read: {error.strerror if isinstance(error, OSError) else 'it is no UTF-8'}"
        if isinstance(what, str):
            log.warning("template %s is broken: %s", path.name, what)
        self._kept[path] = (mark, what)
        return what

    def list(self) -> TemplateList:
        """All of them, and the files that are broken."""
        found, broken = self._all()
        return TemplateList([_answer(template) for template in found.values()], broken)

    def get(self, name: str) -> TemplateAnswer:
        """
        Raises:
            NotFound: no such template.
        """
        return _answer(self._find(name))

    def _find(self, name: str) -> Template:
        found, broken = self._all()
        template = found.get(name)
        if template is None:
            if (said := broken.get(f"{name}.toml")) is not None:
                raise BadRequest(f"template {quoted(name)} is broken: {said}", hint="A person has to mend its file.")
            known = ", ".join(map(quoted, found)) or f"none; a person puts them into {FOLDER}/ of the data directory"
            raise NotFound(
                f"there is no template {quoted(clean(name, 64))}", code="no_such_template", hint=f"There are: {known}."
            )
        return template

    def resolve(self, spec: JobSpec) -> JobSpec:
        """The job that a template and its parameters make; what `spec` says besides wins over the template.

        Raises:
            NotFound: no such template.
            BadRequest: all that is wrong with the parameters, or with the job that they make.
        """
        if spec.template is None:
            return spec
        template = self._find(spec.template)
        try:
            made = template.resolve(spec.params or {})
        except WrongParams as error:
            raise BadRequest(
                str(error), hint=f"The resource cotenant://templates/{template.name} describes them."
            ) from None
        own: dict[str, Any] = spec.model_dump(mode="json", include=spec.model_fields_set - {"template", "params"})
        labels = {"template": template.name, **made.get("labels", {}), **own.pop("labels", {})}
        try:
            return JobSpec.model_validate({**made, **own, "labels": labels})
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False, include_context=False)
            said = "; ".join(
                f"{'.'.join(map(str, item['loc'])) or 'job'}: {item['msg'].removeprefix('Value error, ')}"
                for item in first[:10]
            )
            raise BadRequest(
                f"template {quoted(template.name)} makes no job of these parameters: {said}",
                hint="Give other parameters, or let a person mend the template.",
            ) from None


def _answer(template: Template) -> TemplateAnswer:
    params = [
        ParamAnswer(
            p.name, p.type, p.description, p.required, p.default, p.min, p.max, p.pattern, list(p.choices) or None
        )
        for p in template.params.values()
    ]
    return TemplateAnswer(template.name, template.description, params, dict(template.job))
