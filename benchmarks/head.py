"""Cost of the last-layer path: predictions, fits, choices and the exported model.

Ratios are to a forward pass of the same batch in the same run; both take turns, and the fastest of
several rounds counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import acnml
from acnml import Acnml, Classifier
from acnml._util.torch_state import seeded
from benchmarks.timing import fastest
from studies.models import MODELS
from studies.models.mlp import mlp

Row = dict[str, Any]
ALPHA = 0.3

# With α = 0.3 the logits of the trained heads have standard deviations near 10, and every label
# matters. With this α the standard deviations are near 1.
NARROW = 0.003


def head_rows() -> list[Row]:
    """Measure everything."""
    resnet = MODELS["resnet20"].untrained(seed=0).eval()
    with seeded(0):
        images = torch.randn(512, 3, 32, 32)
        digits = torch.randn(2000, 784)
    perceptron = nn.Sequential(nn.Flatten(), *mlp(10).children()).eval()
    parts: list[Callable[[], list[Row]]] = [
        lambda: predictions("ResNet-20", resnet, images, {1: "≤ 1.3", 16: "≤ 1.15", 200: "≤ 1.1"}),
        lambda: predictions("MLP 784-1200-1200-10", perceptron, digits, {2000: "≤ 1.5"}),
        fits,
        lambda: [choice(resnet, images)],
        lambda: exported(resnet, images),
        heads,
    ]
    rows = []
    for part in parts:
        for row in part():
            print(
                f"{row['case']:<55} {row['value']:10.3g} {row['unit']} {row['target']}", flush=True
            )
            rows.append(row)
    return rows


def predictions(
    name: str, network: nn.Module, inputs: Tensor, targets: dict[int, str]
) -> list[Row]:
    """Measure predictions, in forward passes of the same batch."""
    classifier = Classifier(network)
    posterior = acnml.fit_laplace(classifier, [inputs[:256]], layers="last", progress=False)
    predict = Acnml(classifier, posterior, alpha=ALPHA)
    rows = []
    for size, target in targets.items():
        x = inputs[:size]
        with torch.no_grad():
            times = fastest({"plain": partial(network, x), "own": partial(predict, x)}, 20)
        rows.append(
            _row(
                f"{name} last layer, batch of {size}",
                times["own"] / times["plain"],
                "passes",
                target,
            )
        )
    return rows


def fits() -> list[Row]:
    """Measure fits of a last layer, in forward passes of the data through a ResNet-20."""
    rows = []
    for classes in (10, 1000):
        network = MODELS["resnet20"].untrained(seed=0, classes=classes).eval()
        with seeded(0):
            data = [torch.randn(128, 3, 32, 32) for _ in range(4)]
        classifier, layer = Classifier(network), acnml.last_linear(network)

        def forward(network: nn.Module = network, data: list[Tensor] = data) -> None:
            with torch.no_grad():
                for x in data:
                    network(x)

        def fit(
            classifier: Classifier = classifier,
            layer: nn.Linear = layer,
            data: list[Tensor] = data,
        ) -> None:
            acnml.fit.fit_curvature(classifier, data, layers=[layer], progress=False)

        times = fastest({"forward": forward, "fit": fit}, 5)
        value = times["fit"] / times["forward"]
        rows.append(_row(f"fit, {classes} classes, 512 images", value, "passes", "≤ 1.1"))
    return rows


def choice(network: nn.Module, images: Tensor) -> Row:
    """Measure `calibrate`, in passes of the training and validation data."""
    validation, train = _labelled(network, images), images[:64]

    def forward() -> None:
        with torch.no_grad():
            network(images)
            network(train)

    def choose() -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # 512 images are few for a price of 0.01 nats
            acnml.calibrate(network, train, validation, progress=False)

    times = fastest({"forward": forward, "choose": choose}, 6)
    value = times["choose"] / times["forward"]
    return _row(f"calibrate, {len(images)} images", value, "passes", "≤ 1.3")


def _labelled(network: nn.Module, images: Tensor) -> tuple[Tensor, Tensor]:
    """Return images with labels that the network knows in part."""
    with seeded(1), torch.no_grad():
        logits = network(images)
        labels = torch.distributions.Categorical(logits=3 * logits / logits.std()).sample()
        labels[::3] = torch.randint(10, labels[::3].shape)
    return images, labels


def heads() -> list[Row]:
    """Measure the solver by itself, in milliseconds per input."""
    targets = {10: "≤ 0.05", 100: "≤ 0.3", 150: "≤ 0.5", 1000: "≤ 5"}
    rows = []
    for classes, target in targets.items():
        predict, x = _trained_head(classes)
        x = x if classes < 1000 else x[:4]
        narrow = Acnml(predict.classifier, predict.posterior, alpha=NARROW)
        case = f"trained head, {classes} classes"
        rows.append(_row(case, _milliseconds(predict, x), "ms", target))
        rows.append(_row(f"{case}, α = {NARROW}", _milliseconds(narrow, x), "ms", ""))
    with seeded(0):
        layer, x = nn.Linear(512, 1000), torch.randn(64, 512)
    posterior = acnml.fit_laplace(Classifier(layer), [x], progress=False)
    predict = Acnml(Classifier(layer), posterior, alpha=1.0)
    value = _milliseconds(predict, x[:4])
    return [*rows, _row("random head, 1000 classes, every label matters", value, "ms", "≤ 50")]


def _milliseconds(predict: Acnml, x: Tensor) -> float:
    return 1000 * fastest({"predict": partial(predict, x)}, 3)["predict"] / len(x)


def _trained_head(classes: int, size: int = 256) -> tuple[Acnml, Tensor]:
    """Return a Linear layer trained on clusters, with a Kronecker posterior, and test inputs."""
    with seeded(classes):
        centres = torch.randn(classes, size)
        labels = torch.arange(20 * classes) % classes
        x = functional.relu(centres[labels] + 1.5 * torch.randn(len(labels), size))
        layer = nn.Linear(size, classes)
        optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
        for _ in range(40):
            optimizer.zero_grad()
            functional.cross_entropy(layer(x), labels).backward()
            optimizer.step()
        y = torch.randint(classes, (200,))
        test = functional.relu(centres[y] + 1.5 * torch.randn(200, size))
    classifier = Classifier(layer.requires_grad_(False))
    posterior = acnml.fit_laplace(classifier, list(x.split(1000)), progress=False)
    return Acnml(classifier, posterior, alpha=ALPHA), test


def exported(network: nn.Module, images: Tensor) -> list[Row]:
    """Measure the exported model in onnxruntime, over the plain network there."""
    import onnxruntime

    calibrated = acnml.calibrate(network, images[:256], _labelled(network, images), progress=False)
    rows = []
    with TemporaryDirectory() as folder:
        whole, plain = Path(folder) / "acnml.onnx", Path(folder) / "network.onnx"
        acnml.export_onnx(calibrated, images[:8], whole)
        program = torch.onnx.export(
            network,
            (images[:8],),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            verbose=False,
        )
        assert program is not None
        program.save(plain, external_data=False)
        sessions = [onnxruntime.InferenceSession(str(path)) for path in (plain, whole)]
        for size in (1, 64):
            feeds = [{s.get_inputs()[0].name: images[:size].numpy()} for s in sessions]
            names = ("plain", "own")
            runs: dict[str, Callable[[], object]] = {
                name: partial(session.run, None, feed)
                for name, session, feed in zip(names, sessions, feeds, strict=True)
            }
            times = fastest(runs, 20)
            value = times["own"] / times["plain"]
            rows.append(_row(f"ONNX, ResNet-20, batch of {size}", value, "passes", "≤ 1.3"))
    return rows


def _row(case: str, value: float, unit: str, target: str) -> Row:
    return {"case": case, "value": value, "unit": unit, "target": target}
