"""The documentation is true: its code runs, its commands exist, its numbers are current."""

from __future__ import annotations

import importlib.util
import re
import shlex
from pathlib import Path

import matplotlib as mpl
import pytest

import acnml
import page_fixtures  # noqa: F401  registers the names that pages start with
import pages
import results
from studies.data.folder import DataError, data_folder

ROOT = pages.ROOT
FILES = ("safetensors", "md", "py", "onnx", "git", "html", "checksum")  # not attributes
SCRIPT = "howto/write-a-study.md"  # a whole file: tests/studies/test_documentation.py runs it


@pytest.mark.parametrize("page", pages.pages("python"), ids=pages.name)
def test_the_code_runs(page, monkeypatch, tmp_path):
    if pages.name(page) == SCRIPT:
        pytest.skip("a whole file, which tests/studies/test_documentation.py runs")
    monkeypatch.setenv("ACNML_DATA", str(data_folder().absolute()))
    monkeypatch.chdir(tmp_path)
    mpl.use("Agg")
    try:
        pages.run(page)
    except DataError as missing:
        pytest.skip(str(missing))


def commands() -> list[tuple[str, str]]:
    """Return (page, command) for all our commands in the pages, without comments."""
    found = []
    for page in [*results.pages(), ROOT / "CONTRIBUTING.md"]:
        for block in pages.blocks(page):
            if block.language in ("", "bash", "console", "sh"):
                for line in block.text.replace("\\\n", " ").splitlines():
                    line = line.removeprefix("$ ")
                    if re.match(r"make |acnml |python -m (studies|fuzz|benchmarks)\b", line):
                        found.append((pages.name(page), line))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_have_these_options(page, command):
    words = shlex.split(command, comments=True)
    if words[0] == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
        assert [w for w in words[1:] if "=" not in w and w not in targets] == []
    elif words[:3] == ["python", "-m", "fuzz"]:
        known = re.findall(r'"(--[a-z]+)"', (ROOT / "fuzz" / "__main__.py").read_text())
        assert [word for word in words if word.startswith("--") and word not in known] == []
    elif words[:3] == ["python", "-m", "studies"]:
        from studies.__main__ import build_app

        parse(build_app(), words[3:])
    elif words[0] == "acnml":
        from acnml.cli import build_app as build_commands

        parse(build_commands(), words[1:])


def parse(app: object, words: list[str]) -> None:
    """Parse a command as Typer would, without running it."""
    import typer

    command = typer.main.get_command(app)
    context, name = None, "command"
    while hasattr(command, "resolve_command"):
        if not words or words == ["--help"] or words == ["--version"]:
            return
        context = command.make_context(name, list(words), parent=context)
        rest = [*context._protected_args, *context.args]
        name, command, words = command.resolve_command(context, rest)
    command.make_context(name, list(words), parent=context)


@pytest.mark.parametrize("page", results.pages(), ids=pages.name)
def test_numbers_are_current(page):
    text = page.read_text(encoding="utf-8")
    assert results.filled(text) == text, "run: python docs/_ext/results.py"


@pytest.mark.parametrize("page", results.pages(), ids=pages.name)
def test_names_exist(page):
    text = page.read_text(encoding="utf-8")
    for dotted in re.findall(r"(?<![\w/.`-])`?acnml((?:\.[A-Za-z]\w*)+)", text):
        names = dotted[1:].split(".")
        if names[-1] not in FILES:
            assert exists(names), f"acnml{dotted}"


def exists(names: list[str]) -> bool:
    """Return whether `acnml.a.b` is a module or an attribute of one."""
    found: object = acnml
    for depth, name in enumerate(names):
        if not hasattr(found, name):
            module = ".".join(["acnml", *names[: depth + 1]])
            if importlib.util.find_spec(module) is None:
                return False
            found = importlib.import_module(module)
        else:
            found = getattr(found, name)
    return True


@pytest.mark.parametrize("page", results.pages(), ids=pages.name)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    links = re.findall(r"\]\((?!http|mailto)([^)#\s]*)(#[^)\s]*)?\)", text)
    targets = [(page if path == "" else page.parent / path, anchor) for path, anchor in links]
    assert [str(path) for path, _ in targets if not path.exists()] == []
    missing = [
        a for path, a in targets if a and path.suffix == ".md" and a[1:] not in anchors(path)
    ]
    assert missing == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.*)$", text, flags=re.M)
    plain = [re.sub(r"[^\w\- ]", "", heading.lower()) for heading in headings]
    return {heading.replace(" ", "-") for heading in plain}
