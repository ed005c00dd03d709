"""The settings of the CIFAR-10-C study, and its presets: for a CPU, and at the paper's scale."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, final

from studies.cifar10_c.recipes import RECIPES, Recipe
from studies.corruptions import BENCHMARK, CORRUPTIONS, SEVERITIES
from studies.engine.method import ALPHA, SCALE, TAU, TEMPERATURE, Grids
from studies.settings import require_positive_fields
from studies.training import Averaging
from studies.training.settings import Precision

CLEAN, BLUR = "clean", "gaussian_blur"
TRAIN_IMAGES, TEST_IMAGES = 50_000, 10_000


def shift(corruption: str, severity: int) -> str:
    """Name a corruption at a severity.

    >>> shift("fog", 3)
    'fog 3'
    """
    return f"{corruption} {severity}"


@final
@dataclass(frozen=True)
class RecipeChanges:
    """Changes to a network's own recipe; None leaves it as it is."""

    epochs: int | None = None
    swa_start: int | None = None
    learning_rate: float | None = None
    swa_learning_rate: float | None = None
    batch_size: int | None = None
    precision: Precision | None = None

    def of(self, training: Averaging) -> Averaging:
        """Return the recipe's training with these changes."""
        return replace(training, **{n: v for n, v in vars(self).items() if v is not None})


@final
@dataclass(frozen=True)
class Images:
    """How many images a method sees at every corruption and severity, by its cost.

    All are the first of one random order, so that smaller numbers are part of larger ones.
    """

    in_distribution: int = 9500  # clean images for the cheap methods
    cheap: int = 1000  # a few forward passes
    network_wide: int = 1000  # 30 to 200 forward passes: BMA, ACNML over all weights
    beside: int = 100  # secondary methods: α chosen by held-out NLL; GLM over all weights
    paper_steps: int = 50  # the paper's 5 or 10 gradient steps: hundreds of forward passes

    def __post_init__(self) -> None:
        counts = list(vars(self).values())
        if counts != sorted(counts, reverse=True) or counts[-1] < 1:
            raise ValueError(
                "the numbers of images must not grow from in_distribution over cheap, network_wide "
                f"and beside to paper_steps, got {counts}"
            )


@final
@dataclass(frozen=True)
class Choice:
    """How knobs are chosen, on clean held-out images alone.

    By a budget: the most cautious value whose NLL is at most `tolerance` nats above SWA's. Near the
    best: at most `near` nats above that of SWA with the temperature of least NLL. The paper's way:
    the largest of its alphas that costs at most `accuracy` and `nll` against SWA.
    """

    held_out: int = 500  # images
    source: Literal["train", "test"] = "test"  # the set they are taken from
    tolerance: float = 0.0
    near: float = 0.01
    accuracy: float = 0.005
    nll: float = 0.05

    def __post_init__(self) -> None:
        require_positive_fields(self, "held_out")


@final
@dataclass(frozen=True)
class Curvature:
    """KFAC at SWA: the images it is measured on; it is then scaled to all training images.

    The prior precision of the whole network's posterior is that of training unless it is given:
    weight decay times the number of training images.
    """

    images: int | None = 5000  # for the whole network; None takes all
    head_images: int | None = None  # for the last layer
    prior_precision: float | None = None

    def __post_init__(self) -> None:
        require_positive_fields(self, "images", "head_images", "prior_precision")


@final
@dataclass(frozen=True)
class Sweep:
    """The sweep of every family's knob, for the first seed; choices use the same grids.

    The choice of alpha tries the paper's values as well.
    """

    images: int = 100  # of every corruption
    severity: int = 5
    temperatures: tuple[float, ...] = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 6.0)
    alphas: tuple[float, ...] = (0.25, 1.0, 3.0, 6.0, 12.0)
    prior_precisions: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 100.0, 1000.0)
    covariance_scales: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)

    def __post_init__(self) -> None:
        grids = ("temperatures", "alphas", "prior_precisions", "covariance_scales")
        require_positive_fields(self, "images", *grids)

    @property
    def grids(self) -> Grids:
        """The values of every knob."""
        return {
            TEMPERATURE: self.temperatures,
            ALPHA: self.alphas,
            TAU: self.prior_precisions,
            SCALE: self.covariance_scales,
        }


