"""Side by side with laplace-torch: the same networks, data and prior, in one run.

python -m benchmarks.beside_laplace             all networks; writes docs/results/laplace-torch
python -m benchmarks.beside_laplace mlp         some networks, only printed

For every network and structure of the posterior, both libraries fit the generalised Gauss-Newton
matrix on the same data and predict by their linearised network (`Glm`, link "probit"). Times are
CPU times of one thread, of a second run after a first one. Peaks are memory above what was held
before. Where laplace-torch refuses or fails, its error is the result. So is that of a process that
may take 6 GB (`MOST`).

The other predictors run on the same networks: the network itself, ACNML, BMA with 30 samples, and
30 passes with dropout where the network has some.
"""

from __future__ import annotations

import gc
import resource
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import acnml
from acnml import Classifier, Diagonal, Kronecker
from acnml._util.torch_state import seeded
from acnml.fit import Structure
from acnml.posteriors import Posterior
from benchmarks.recording import RESULTS, record
from benchmarks.timing import fastest, peak
from studies.models import MODELS

FOLDER = RESULTS / "laplace-torch"
PRIOR = 10.0
MOST = 6 * 10**9  # bytes that a process may take
Row = dict[str, object]


@final
@dataclass(frozen=True)
class Subject:
    """A network with data to fit on and inputs to predict."""

    name: str
    network: nn.Module
    data: tuple[Tensor, Tensor]
    queries: Tensor
    last_layer: bool = False  # whether the posterior covers the last layer alone

    @property
    def loader(self) -> DataLoader[Any]:
        """The data in batches."""
        return DataLoader(TensorDataset(*self.data), batch_size=32)

    @property
    def layers(self) -> str | None:
        """What a posterior covers, as fits of acnml name it."""
        return "last" if self.last_layer else None


# Networks ----------------------------------------------------------------------------------------


