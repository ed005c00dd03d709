"""What a study is: one value that says all there is to do.

The engine trains networks, fits posteriors, chooses knobs on held-out data, predicts, measures,
judges claims and writes the report. docs/howto/write-a-study.md shows a whole study.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar, final

import torch
from torch import Tensor, nn

from acnml._util.torch_state import seeded
from studies.data import Labelled
from studies.engine.method import Grids, Look, Method, Share, cautious_first
from studies.store.record import digest
from studies.training import Schedule, Trained

if TYPE_CHECKING:
    from studies.engine.choose import ChoiceRule
    from studies.engine.claims import Claim
    from studies.engine.grounds import Ground
    from studies.engine.predictors import Rule
    from studies.engine.report import Section
    from studies.engine.results import Results
    from studies.engine.workshop import Workshop

Settings = TypeVar("Settings")
BINS, PER_BIN = 20, 25  # of a calibration error: the paper's number, and inputs in each at least


# Data ------------------------------------------------------------------------------------------


@final
@dataclass(frozen=True, eq=False)
class StudyData:
    """The data of a study.

    Attributes:
        note: where they come from, for the report.
        train: what networks learn from.
        held_out: what knobs are chosen on.
        test: unshifted test inputs, in the order in which smaller counts are taken.
        load: (shift, count) -> the first inputs of a shift, as many as there are.
        checksum: of everything that predictions depend on.
        train_checksum: of the training data.
    """

    note: str
    train: Labelled
    held_out: Labelled
    test: Labelled
    load: Callable[[str, int], Labelled]
    checksum: str
    train_checksum: str

    @staticmethod
    def of(
        note: str,
        train: Labelled,
        held_out: Labelled,
        test: Labelled,
        load: Callable[[str, int], Labelled],
        *more: Labelled | str,
    ) -> StudyData:
        """Return the data with their checksums; `more` is what shifts depend on besides `test`."""
        whole, trained = checksum(held_out, test, *more), checksum(train)
        return StudyData(note, train, held_out, test, load, whole, trained)

    def count(self, inputs: int) -> int:
        """Return how many inputs a shift has when this many are asked for."""
        return min(inputs, len(self.test.labels))

    def labels(self, inputs: int) -> Tensor:
        """Return the labels of the first test inputs, which all shifts share."""
        return self.test.labels[:inputs]


def checksum(*parts: Labelled | str) -> str:
    """Return the SHA-256 of data and texts."""
    pieces: list[str | memoryview] = []
    for part in parts:
        if isinstance(part, str):
            pieces.append(part)
        else:
            pieces += [tensor.contiguous().numpy().data.cast("B") for tensor in part]
    return digest(*pieces)


# Networks --------------------------------------------------------------------------------------


def as_they_are(inputs: Tensor) -> Tensor:
    """Return the inputs."""
    return inputs


@final
@dataclass(frozen=True, eq=False)
class Model:
    """A network before training.

    Attributes:
        settings: plain data that say which network it is.
        build: makes the network; its random weights come from torch's global random state.
        prepare: stored inputs -> what the network takes.
        augment: the same for training, where it differs.
        given: a file of weights that training starts from.
        load_given: makes the network with these weights.
    """

    settings: Any
    build: Callable[[], nn.Module]
    prepare: Callable[[Tensor], Tensor] = as_they_are
    augment: Callable[[Tensor, torch.Generator], Tensor] | None = None
    given: Path | None = None
    load_given: Callable[[], nn.Module] | None = None

    def untrained(self, seed: int) -> nn.Module:
        """Return the network with random weights, the same for the same seed."""
        with seeded(seed):
            return self.build()

    def start(self, seed: int) -> nn.Module:
        """Return the network where training starts: with given weights, or random ones."""
        return self.untrained(seed) if self.load_given is None else self.load_given()

    def augmented(self, inputs: Tensor, generator: torch.Generator) -> Tensor:
        """Return stored inputs as training sees them."""
        if self.augment is None:
            return self.prepare(inputs)
        return self.augment(inputs, generator)


def last(trained: Trained) -> dict[str, Tensor]:
    """Take the weights after the last epoch."""
    return trained.last


def average(trained: Trained) -> dict[str, Tensor]:
    """Take the averaged weights."""
    return trained.average


@final
@dataclass(frozen=True, eq=False)
class Network:
    """Weights of a model: how they are trained, and which are taken.

    Attributes:
        model: the network.
        training: its schedule; None takes the given weights as they are.
        take: which weights to take from what training leaves, `last` or `average`.
        start: another network whose weights training starts from.
        inputs: how many training inputs it learns from; None takes all.
    """

    model: Model
    training: Schedule | None
    take: Callable[[Trained], dict[str, Tensor]] = last
    start: str | None = None
    inputs: int | None = None


# Work ------------------------------------------------------------------------------------------

HELD_OUT, FRONTIER = "held out", "frontier"


class Job(NamedTuple):
    """One prediction: a method sees a shift, the held-out data, or those of the frontier."""

    method: Method
    where: str
    value: float | None = None  # of the knob; None takes the chosen one


class Phase(NamedTuple):
    """Jobs that belong together, for some seeds, and extras by name for the first seed."""

    title: str
    jobs: tuple[Job, ...]
    seeds: tuple[int, ...]
    extras: tuple[str, ...] = ()


def see(methods: Iterable[Method], shifts: Iterable[str]) -> tuple[Job, ...]:
    """Let methods see shifts, one method after the other, because building one takes time."""
    places = tuple(shifts)
    return tuple(Job(method, shift) for method in methods for shift in places)


def bins_for(inputs: int, bins: int = BINS) -> int:
    """Return the bins of a calibration error, fewer where they would have under 25 inputs.

    With few inputs in a bin, even a calibrated method seems to have an error: the distance between
    confidence and accuracy is at least that of sampling, about 0.08 for 25 inputs.

    >>> bins_for(100), bins_for(1000)
    (4, 20)
    """
    return max(1, min(bins, inputs // PER_BIN))


class Detection(NamedTuple):
    """Telling out-of-distribution inputs from inputs like the training data.

    Attributes:
        outside: the shift with out-of-distribution inputs.
        methods: whose scores are measured.
        baselines: scores that need no network, by name: inputs (N, ...) -> (N,).
    """

    outside: str
    methods: tuple[Method, ...]
    baselines: Mapping[str, Callable[[Tensor], Tensor]] = {}


class Frontier(NamedTuple):
    """The sweep of every family's knob, for the first seed."""

    families: tuple[Method, ...]
    shifts: tuple[str, ...]
    inputs: int  # of every shift


