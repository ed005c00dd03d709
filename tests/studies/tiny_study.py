"""A study of a few milliseconds with every kind of stage, for tests that kill it.

It writes down all work it does in `calls.txt`, before it does it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path

import safetensors.torch
import torch
from rich.console import Console
from torch import Tensor, nn

import acnml
from studies.store import Artefact, Content, Reporter, Stage, Store, Work
from studies.store.work import mixed
from studies.training.state import restore_training, training_state

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = (X.sum(1) > 0).long()


@dataclass(frozen=True)
class Training:
    epochs: int = 2
    learning_rate: float = 0.1


@dataclass(frozen=True)
class TinyStudy:
    training: Training = field(default_factory=Training)
    prior_std: float = 0.5
    samples: int = 3
    temperature: float = 2.0
    inputs: int = 5
    block: int = 2
    seed: int = 0


def stages(study: TinyStudy) -> dict[str, Stage]:
    train = Stage("train", study.training, study.seed)
    fit = Stage("fit", study.prior_std, study.seed, needs=(train,))
    return {
        "train": train,
        "fit": fit,
        "bma": Stage("predict BMA", (study.samples, study.inputs), study.seed, needs=(train, fit)),
        "map": Stage("predict MAP", (study.temperature, study.inputs), study.seed, needs=(train,)),
    }


@dataclass(frozen=True)
class Run:
    """One run of the study in a folder.

    Args:
        out: the folder.
        study: what to do.
        pause: seconds that every piece of work takes longer.
    """

    out: Path
    study: TinyStudy = field(default_factory=TinyStudy)
    pause: float = 0.0

    def __call__(self) -> dict[str, Artefact]:
        stage = stages(self.study)
        store = Store(self.out, self.study, Reporter(Console(quiet=True), self.out / "run.log"))
        train = store.make(stage["train"], self.train)
        fit = store.make(stage["fit"], lambda work: self.fit(train))
        inputs, block = self.study.inputs, self.study.block
        bma = store.predict(stage["bma"], inputs, block, lambda rows: self.bma(train, fit, rows))
        map_ = store.predict(stage["map"], inputs, block, lambda rows: self.map(train, rows))
        return {"train": train, "fit": fit, "bma": bma, "map": map_}

    def train(self, work: Work) -> Content:
        training, model = self.study.training, network()
        optimizer = torch.optim.Adam(model.parameters(), training.learning_rate)
        first = 0
        if (checkpoint := work.resume()) is not None:
            first = int(checkpoint.facts["epochs"])
            restore_training(checkpoint.tensors, model, optimizer)
        for epoch in range(first, training.epochs):
            self.note(f"train {epoch}")
            generator = torch.Generator().manual_seed(mixed(self.study.seed, epoch))
            for batch in torch.randperm(40, generator=generator).split(10):
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(X[batch]), Y[batch]).backward()
                optimizer.step()
            work.progress(epoch + 1, training.epochs)
            state = training_state(model, optimizer)
            work.checkpoint(Content(state, {"epochs": epoch + 1}))
        return Content(model.state_dict(), {"epochs": training.epochs})

    def fit(self, train: Artefact) -> Content:
        self.note("fit 0")
        mean = train.load()
        variance = {name: torch.full_like(t, self.study.prior_std**2) for name, t in mean.items()}
        return Content.of_saved(acnml.Diagonal(mean, variance), {"data": 40})

    def bma(self, train: Artefact, fit: Artefact, rows: slice) -> dict[str, Tensor]:
        self.note(f"bma {rows.start}")
        predict = acnml.Bma(classifier(train), fit.load_saved(), self.study.samples)
        # Global randomness on purpose: it must not tell whether a run was interrupted.
        return {"log_probs": predict(X[rows]), "noise": torch.rand(rows.stop - rows.start)}

    def map(self, train: Artefact, rows: slice) -> dict[str, Tensor]:
        self.note(f"map {rows.start}")
        tempered = classifier(train).tempered(self.study.temperature)
        return {"log_probs": acnml.Map(tempered)(X[rows])}

    def note(self, call: str) -> None:
        with (self.out / "calls.txt").open("a") as file:
            file.write(f"{call}\n")
        time.sleep(self.pause)


def network() -> nn.Sequential:
    """Dropout draws from the global random state."""
    return nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2))


def classifier(train: Artefact) -> acnml.Classifier:
    model = network()
    model.load_state_dict(train.load())
    return acnml.Classifier(model)


def contents(out: Path) -> dict[str, dict[str, Tensor]]:
    """Every artefact's tensors, read without the pipeline."""
    files = (out / "artefacts").glob("*/artefact.safetensors")
    return {path.parent.name: safetensors.torch.load_file(path) for path in files}


def calls(out: Path) -> list[str]:
    path = out / "calls.txt"
    return path.read_text().splitlines() if path.exists() else []