class Transformer(nn.Module):
    """One block of attention and one of a perceptron, each after a LayerNorm; then the mean."""

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.heads, self.mixed = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.hidden, self.back = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout, self.out = nn.Dropout(0.1), nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Map sequences (B, positions, width) to logits."""
        split = self.heads(self.first(x)).unflatten(-1, (3, 4, -1)).transpose(1, 3)
        query, key, value = split.unbind(2)
        attended = functional.scaled_dot_product_attention(query, key, value)
        x = x + self.mixed(attended.transpose(1, 2).flatten(2))
        x = x + self.back(self.dropout(self.hidden(self.second(x)).relu()))
        logits: Tensor = self.out(x.mean(1))
        return logits


def mlp() -> Subject:
    """An MLP 784-200-200-10 with dropout."""
    hidden = nn.Linear(784, 200), nn.ReLU(), nn.Linear(200, 200), nn.ReLU(), nn.Dropout(0.1)
    return _subject("MLP 784-200-200-10", nn.Sequential(*hidden, nn.Linear(200, 10)), (784,), 10)


def resnet20() -> Subject:
    """A ResNet-20, with batch norm in eval mode."""
    network = MODELS["resnet20"].untrained(seed=0)
    return _subject("ResNet-20", network, (3, 32, 32), 10, examples=32, queries=4)


def thousand_classes() -> Subject:
    """A perceptron with 32 features and 1,000 classes, its last layer covered."""
    network = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1000))
    return _subject("1,000 classes, last layer", network, (16,), 1000, 32, 2, last=True)


def transformer() -> Subject:
    """A small transformer on sequences of 16 vectors."""
    return _subject("transformer", Transformer(64, 10), (16, 64), 10)


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "mlp": mlp,
    "resnet20": resnet20,
    "thousand": thousand_classes,
    "transformer": transformer,
}


def _subject(
    name: str,
    network: nn.Module,
    shape: tuple[int, ...],
    classes: int,
    examples: int = 64,
    queries: int = 16,
    last: bool = False,
) -> Subject:
    """Draw data around one centre per class, and train a little: the cost does not depend on it."""
    generator = torch.Generator().manual_seed(0)
    centres = torch.randn(classes, *shape, generator=generator)
    labels = torch.randint(0, classes, (examples + queries,), generator=generator)
    x = centres[labels] + torch.randn(len(labels), *shape, generator=generator)
    with seeded(0):
        optimiser = torch.optim.SGD(network.train().parameters(), 0.01, momentum=0.9)
        for some in torch.arange(examples).split(32):
            optimiser.zero_grad()
            functional.cross_entropy(network(x[some]), labels[some]).backward()
            optimiser.step()
    return Subject(
        name, network.eval(), (x[:examples], labels[:examples]), x[examples:], last_layer=last
    )


# Both libraries ----------------------------------------------------------------------------------


def theirs(subject: Subject, structure: str) -> Any:
    """Fit with laplace-torch."""
    from laplace import Laplace

    subset = "last_layer" if subject.last_layer else "all"
    la = Laplace(
        subject.network,
        "classification",
        subset_of_weights=subset,
        hessian_structure=structure,
        prior_precision=PRIOR,
    )
    la.fit(subject.loader)
    return la


def ours(subject: Subject, structure: Structure) -> Posterior:
    """Fit with acnml."""
    return acnml.fit_laplace(
        Classifier(subject.network),
        subject.loader,
        structure=structure,
        layers=subject.layers,
        prior_precision=PRIOR,
        progress=False,
    )


def compared(subject: Subject, structure: Structure) -> Iterator[Row]:
    """Yield a row for each library: seconds of a fit, milliseconds of a prediction, megabytes."""
    common = {"network": subject.name, "structure": structure}
    posterior, la, error = ours(subject, structure), None, ""
    try:
        la = theirs(subject, structure)
        with torch.no_grad():
            la(subject.queries[:2], link_approx="probit")
    except Exception as raised:  # what it says is the result
        error = f"{type(raised).__name__}: {str(raised).strip().splitlines()[0]}"
        la = None
    predict = acnml.Glm(Classifier(subject.network), posterior)
    fits: dict[str, Callable[[], object]] = {"acnml": partial(ours, subject, structure)}
    predictions: dict[str, Callable[[], object]] = {"acnml": partial(predict, subject.queries)}
    predict(subject.queries)
    if la is not None:
        fits["laplace-torch"] = partial(theirs, subject, structure)
        predictions["laplace-torch"] = partial(_glm, la, subject.queries)
    for library in ("acnml", "laplace-torch"):
        if library not in fits:
            yield {**common, "library": library, "error": error}
            continue
        fit_seconds, fit_megabytes = cost(fits[library])
        seconds, megabytes = cost(predictions[library])
        yield {
            **common,
            "library": library,
            "fit_seconds": fit_seconds,
            "fit_megabytes": fit_megabytes,
            "predict_milliseconds": 1000 * seconds / len(subject.queries),
            "predict_megabytes": megabytes,
            **(agreement(subject, posterior, la) if library != "acnml" else {}),
        }


def cost(run: Callable[[], object]) -> tuple[float, float]:
    """Return seconds and megabytes of one call."""
    seconds: dict[str, float] = {}
    memory = peak(lambda: seconds.update(fastest({"": run}, 1)))
    return seconds[""], memory / 1e6


def _glm(la: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        probs: Tensor = la(x, link_approx="probit")
    return probs


def agreement(subject: Subject, posterior: Posterior, la: Any) -> Row:
    """Return relative differences of the variances of both fits, and differences of predictions.

    The predictions are from the same posterior, that of laplace-torch, in both libraries.
    """
    from acnml.laplace_torch import from_laplace

    converted = from_laplace(la)
    glm = acnml.Glm(Classifier(subject.network), converted)
    gap = (glm(subject.queries).exp() - _glm(la, subject.queries)).abs().max()
    own, its = _variances(posterior), _variances(converted)
    ratios = torch.cat([(own[name] / its[name] - 1).abs().flatten() for name in own])
    return {
        "variance_median": float(ratios.median()),
        "variance_most": float(ratios.max()),
        "prediction_most": float(gap),
    }


def _variances(posterior: Posterior) -> dict[str, Tensor]:
    """Return the variance of every weight."""
    if isinstance(posterior, Diagonal):
        return dict(posterior.var)
    assert isinstance(posterior, Kronecker)
    found: dict[str, Tensor] = {}
    for block in posterior.blocks:
        assert isinstance(block, acnml.posteriors.EigenBlock)
        matrix = block.output_basis**2 @ block.var @ (block.input_basis**2).mT
        found |= block.layer.split(matrix, posterior.mean)
    return found


def beside(subject: Subject) -> Iterator[Row]:
    """Yield a row for each other predictor on the same network, with the posterior "kron"."""
    classifier, posterior = Classifier(subject.network), ours(subject, "kron")
    predictors: dict[str, Callable[[Tensor], Tensor]] = {
        "network": acnml.Map(classifier),
        "ACNML, linearised": acnml.Acnml(
            classifier, posterior, acnml.Linearised(), alpha=0.1, on_unsolved="ignore"
        ),
        "GLM": acnml.Glm(classifier, posterior),
        "BMA, 30 samples": acnml.Bma(classifier, posterior),
    }
    if any(isinstance(module, nn.Dropout) for module in subject.network.modules()):
        predictors["MC dropout, 30 passes"] = acnml.McDropout(classifier)
    for name, predict in predictors.items():
        run = partial(predict, subject.queries)
        run()
        seconds, megabytes = cost(run)
        yield {
            "network": subject.name,
            "predictor": name,
            "predict_milliseconds": 1000 * seconds / len(subject.queries),
            "predict_megabytes": megabytes,
        }


def main() -> None:
    """Compare on all networks, or on those that are named."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MOST, MOST))
    warnings.simplefilter("ignore")  # of laplace-torch and its backends
    libraries: list[Row] = []
    predictors: list[Row] = []
    for name in sys.argv[1:] or SUBJECTS:
        subject = SUBJECTS[name]()
        for structure in ("diag", "kron"):
            libraries += _shown(compared(subject, structure))
        predictors += _shown(beside(subject))
        gc.collect()
    if not sys.argv[1:]:
        record(FOLDER / "libraries.csv", libraries)
        record(FOLDER / "predictors.csv", predictors)


def _shown(rows: Iterator[Row]) -> list[Row]:
    found = []
    for row in rows:
        print(*(f"{v:.3g}" if isinstance(v, float) else v for v in row.values()), flush=True)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
