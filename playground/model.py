"""The network of the page: trained, calibrated by `acnml.calibrate`, exported to ONNX.

MNIST is used where the data folder has it (`ACNML_DATA`), else scikit-learn's digits. Everything
goes into one folder:

- `model.onnx`: images (B, 1, 28, 28) to the `logits` and the `score`, and ACNML's `log_probs` and
  `regret`; the page computes the other rules from the logits and the score;
- `model.json`: temperatures, thresholds for abstaining, examples and what was chosen;
- `network.safetensors` and `calibrated.safetensors`: the same predictor for Python.
"""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, final

import onnx
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import acnml
from acnml.calibration.calibrator import closed_form, variance
from acnml.calibration.table import EQUAL_PRICE, CalibrationRow
from playground import drawing
from playground.drawing import BOX, CENTRE, SIDE
from studies.data import Labelled, split
from studies.data.digits import CLASSES, handwritten_digits
from studies.demo.training import Training, train
from studies.files import write_file

FOLDER = Path(__file__).parent / "model"
NETWORK, CALIBRATED, ONNX, INFO = (
    "network.safetensors",
    "calibrated.safetensors",
    "model.onnx",
    "model.json",
)

# How small digits are enlarged: first by this factor, with lines that fade over this share of ink.
ENLARGED = 8
EDGE = 0.4

# Of the validation digits, the shares on which every method may abstain.
SHARES = (0.01, 0.02, 0.05, 0.1, 0.2)


@final
@dataclass(frozen=True)
class Recipe:
    """How the network is trained.

    Args:
        seed: of the split, the initial weights and the batches.
        validation: the share of the training digits on which everything is chosen.
        passes: what training does, one after the other.
        variants: distorted copies of every training digit that the network learns from, too.
        price: of `acnml.calibrate`, in nats.
    """

    seed: int = 0
    validation: float = 0.1
    passes: tuple[Training, ...] = (
        Training(epochs=3, learning_rate=0.05),
        Training(epochs=1, learning_rate=0.005),
    )
    variants: int = 0
    price: float = 0.01


# A few hundred held-out digits do not tell a price of 0.01 nats from none.
FEW_DIGITS = Recipe(
    validation=0.25,
    passes=(
        Training(epochs=12, learning_rate=0.03, batch_size=50),
        Training(epochs=3, learning_rate=0.003, batch_size=50),
    ),
    variants=12,
    price=0.03,
)


class Data(NamedTuple):
    """Images (N, 1, 28, 28) in three parts."""

    name: str
    learnt: Labelled  # what the network learns from: the training digits, and variants of them
    train: Labelled
    validation: Labelled
    test: Labelled
    recipe: Recipe


def network(seed: int = 0) -> nn.Sequential:
    """Return an untrained convolutional network with 64 features before its last layer."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 16, 5, stride=2, padding=2),
            nn.ReLU(),
            nn.Conv2d(16, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 64, 4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(64, CLASSES),
        )


def load_data() -> Data:
    """Return MNIST as it is, or scikit-learn's digits enlarged by the rules of MNIST."""
    digits = handwritten_digits()
    recipe = Recipe() if digits.name == "MNIST" else FEW_DIGITS
    held_out = round(recipe.validation * len(digits.train.labels))
    parts = split(digits.train, (len(digits.train.labels) - held_out, held_out), recipe.seed)
    train_part, validation, test = (
        Labelled(fitted(part.inputs), part.labels) for part in (*parts, digits.test)
    )
    # Drawings differ more from small digits than these from each other. So the variants are part of
    # all data, and the score takes a clean drawing for a usual one.
    learnt = with_variants(train_part, parts[0].inputs, recipe) if recipe.variants else train_part
    if recipe.variants:
        validation = with_variants(validation, parts[1].inputs, recipe)
    return Data(digits.name, learnt, train_part, validation, test, recipe)


def with_variants(digits: Labelled, small: Tensor, recipe: Recipe) -> Labelled:
    """Return digits with `varied` copies, made from the small images that the digits are of."""
    generator = torch.Generator().manual_seed(recipe.seed)
    copies = [varied(small, generator) for _ in range(recipe.variants)]
    return Labelled(torch.cat([digits.inputs, *copies]), digits.labels.repeat(1 + recipe.variants))