class Plan(NamedTuple):
    """What a dry run needs to know; nothing in it changes a result.

    Attributes:
        train: number of training inputs.
        held_out: number of held-out inputs.
        test: number of test inputs.
        passes: forward passes that one prediction of a method takes; None where not measured.
        curvature: forward passes for the curvature of one input: of all weights, of the last layer.
        renewal: training inputs with which batch norm is renewed for every posterior sample.
        milliseconds: of a forward pass for one input.
        note: what the estimates rest on.
    """

    train: int
    held_out: int
    test: int
    passes: Callable[[Method], float] | None = None
    curvature: tuple[float, float] = (0.0, 0.0)
    renewal: int = 0
    milliseconds: float = 0.0
    note: str = ""


@final
@dataclass(frozen=True, eq=False)
class Study:
    """A study, put together from its settings.

    Attributes:
        name: as in `python -m studies NAME`.
        title: of the report.
        settings: plain data; every artefact's header has them.
        load: cache folder -> the data.
        networks: by name.
        grounds: what rules stand on, by name: networks, and posteriors around them.
        methods: in the order of tables.
        plain: the method that others are compared with.
        shifts: of the test inputs; the first is none, inputs like the training data.
        share: (method, shift) -> what it sees of it.
        plan: sizes and costs for a dry run.
        seeds: of networks and everything random around them.
        looks: of methods in figures.
        grids: values of every knob that are tried.
        choices: rules by which knobs are chosen on held-out data.
        tried: method -> values among which its knob is chosen; by default the grid.
        scale_from: the method whose chosen value is the scale of methods that have none.
        frontier: the sweep of knobs, where there is one.
        levels: smaller numbers of inputs on which every method is scored too.
        diagrams: shifts of reliability diagrams.
        agreements: pairs of methods whose predictions are compared.
        detection: of out-of-distribution inputs.
        resamples: of the bootstrap of scores on unshifted inputs; 0 leaves it out.
        bins: of the calibration error.
        samples: of posteriors and of dropout masks.
        device: where networks run.
        rules: further rules, by name.
        prepare: (method, prepared inputs) -> in the memory layout that is fastest.
        renewal: workshop -> training batches with which batch norm is renewed for every posterior
            sample; None where networks have no batch norm.
        renewal_settings: what `renewal` depends on; None for its defaults.
        extras: further work for the first seed, by name; its results are in `Results.extras`.
        phases: the order of the work; by default all methods at all shifts.
        check: refuses early what would fail later.
        claims: what is judged.
        sections: of the report; by default those of `sections.standard`.
        headline: one sentence about the results.
        page: documentation of the study, for the report.
        command: that runs the study with these settings, for the report.
    """

    name: str
    title: str
    settings: Any
    load: Callable[[Path], StudyData]
    networks: Mapping[str, Network]
    grounds: Mapping[str, Ground]
    methods: tuple[Method, ...]
    plain: Method
    shifts: tuple[str, ...]
    share: Callable[[Method, str], Share]
    plan: Plan
    seeds: tuple[int, ...] = (0,)
    looks: Mapping[Method, Look] = field(default_factory=dict)
    grids: Grids = field(default_factory=dict)
    choices: Mapping[str, ChoiceRule] = field(default_factory=dict)
    tried: Callable[[Method], tuple[float, ...]] | None = None
    scale_from: Method | None = None
    frontier: Frontier | None = None
    levels: tuple[int, ...] = ()
    diagrams: tuple[str, ...] = ()
    agreements: tuple[tuple[Method, Method], ...] = ()
    detection: Detection | None = None
    resamples: int = 0
    bins: int = BINS
    samples: int = 30
    device: torch.device = torch.device("cpu")
    rules: Mapping[str, Rule] = field(default_factory=dict)
    prepare: Callable[[Method, Tensor], Tensor] | None = None
    renewal: Callable[[Workshop], Iterable[tuple[Tensor, Tensor]]] | None = None
    renewal_settings: Any = None
    extras: Mapping[str, Callable[[Workshop], Any]] = field(default_factory=dict)
    phases: tuple[Phase, ...] = ()
    check: Callable[[StudyData], None] | None = None
    claims: tuple[Claim, ...] = ()
    sections: Callable[[Results], list[Section]] | None = None
    headline: Callable[[Results], str] | None = None
    page: str = ""
    command: str = ""

    @property
    def base(self) -> str:
        """The shift that is none."""
        return self.shifts[0]

    def replaced(self, **changes: Any) -> Study:
        """Return the study with some fields changed."""
        return replace(self, **changes)

    def values(self, method: Method) -> tuple[float, ...]:
        """Return the values among which a knob is chosen, the most cautious first."""
        if self.tried is not None:
            return self.tried(method)
        return cautious_first(method.knob, self.grids)

    def seen_by(self, method: Method) -> tuple[str, ...]:
        """Return the shifts that a method sees."""
        return tuple(shift for shift in self.shifts if self.share(method, shift).inputs)

    def label(self, method: Method) -> str:
        """Name a method in a table."""
        return method.label({name: rule.label for name, rule in self.choices.items()})

    def look(self, method: Method) -> Look:
        """Return how a method is drawn; methods without a look of their own are grey."""
        return self.looks.get(method, Look(self.label(method), "#8a9099", "o"))


@final
@dataclass(frozen=True, eq=False)
class Kind(Generic[Settings]):
    """A study before its settings are known: what `python -m studies NAME` runs.

    Attributes:
        name: of the command.
        about: its help text; the first line is the summary.
        presets: settings by name; the first is the default.
        build: settings -> study.
    """

    name: str
    about: str
    presets: Mapping[str, Settings]
    build: Callable[[Settings], Study]