@final
@dataclass(frozen=True)
class Cifar10CStudy:
    """All settings of the study.

    Attributes:
        model: of `RECIPES`; its recipe says whether training starts from given weights.
        dropout_model: the network of SWA-Dropout; None leaves that method out. If it is `model`,
            there is one network, with dropout in training: SWA runs it without masks.
        members: of SWA-Ensemble; 1 leaves it out, and 0 takes the networks of all seeds.
        samples: of posteriors and of dropout masks.
        batch_norm_images: with which batch norm is renewed for every sample; None takes all.
        severities: in the order in which the costly methods see them.
        steps_severities: those at which the paper's gradient steps are taken.
        only_papers: whether to leave out methods that the paper does not have, and the frontier.
        grounds: networks and posteriors; only methods on these take part. Empty takes all.
        blurred: severities of Gaussian blur for reliability diagrams.
        resamples: of the bootstrap.
        device: "best" is a GPU where there is one.
        milliseconds: of a forward pass of one image, for the plan's estimate alone.
    """

    model: str = "resnet20"
    dropout_model: str | None = None
    seeds: tuple[int, ...] = (0,)
    members: int = 1
    samples: int = 30
    batch_norm_images: int | None = 1000
    corruptions: tuple[str, ...] = BENCHMARK
    severities: tuple[int, ...] = (5, 4, 3, 1, 2)
    steps_severities: tuple[int, ...] = (5, 3)
    only_papers: bool = False
    grounds: tuple[str, ...] = ()
    blurred: tuple[int, ...] = (5, 3)
    bins: int = 20
    resamples: int = 200
    device: Literal["cpu", "best"] = "cpu"
    milliseconds: float = 0.8
    schedule: RecipeChanges = RecipeChanges()
    images: Images = Images()
    choice: Choice = Choice()
    curvature: Curvature = Curvature()
    frontier: Sweep = Sweep()

    def __post_init__(self) -> None:
        require_positive_fields(self, "samples", "batch_norm_images", "bins", "resamples")
        for name in filter(None, (self.model, self.dropout_model)):
            if name not in RECIPES:
                raise ValueError(f"there is no network {name!r}, only {', '.join(RECIPES)}")
            if self._changed(name).training.collected < 2:
                raise ValueError(f"{name} must collect at least two epochs: start SWA earlier")
        if self.recipe.start == "given" and self.choice.source == "train":
            raise ValueError(
                f"the given weights of {self.model} were trained on all training images, so knobs "
                "cannot be chosen on them: set choice.source=test"
            )
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must differ, got {', '.join(map(str, self.seeds))}")
        if not (self.seeds and self.corruptions and self.members >= 0):
            raise ValueError("there must be a seed and a corruption, and no negative members")
        for name in self.corruptions:
            if name not in CORRUPTIONS:
                raise ValueError(f"there is no corruption {name!r}, only {', '.join(CORRUPTIONS)}")
        if not {*self.severities, *self.blurred, self.frontier.severity} <= set(SEVERITIES):
            raise ValueError(f"severities must be some of {', '.join(map(str, SEVERITIES))}")

    @property
    def sweeps(self) -> bool:
        """Whether the knobs of all families are swept."""
        return not (self.only_papers or self.grounds)

    @property
    def recipe(self) -> Recipe:
        """The network and how it is trained."""
        return self._changed(self.model)

    @property
    def dropout_recipe(self) -> Recipe | None:
        """The same for the network with dropout, where there is one."""
        return self._changed(self.dropout_model) if self.dropout_model else None

    @property
    def shifts(self) -> tuple[str, ...]:
        """Clean images, then every corruption, the severities in the order of work."""
        return (CLEAN, *(one for severity in self.severities for one in self.seen_at(severity)))

    def seen_at(self, severity: int) -> tuple[str, ...]:
        """Return all corruptions of a severity, and Gaussian blur where a diagram needs it."""
        blur = (BLUR,) if severity in self.blurred and BLUR not in self.corruptions else ()
        return tuple(shift(name, severity) for name in (*self.corruptions, *blur))

    def scored_at(self, severity: int) -> tuple[str, ...]:
        """Return the shifts over which scores of a severity are averaged; 0 is clean."""
        return tuple(shift(name, severity) for name in self.corruptions) if severity else (CLEAN,)

    @property
    def steps_shifts(self) -> tuple[str, ...]:
        """Clean images, and the shifts at which the paper's gradient steps are taken."""
        severities = [s for s in self.severities if s in self.steps_severities]
        return (CLEAN, *(one for severity in severities for one in self.scored_at(severity)))

    @property
    def blurred_shifts(self) -> tuple[str, ...]:
        """Clean images and those under Gaussian blur that the study sees, by severity."""
        severities = sorted({*self.blurred} & {*self.severities})
        return (CLEAN, *(shift(BLUR, severity) for severity in severities))

    def _changed(self, model: str) -> Recipe:
        recipe = RECIPES[model]
        return replace(recipe, training=self.schedule.of(recipe.training))


PAPER = Cifar10CStudy(
    model="vgg16",
    dropout_model="vgg16_dropout",
    seeds=(0, 1, 2),
    members=3,
    batch_norm_images=None,
    device="best",
    milliseconds=0.05,  # a guess for VGG16 on a GPU
    steps_severities=SEVERITIES,
    images=Images(TEST_IMAGES, TEST_IMAGES, TEST_IMAGES, TEST_IMAGES, TEST_IMAGES),
    choice=Choice(held_out=5000, source="train"),
    curvature=Curvature(images=None),
    frontier=Sweep(images=1000),
)
# Three networks from scratch: ± is over seeds, and SWA-Ensemble and SWA-Dropout have rows.
SCRATCH = Cifar10CStudy(
    model="resnet20_scratch",
    dropout_model="resnet20_dropout",
    seeds=(0, 1, 2),
    members=0,
    severities=(5, 3),
    only_papers=True,
    images=Images(in_distribution=TEST_IMAGES),
    choice=Choice(held_out=1000, source="train"),
)
# The paper's network on a tenth of its schedule, with the paper's methods. An epoch takes about 8
# minutes on one core with AVX-512 in bfloat16, and all of the training under four hours.
VGG16_SHORT = Cifar10CStudy(
    model="vgg16",
    severities=(5, 3),
    only_papers=True,
    milliseconds=4.8,
    schedule=RecipeChanges(epochs=28, swa_start=20, precision="bfloat16"),
    images=Images(TEST_IMAGES, 250, 250, 250, 10),
    choice=Choice(held_out=500, source="train"),
    curvature=Curvature(images=2000),
)
PRESETS: Mapping[str, Cifar10CStudy] = {
    "cpu": Cifar10CStudy(),
    "scratch": SCRATCH,
    "vgg16-short": VGG16_SHORT,
    "paper": PAPER,
}
