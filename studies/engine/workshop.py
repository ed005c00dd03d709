"""Where stages become artefacts, and the networks of one seed as stages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeAlias, TypeVar, final

from torch import Tensor

from acnml import Classifier
from studies.data import Labelled
from studies.engine.study import Model, Network, Study, StudyData
from studies.store import Artefact, Content, Stage, Store, Work
from studies.store.record import digest
from studies.store.work import Compute, Make
from studies.training import Processes, Task, load_trained, train

T = TypeVar("T")
Prepare: TypeAlias = Callable[[], Compute]  # loads what is heavy, before the clock runs
MEMBER_SEEDS = 1000  # between the networks of an ensemble, so that seeds of a study do not collide


class Artefacts(Protocol):
    """Stage -> artefact."""

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        ...

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        ...


@final
class Making:
    """Makes missing artefacts.

    Args:
        store: where artefacts are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        return self._store.make(stage, function)

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        if (found := self._store.find(stage)) is not None:
            return found
        return self._store.predict(stage, inputs, block, prepare())


@final
class MissingError(Exception):
    """An artefact that a report would show does not exist yet."""


@final
class Finished:
    """Makes nothing, for reports: a missing artefact is an error that names it.

    Args:
        store: where artefacts are kept.
    """

    def __init__(self, store: Store) -> None:
        self._store = store

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go."""
        return self._find(stage)

    def predict(self, stage: Stage, inputs: int, block: int, prepare: Prepare) -> Artefact:
        """Return the artefact of predictions, which are computed in blocks."""
        return self._find(stage)

    def _find(self, stage: Stage) -> Artefact:
        found = self._store.find(stage)
        if found is None:
            raise MissingError(stage.title)
        return found


@final
class Gathering:
    """Collects what there is, and the names of what is missing."""

    def __init__(self) -> None:
        self.missing: dict[str, None] = {}  # in order, once each

    def each(self, find: Callable[..., T], arguments: Iterable[tuple[Any, ...]]) -> tuple[T, ...]:
        """Call the function with each of the arguments, and leave out what is missing."""
        found = []
        for some in arguments:
            try:
                found.append(find(*some))
            except MissingError as error:
                self.missing[str(error)] = None
        return tuple(found)


@final
class Workshop:
    """The networks of one seed, made when first asked for; posteriors build on them.

    Args:
        study: what is done.
        data: its data.
        artefacts: where stages become artefacts.
        seed: of everything random in training.
    """

    def __init__(self, study: Study, data: StudyData, artefacts: Artefacts, seed: int) -> None:
        self.study, self.data, self.artefacts, self.seed = study, data, artefacts, seed
        self.memory: dict[Any, Any] = {}  # of choices, which look at the same predictions often
        self._made: dict[str, Artefact] = {}
        self._classifiers: dict[str, Classifier] = {}

    def of_seed(self, seed: int) -> Workshop:
        """Return the workshop of another seed of the same study."""
        return self if seed == self.seed else Workshop(self.study, self.data, self.artefacts, seed)

    def make(self, stage: Stage, function: Make) -> Artefact:
        """Return the artefact of a stage that is done in one go; the disk is asked once."""
        if stage.key not in self._made:
            self._made[stage.key] = self.artefacts.make(stage, function)
        return self._made[stage.key]

    # Stages ------------------------------------------------------------------------------------

    def weights(self, name: str, member: int = 0) -> Artefact:
        """Return the weights of a network by themselves: what else training leaves is large."""
        network, seed = self.study.networks[name], self.seed + MEMBER_SEEDS * member
        if network.training is None:
            stage = Stage(f"take given {name}", (network.model.settings, _given(network.model)))
            return self.make(stage, lambda _: Content(network.model.start(0).state_dict()))
        trained = self.trained(name, member)
        stage = Stage(f"take {network.take.__name__} {name}", None, seed, needs=(trained.stage,))

        def take(_: Work) -> Content:
            return Content(network.take(load_trained(trained)), {"epochs": trained.facts["epochs"]})

        return self.make(stage, take)

    def trained(self, name: str, member: int = 0) -> Artefact:
        """Train a network; members of an ensemble after the first have seeds of their own."""
        network = self.study.networks[name]
        stage = self.training_stage(name, member)
        assert network.training is not None  # or there is nothing to train
        training = network.training

        def make(work: Work) -> Content:
            processes = Processes(device=self.study.device)
            done = train(self.task(name, member), training, stage.seed, processes, work)
            assert done is not None  # the only process leads
            return done.content()

        return self.make(stage, make)

    def training_stage(self, name: str, member: int = 0) -> Stage:
        """Return the stage of a training: the network, the schedule, the data, where it starts.

        The number of processes is no part of it, nor is the hardware.
        """
        network = self.study.networks[name]
        start = () if network.start is None else (self.weights(network.start, member).stage,)
        settings = (
            network.model.settings,
            network.training,
            len(self._train_data(network).labels),
            self.data.train_checksum,
            _given(network.model),
        )
        return Stage(f"train {name}", settings, self.seed + MEMBER_SEEDS * member, needs=start)

    def task(self, name: str, member: int = 0) -> Task:
        """Return a network where its training starts, with the data it learns from."""
        network = self.study.networks[name]
        module = network.model.start(self.seed + MEMBER_SEEDS * member)
        if network.start is not None:
            module.load_state_dict(self.weights(network.start, member).load())
        return Task(module, self._train_data(network), network.model.augmented)

    # What they become --------------------------------------------------------------------------

    def classifier(self, name: str, weights: Artefact) -> Classifier:
        """Return a network with these weights; built once, because solvers cache facts about it."""
        key = weights.stage.key
        if key not in self._classifiers:
            tensors = {n: t.to(self.study.device) for n, t in weights.load().items()}
            self._classifiers[key] = self.untrained(name).at(tensors)
        return self._classifiers[key]

    def untrained(self, name: str) -> Classifier:
        """Return a network whose weights are to be replaced."""
        return Classifier(self.study.networks[name].model.untrained(0).to(self.study.device))

    def prepared(self, name: str, inputs: Tensor) -> Tensor:
        """Bring stored inputs to what a network takes, on the study's device."""
        return self.study.networks[name].model.prepare(inputs.to(self.study.device))

    def train_data(self, name: str) -> Labelled:
        """Return the data that a network learns from."""
        return self._train_data(self.study.networks[name])

    def _train_data(self, network: Network) -> Labelled:
        return self.data.train.first(network.inputs)


def _given(model: Model) -> str | None:
    """Return the checksum of given weights."""
    if model.given is None:
        return None
    if not model.given.is_file():
        raise FileNotFoundError(f"there is no weight file {model.given}")
    return digest(model.given.read_bytes())
