"""The folder of a study's artefacts: finished ones are used, missing ones are made.

    OUT/run.log                         what happened
    OUT/artefacts/<name>-seed<n>-<key>/
        artefact.safetensors            the result with its header, complete or absent
        header.json                     the header again, to be read by people
        parts/                          finished parts while it is being made
        lock                            held by the process that makes it

Artefacts of other settings are kept, so that going back to them costs nothing.
"""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias, final

import torch

import acnml
from studies.files import write_file, writing
from studies.store.parts import Parts, locked
from studies.store.record import DamagedError, Header, encode, read_header, read_record, to_plain
from studies.store.reporter import Bar, Reporter, duration
from studies.store.stage import Artefact, Stage
from studies.store.work import Compute, Done, Make, blocks_of, make_in_one_go, predict_in_blocks


def versions() -> dict[str, str]:
    """Return the versions of the code; the commit is known in a git checkout only."""
    commit = _commit()
    return {
        "acnml": acnml.__version__,
        **({"commit": commit} if commit else {}),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
    }


@lru_cache(maxsize=1)
def _commit() -> str | None:
    """Return the commit of the studies' code, with a plus where files have been changed since."""
    command = ["git", "describe", "--always", "--dirty=+", "--exclude=*"]
    try:
        found = subprocess.run(
            command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return found.stdout.strip() or None


def hardware() -> dict[str, Any]:
    """Return the hardware of this machine."""
    return {
        "system": f"{platform.system()} {platform.machine()}",
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def _processor() -> str:
    """Return the processor's name, which Python does not provide on Linux."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(errors="replace") if cpuinfo.is_file() else ""
    name = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return name[1] if name else platform.processor()


ARTEFACT, HEADER = "artefact.safetensors", "header.json"
MISSING = "missing"
Produce: TypeAlias = Callable[[Parts, Bar], Done]


@final
class Store:
    """The artefacts of a study.

    Args:
        out: the folder; made when something is written.
        study: the settings of the study, a frozen dataclass; every artefact's header has them.
        reporter: writes to the terminal and the log.
    """

    def __init__(self, out: Path, study: Any, reporter: Reporter) -> None:
        self._folder, self._reporter = out / "artefacts", reporter
        self._study = to_plain(study, "the study")
        self._said = set[str]()

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the stage's artefact; if it is missing, let the function make it."""
        return self._finished(
            stage, lambda parts, bar: make_in_one_go(function, parts, bar, stage.seed)
        )

    def predict(self, stage: Stage, inputs: int, block: int, compute: Compute) -> Artefact:
        """Return the stage's predictions; if they are missing, compute them block by block.

        Args:
            stage: its settings must decide the inputs and their number.
            inputs: their number.
            block: how many to compute at once: what a killed run can lose.
            compute: rows of the inputs -> tensors whose first dimension counts the rows.
        """
        blocks = blocks_of(inputs, block)
        artefact = self._finished(
            stage, lambda parts, bar: predict_in_blocks(compute, blocks, parts, bar, stage.seed)
        )
        if artefact.facts["inputs"] != inputs:
            raise ValueError(
                f"{stage.title} was finished for {artefact.facts['inputs']} inputs, now there are "
                f"{inputs}: what decides their number must be in the stage's settings"
            )
        return artefact

    def find(self, stage: Stage) -> Artefact | None:
        """Return the stage's artefact, or None if it is missing."""
        found = self._look(stage)
        return found if isinstance(found, Artefact) else None

    def _finished(self, stage: Stage, produce: Produce) -> Artefact:
        """Reuse the artefact, or make it under the lock."""
        self._once("started", ", ".join(self._study), _made_with())
        parts = self._parts(stage)
        found = self._look(stage)
        # Parts next to an artefact: a run was killed before it removed them, or is about to do so.
        if isinstance(found, str) or parts.folder.exists():
            with self._locked(stage):
                found = self._look(stage)
                if isinstance(found, str):
                    return self._made(stage, parts, produce, found)
                parts.remove()
        self._reporter.tell("reused", stage.title, _took(found))
        return found

    def _look(self, stage: Stage) -> Artefact | str:
        """Return the artefact, or the reason why it cannot be used."""
        path = self._place(stage) / ARTEFACT
        try:
            header = read_record(path).header
        except FileNotFoundError:
            return MISSING
        except DamagedError as error:
            return str(error)
        if header.get("origin") != self._origin(stage):
            return "it was made from other artefacts than those present now"
        return Artefact(stage, path, header)

    def _made(self, stage: Stage, parts: Parts, produce: Produce, why: str) -> Artefact:
        """Make the artefact; this process holds the lock."""
        if why != MISSING:
            self._reporter.tell("again", stage.title, why)
        parts.prepare()
        if finished := parts.names():
            self._reporter.tell("resumed", stage.title, f"after {finished[-1]}")
        with self._reporter.stage(stage.title) as bar:
            artefact = self._written(stage, produce(parts, bar), parts.origin)
        parts.remove()
        self._reporter.tell("made", stage.title, _took(artefact))
        return artefact

    def _written(self, stage: Stage, done: Done, origin: Header) -> Artefact:
        place = self._place(stage)
        header, data = encode(done.content, self._header(stage, done.seconds, origin))
        write_file(place / HEADER, json.dumps(header, indent=2, ensure_ascii=False).encode())
        write_file(place / ARTEFACT, data)
        return Artefact(stage, place / ARTEFACT, header)

    def _header(self, stage: Stage, seconds: float, origin: Header) -> Header:
        return {
            "study": self._study,
            "stage": stage.name,
            "seed": stage.seed,
            "settings": stage.settings,
            "version": stage.version,
            "origin": origin,
            "made_at": datetime.now().astimezone().isoformat(" ", "seconds"),
            "seconds": seconds,
            "versions": versions(),
            "hardware": hardware(),
        }

    def _origin(self, stage: Stage) -> Header:
        """Return the stage's key, and the content hashes of what it needs."""
        paths = {need.label: self._place(need) / ARTEFACT for need in stage.needs}
        made_from = {label: _content_hash(path) for label, path in paths.items()}
        return {"key": stage.key, "made_from": made_from}

    def _parts(self, stage: Stage) -> Parts:
        origin = self._origin(stage)
        if missing := [
            label for label, content in origin["made_from"].items() if content == MISSING
        ]:
            raise ValueError(f"{stage.title} needs {', '.join(missing)}: make it first")
        return Parts(self._place(stage) / "parts", origin)

    def _locked(self, stage: Stage) -> AbstractContextManager[None]:
        place = self._place(stage)
        with writing(place):
            place.mkdir(parents=True, exist_ok=True)
        return locked(
            place / "lock",
            lambda: self._reporter.tell("waiting", stage.title, "another run is making it"),
            lambda: self._once("careful", "no file locks here", "start no second run"),
        )

    def _place(self, stage: Stage) -> Path:
        return self._folder / stage.label

    def _once(self, event: str, subject: str, detail: str) -> None:
        """Write a line to the log once."""
        if event not in self._said:
            self._said.add(event)
            self._reporter.note(event, subject, detail)


def _took(artefact: Artefact) -> str:
    """Return the time that an artefact took."""
    whole = duration(artefact.seconds)
    if "inputs" not in artefact.facts:
        return whole
    return f"{whole}, {duration(artefact.seconds_per_input)} per input"


def _made_with() -> str:
    return ", ".join(f"{name} {version}" for name, version in versions().items())


def _content_hash(path: Path) -> str:
    try:
        return str(read_header(path)["content_hash"])
    except (FileNotFoundError, DamagedError):
        return MISSING
