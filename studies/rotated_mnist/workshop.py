"""Workshop: the networks and posteriors of one seed, made when first asked for."""

from __future__ import annotations

from typing import Any, final

from torch import nn

import acnml
from acnml import Classifier, Posterior
from acnml._util.seeding import seeded
from studies.models.mlp import mlp
from studies.rotated_mnist.shifts import StudyData
from studies.rotated_mnist.study import RotatedMnist
from studies.rotated_mnist.training import Batches, train_mean_field, train_network
from studies.store import Artefact, Content, Stage, Work
from studies.study.artefacts import Artefacts, Once
from studies.study.saved import curvature_content

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
        self, study: RotatedMnist, data: StudyData, artefacts: Artefacts, seed: int
    ) -> None:
        self.study, self.data, self.seed = study, data, seed
        self.artefacts = Once(artefacts)

    # Stages ------------------------------------------------------------------------------------

    def network(self, member: int = 0) -> Artefact:
        """Train a network; all members of the ensemble but the first are for the ensemble only."""
        seed, training = self.seed + MEMBER_SEEDS * member, self.study.training
        stage = self._stage("train network", training, seed)
        return self.artefacts.make(
            stage,
            lambda work: train_network(self._plain(seed), self.data.train, training, seed, work),
        )

    def dropout(self) -> Artefact:
        """Train a network with dropout."""
        training, seed = self.study.training, self.seed
        stage = self._stage("train dropout", (training, self.study.dropout), seed)
        return self.artefacts.make(
            stage,
            lambda work: train_network(self._dropping(), self.data.train, training, seed, work),
        )

    def bayes_by_backprop(self) -> Artefact:
        """Train a mean-field posterior."""
        settings, seed = self.study.bayes_by_backprop, self.seed
        stage = self._stage("train Bayes by Backprop", settings, seed)
        return self.artefacts.make(
            stage,
            lambda work: train_mean_field(self._plain(seed), self.data.train, settings, seed, work),
        )

    def swag(self) -> Artefact:
        """Collect SWAG-D, from the trained network on."""
        settings, network = self.study.swag, self.network()

        def make(_: Work) -> Content:
            batches = Batches(self.data.train, settings.batch_size)
            swag = acnml.collect_swag(
                self.classifier(network),
                batches,
                settings.epochs,
                settings.learning_rate,
                seed=self.seed,
                progress=False,
            )
            return Content.of_posterior(swag.diagonal())

        return self.artefacts.make(
            Stage("fit SWAG-D", settings, self.seed, needs=(network.stage,)), make
        )

    def curvature(self) -> Artefact:
        """Find the Kronecker-factored curvature of the whole network."""
        return self._curvature("fit KFAC", self.network(), None)

    def head_curvature(self, member: int = 0) -> Artefact:
        """Find the Kronecker-factored curvature of the last layer."""
        name = _last_layer(self._plain(0))
        names = [f"{name}.weight", f"{name}.bias"]
        return self._curvature("fit KFAC last layer", self.network(member), names)

    # What they become --------------------------------------------------------------------------

    def classifier(self, network: Artefact) -> Classifier:
        """Return a trained network."""
        dropping = network.stage.name == "train dropout"
        model = self._dropping() if dropping else self._plain(0)
        model.load_state_dict(network.load())
        return Classifier(model)

    def at_mean(self, posterior: Posterior) -> Classifier:
        """Return the network at the mean of a posterior of all its weights."""
        return Classifier(self._plain(0)).at(posterior.mean)

    # What they share ---------------------------------------------------------------------------

    def _stage(self, name: str, settings: Any, seed: int) -> Stage:
        return Stage(name, (settings, self.study.hidden, self.data.checksum), seed)

    def _curvature(self, name: str, network: Artefact, names: list[str] | None) -> Artefact:
        def make(_: Work) -> Content:
            batches = Batches(self.data.train, 1000)
            classifier = self.classifier(network)
            curvature = acnml.kronecker_curvature(classifier, batches, names, progress=False)
            return curvature_content(curvature)

        seed = network.stage.seed
        return self.artefacts.make(Stage(name, None, seed, needs=(network.stage,)), make)

    def _plain(self, seed: int) -> nn.Module:
        pixels = self.data.train.images[0].numel()
        with seeded(seed):
            return mlp(10, self.study.hidden, pixels)

    def _dropping(self) -> nn.Module:
        """Return the network with dropout after every hidden layer."""
        layers: list[nn.Module] = []
        for layer in self._plain(self.seed).children():
            layers += [layer, nn.Dropout(self.study.dropout)] if _is_hidden(layer) else [layer]
        return nn.Sequential(*layers)


def _last_layer(network: nn.Module) -> str:
    return max((name for name, _ in network.named_children()), key=int)


def _is_hidden(layer: nn.Module) -> bool:
    return isinstance(layer, nn.ReLU)
