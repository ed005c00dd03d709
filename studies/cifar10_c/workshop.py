"""Workshop: the networks of one seed, made when first asked for; `posteriors.py` builds on them."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import final

import torch
from torch import Tensor

from acnml import Classifier
from studies.cifar10_c.data import StudyData
from studies.cifar10_c.study import Cifar10CStudy
from studies.cifar10_c.training import (
    Processes,
    Recipe,
    load_trained,
    prepare_task,
    train,
    training_stage,
)
from studies.data.cifar10 import to_unit
from studies.models import MODELS
from studies.store import Artefact, Content, Stage, Work
from studies.study.artefacts import Artefacts, Once

MEMBER_SEEDS = 1000  # between the networks of an ensemble: no two studies' seeds meet


@final
class Workshop:
    """What predictors are built from, for one seed.

    Args:
        study: the settings.
        data: the images.
        artefacts: where stages become artefacts.
        seed: of all that is random in training.
    """

    def __init__(
        self, study: Cifar10CStudy, data: StudyData, artefacts: Artefacts, seed: int
    ) -> None:
        self.study, self.data, self.seed = study, data, seed
        self.artefacts = Once(artefacts)
        on_gpu = study.device == "best" and torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self._classifiers: dict[str, Classifier] = {}
        self._trainings: dict[tuple[Recipe, int], Stage] = {}

    # Stages ------------------------------------------------------------------------------------

    def trained(self) -> Artefact:
        """Train the network, and collect its weights."""
        return self._train(self.study.recipe, self.seed)

    def sgd(self) -> Artefact:
        """Return the weights of plain SGD: the given ones, or those of a training to the end."""
        recipe = self.study.recipe
        if recipe.start == "given":
            _, _, checksum = self._training(recipe, self.seed).settings
            task = partial(prepare_task, recipe, self.data.train, self.seed)
            stage = Stage(f"take given {recipe.model}", checksum)
            return self.artefacts.make(stage, lambda _: Content(task().network.state_dict()))
        plain = replace(recipe, training=recipe.training.without_averaging())
        trained = self._train(plain, self.seed)
        stage = Stage(f"take SGD {recipe.model}", None, self.seed, needs=(trained.stage,))
        return self.artefacts.make(stage, lambda _: Content(load_trained(trained).sgd))

    def swa(self, member: int = 0) -> Artefact:
        """Return averaged weights; those of the ensemble's other members are for it alone."""
        return self._average(self.study.recipe, self.seed + MEMBER_SEEDS * member)

    def dropout(self) -> Artefact:
        """Return averaged weights of the network with dropout."""
        return self._average(self._dropout_recipe, self.seed)

    # What they become --------------------------------------------------------------------------

    def classifier(self, weights: Artefact) -> Classifier:
        """Return the network with these weights, on the study's device."""
        return self._classifier(self.study.recipe, weights)

    def dropout_classifier(self) -> Classifier:
        """Return the averaged network with dropout."""
        return self._classifier(self._dropout_recipe, self.dropout())

    def normalise(self, images: Tensor) -> Tensor:
        """Bring images in [0, 1] to what the network takes."""
        return MODELS[self.study.recipe.model].normalise(images)

    def inputs(self, images: Tensor) -> Tensor:
        """Bring bytes to what the network takes, on the study's device."""
        return self.normalise(to_unit(images.to(self.device)))

    def dropout_inputs(self, images: Tensor) -> Tensor:
        """The same for the network with dropout, which may be of another kind."""
        return MODELS[self._dropout_recipe.model].normalise(to_unit(images.to(self.device)))

    # What they share ---------------------------------------------------------------------------

    @property
    def _dropout_recipe(self) -> Recipe:
        recipe = self.study.dropout_recipe
        if recipe is None:
            raise ValueError("this study has no network with dropout: set dropout_model")
        return recipe

    def _classifier(self, recipe: Recipe, weights: Artefact) -> Classifier:
        """Build a network once: what solvers find out about it is kept with it."""
        key = weights.stage.key
        if key not in self._classifiers:
            network = MODELS[recipe.model].untrained(seed=0).to(self.device)
            tensors = {name: tensor.to(self.device) for name, tensor in weights.load().items()}
            self._classifiers[key] = Classifier(network).at(tensors)
        return self._classifiers[key]

    def _average(self, recipe: Recipe, seed: int) -> Artefact:
        """Take the averaged weights by themselves: what else training leaves is large."""
        trained = self._train(recipe, seed)
        stage = Stage(f"take SWA {recipe.model}", None, seed, needs=(trained.stage,))
        return self.artefacts.make(stage, lambda _: Content(load_trained(trained).swa))

    def _train(self, recipe: Recipe, seed: int) -> Artefact:
        def make(work: Work) -> Content:
            task = prepare_task(recipe, self.data.train, seed)
            trained = train(task, recipe.training, seed, Processes(device=self.device), work)
            assert trained is not None  # the only process leads
            return trained.content()

        return self.artefacts.make(self._training(recipe, seed), make)

    def _training(self, recipe: Recipe, seed: int) -> Stage:
        """Return the stage of a training; the images' checksum is taken once."""
        if (recipe, seed) not in self._trainings:
            self._trainings[recipe, seed] = training_stage(recipe, self.data.train, seed)
        return self._trainings[recipe, seed]
