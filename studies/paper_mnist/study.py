"""The paper's MNIST experiments: Bayes by Backprop and five exact steps on rotated digits."""

from __future__ import annotations

from studies.data.catalogue import MNIST
from studies.data.folder import locate
from studies.engine.grounds import MeanField
from studies.engine.method import LINEARISED, PAPER_STEPS, Share
from studies.engine.study import Network, Phase, Study, see
from studies.paper_mnist.settings import PaperMnist
from studies.rotated_mnist import methods as ms
from studies.rotated_mnist.study import load_data, mlp_model, sizes
from studies.training import Descent

METHODS = (ms.MAP_BBP, ms.BMA_BBP, ms.ACNML_BBP_PAPER, ms.ACNML_BBP)
BLOCKS = {PAPER_STEPS: 50, LINEARISED: 500}


def build(settings: PaperMnist) -> Study:
    """Put the study together."""
    has_mnist = any(locate(file) for file in MNIST.files)
    study = Study(
        name="paper-mnist",
        title="The paper's MNIST experiments",
        settings=settings,
        load=lambda _: load_data(settings.train_images, settings.validation),
        networks={ms.NETWORK: Network(mlp_model(settings.hidden, has_mnist), Descent())},
        grounds={ms.BBP: MeanField(ms.NETWORK, settings.bayes_by_backprop)},
        methods=METHODS,
        plain=ms.MAP_BBP,
        shifts=settings.shifts,
        share=lambda method, _: Share(
            settings.images, BLOCKS.get(method.solver, 1000), in_tranches=True
        ),
        plan=sizes(settings.train_images, settings.validation, has_mnist),
        seeds=settings.seeds,
        looks=ms.LOOKS,
        bins=settings.bins,
        samples=settings.samples,
    )
    cheap = (ms.MAP_BBP, ms.BMA_BBP, ms.ACNML_BBP)
    coarse = [s for s in study.shifts if s == "random" or float(s[:-1]) % 30 == 0]
    fine = [s for s in study.shifts if s not in coarse]
    phases = tuple(
        phase
        for seed in study.seeds
        for phase in (
            Phase(f"cheap methods, seed {seed}", see(cheap, study.shifts), (seed,)),
            Phase(f"five steps, seed {seed}", see([ms.ACNML_BBP_PAPER], [*coarse, *fine]), (seed,)),
        )
    )
    return study.replaced(phases=phases)