def fitted(images: Tensor, maps: Tensor | None = None, level: Tensor | None = None) -> Tensor:
    """Enlarge images (N, 1, H, W) until the ink fits a box of 20 pixels, and centre its mass.

    Images of 28 x 28 pixels are returned as they are: MNIST was made by this rule.

    Args:
        images: small images.
        maps: (N, 2, 3) affine maps of the result, in units of the box; none by default.
        level: see `sharpened`.
    """
    if images.shape[-1] == SIDE:
        return images
    large = sharpened(images, level)
    count, side = len(large), large.shape[-1]
    mass = large[:, 0]
    longer = torch.maximum(_extent(mass.amax(2) > 0.5), _extent(mass.amax(1) > 0.5))
    places, total = torch.arange(side), mass.sum((1, 2))
    centre = torch.stack([(mass.sum(k) * places).sum(1) / total for k in (1, 2)], dim=-1)
    # Pixel p of the result shows the place (p - centre) · longer / 20 + centre of mass.
    steps = (torch.arange(SIDE) - CENTRE) / BOX
    y, x = torch.meshgrid(steps, steps, indexing="ij")
    box = torch.stack([x, y, torch.ones_like(x)], dim=-1).view(1, -1, 3)
    if maps is None:
        maps = torch.eye(2, 3).expand(count, 2, 3)
    places = box @ maps.transpose(1, 2) * longer[:, None, None] + centre[:, None]
    grid = ((2 * places + 1) / side - 1).view(count, SIDE, SIDE, 2)
    return nn.functional.grid_sample(large, grid, align_corners=False)


def sharpened(images: Tensor, level: Tensor | None = None) -> Tensor:
    """Enlarge small images and give their lines edges again, as a pen has them.

    A pixel of scikit-learn's digits is the share of ink in a block of a larger bitmap, so lines are
    grey. Where smooth interpolation is above the level there was ink.

    Args:
        images: (N, 1, H, W).
        level: (N,), a higher one gives thinner lines; 0.5 by default.
    """
    if level is None:
        level = torch.full((len(images),), 0.5)
    padded = nn.functional.pad(images, (1, 1, 1, 1))
    smooth = nn.functional.interpolate(padded, scale_factor=ENLARGED, mode="bicubic")
    edges = ((smooth - level.view(-1, 1, 1, 1)) / EDGE + 0.5).clamp(0, 1)
    return nn.functional.avg_pool2d(edges, 3, stride=1, padding=1)


def varied(images: Tensor, generator: torch.Generator) -> Tensor:
    """Return `fitted` images that are turned, stretched, slanted, moved, thicker or thinner."""

    def drawn(largest: float) -> Tensor:
        return largest * (2 * torch.rand(len(images), generator=generator) - 1)

    angle, slant = drawn(0.2), drawn(0.15)
    wide, high = 1 + drawn(0.12), 1 + drawn(0.12)
    cos, sin = angle.cos(), angle.sin()
    rows = [(wide * cos, wide * (slant - sin), drawn(0.05)), (high * sin, high * cos, drawn(0.05))]
    maps = torch.stack([torch.stack(row, dim=-1) for row in rows], dim=1)
    return fitted(images, maps, level=0.5 + drawn(0.12))


def _extent(used: Tensor) -> Tensor:
    """Return from the first to the last True of every row (N, L), in pixels."""
    places = torch.arange(used.shape[1])
    last = torch.where(used, places, -1).amax(1)
    first = torch.where(used, places, used.shape[1]).amin(1)
    return (last - first + 1).float()


def fingerprint(data: str) -> str:
    """Return a digest of everything that decides what the model is."""
    library = sorted(Path(str(acnml.__file__)).parent.rglob("*.py"))
    used: tuple[Any, ...] = (build, drawing, handwritten_digits, train)
    files = [Path(inspect.getfile(part)) for part in used] + library
    sources = b"".join(file.read_bytes() for file in files)
    versions = f"{acnml.__version__} {torch.__version__} {data}"
    return hashlib.sha256(sources + versions.encode()).hexdigest()


def is_current(folder: Path, digest: str) -> bool:
    """Whether the folder has a complete model with this fingerprint."""
    try:
        found = json.loads((folder / INFO).read_text())["fingerprint"]
    except (OSError, ValueError, KeyError):
        return False
    return bool(found == digest) and all(
        (folder / name).exists() for name in (NETWORK, CALIBRATED, ONNX)
    )


def build(folder: Path, say: Callable[[str], None]) -> None:
    """Write the model of the page, unless it is there and current."""
    data = load_data()
    digest = fingerprint(data.name)
    if is_current(folder, digest):
        say(f"The model in {folder} is current.")
        return
    say(f"Training on {len(data.learnt.labels):,} images of {data.name} ...")
    net = network(data.recipe.seed)
    for seed, training in enumerate(data.recipe.passes, start=data.recipe.seed):
        train(net, data.learnt, training, seed)
    say("Calibrating ...")
    price = data.recipe.price
    parts = data.train, data.validation
    calibrated = acnml.calibrate(net, *parts, price=price, rule="acnml", progress=False)
    say(str(calibrated))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(net.state_dict(), folder / NETWORK)
    acnml.save(calibrated, folder / CALIBRATED)
    acnml.export_onnx(calibrated, data.validation.inputs[:16], folder / ONNX)
    add_logits(folder / ONNX)
    info = {"fingerprint": digest, **describe(calibrated, net, data)}
    write_file(folder / INFO, json.dumps(info, indent=1).encode())  # last: it says "complete"
    size = (folder / ONNX).stat().st_size
    say(f"Wrote {folder / ONNX}, {size / 1e6:.2f} MB.")


def load(folder: Path = FOLDER) -> acnml.Calibrated:
    """Return the predictor of the page for Python."""
    net = network()
    net.load_state_dict(load_file(folder / NETWORK))
    calibrated = acnml.load(folder / CALIBRATED, acnml.Classifier(net))
    assert isinstance(calibrated, acnml.Calibrated)
    return calibrated


def add_logits(path: Path) -> None:
    """Make the logits of the network a third output of the file.

    They are in its graph already: the output of the last layer, before the temperature.
    """
    model = onnx.load(path)
    (division,) = (
        node
        for node in model.graph.node
        if node.input[-1:] and node.input[-1].endswith("temperature")
    )
    rename = {division.input[0]: "logits"}
    for node in model.graph.node:
        node.input[:] = [rename.get(name, name) for name in node.input]
        node.output[:] = [rename.get(name, name) for name in node.output]
    shape: list[str | int | None] = ["batch", CLASSES]
    value = onnx.helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, shape)
    kept = [known for known in model.graph.value_info if known.name not in rename]
    del model.graph.value_info[:]
    model.graph.value_info.extend(kept)
    model.graph.output.append(value)
    onnx.checker.check_model(model)
    write_file(path, model.SerializeToString())


@torch.no_grad()
def describe(calibrated: acnml.Calibrated, net: nn.Module, data: Data) -> dict[str, Any]:
    """Return what the page says about the model and what it needs beside the ONNX file."""
    logits = net(data.validation.inputs)
    score = calibrated.score(data.validation.inputs)
    closed, plain = (row_of(calibrated, method) for method in ("closed-form", EQUAL_PRICE))
    assert closed.alpha is not None
    log_probs = {
        "network": logits.log_softmax(-1),
        "temperature": (logits / plain.temperature).log_softmax(-1),
        "closed": closed_form(logits / calibrated.temperature, variance(closed.alpha, score)),
    }
    thresholds = {
        name: [values.softmax(-1).amax(-1).double().quantile(share).item() for share in SHARES]
        for name, values in log_probs.items()
    } | {
        "acnml": [calibrated.threshold(share) for share in SHARES],
        "regret": [calibrated.threshold(share, "regret") for share in SHARES],
    }
    return {
        "data": data.name,
        "variants": data.recipe.variants,
        "images": {
            "train": len(data.train.labels),
            "validation": len(data.validation.labels) // (1 + data.recipe.variants),
        },
        "accuracy": (calibrated.predict(data.test.inputs) == data.test.labels)
        .double()
        .mean()
        .item(),
        "temperature": calibrated.temperature,
        "temperatureOfEqualPrice": plain.temperature,
        "alpha": calibrated.alpha,
        "alphaOfClosedForm": closed.alpha,
        "price": calibrated.calibrator.price,
        "table": [asdict(row) for row in calibrated.table],
        "shares": SHARES,
        "thresholds": thresholds,
        "examples": [_example(data.test, digit) for digit in range(CLASSES)],
    }


def row_of(calibrated: acnml.Calibrated, method: str) -> CalibrationRow:
    """Return what was measured for a method on the validation data."""
    return next(row for row in calibrated.table if row.method == method)


def _example(test: Labelled, digit: int) -> dict[str, Any]:
    """Return the first test image of a class, its 784 bytes in base64."""
    index = int((test.labels == digit).nonzero()[0])
    pixels = (255 * test.inputs[index, 0]).round().to(torch.uint8).numpy().tobytes()
    return {"label": digit, "index": index, "pixels": base64.b64encode(pixels).decode()}
