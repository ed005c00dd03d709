"""Calibrated networks as ONNX files, which run without Python and without this library."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, final

import torch
from torch import Tensor, nn

from acnml._util import batches
from acnml._util.batches import Inputs
from acnml._util.messages import needed_by
from acnml.calibration import Calibrated
from acnml.storage.disk import require_target, write_file

# Differences in probability above this are worth an error: the model would give other answers.
LARGEST_DIFFERENCE = 1e-3


class Exported(NamedTuple):
    """What was checked about an exported model, on the example."""

    path: Path
    difference: float  # largest in probability, from the predictor itself


def export_onnx(calibrated: Calibrated, example: Inputs, path: str | os.PathLike[str]) -> Exported:
    """Write network, score and rule to an ONNX file.

    Its outputs are `log_probs` (B, K), `regret` (B,) and `score` (B,). The batch size is dynamic,
    and so is the length of token ids and masks. The file is run on the example, and its
    probabilities are compared with the predictor's. Inputs without an answer are NaN. Needs the
    extra `onnx`.

    Args:
        calibrated: from `acnml.calibrate`.
        example: a batch of at least two inputs like those that the model will see.
        path: of the file to write; it is complete, or it is not there.

    >>> x = torch.randn(2000, 2, generator=torch.Generator().manual_seed(0))
    >>> labels, model = (x.sum(1) > 0).long(), torch.nn.Linear(2, 2)  # a trained network
    >>> model.weight.data = torch.tensor([[-3.0, 0.0], [3.0, 0.0]])
    >>> calibrated = acnml.calibrate(model, x[:1000], (x[1000:], labels[1000:]))
    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = acnml.export_onnx(calibrated, x[:8], pathlib.Path(folder) / "model.onnx")
    >>> exported.difference < 1e-4
    True
    """
    with needed_by("ONNX export", "acnml[onnx]"):
        import onnx  # noqa: F401
        import onnxruntime
        import onnxscript  # noqa: F401
    example = batches.as_inputs(example)
    if batches.size(example) < 2:
        raise ValueError("give an example of at least two inputs, so that their number is dynamic")
    require_target(Path(path))
    module, prepared = calibrated.as_module(), calibrated.classifier.prepare(example)
    args, kwargs = batches.as_arguments(prepared)
    tensors = (*args, *kwargs.values())
    names = list(kwargs) or [f"input_{i}" if i else "input" for i in range(len(args))]
    with torch.inference_mode(False), torch.no_grad():
        program = torch.onnx.export(
            _ByPosition(module, tuple(kwargs)).eval(),
            tensors,
            dynamo=True,
            dynamic_shapes={"tensors": tuple(_dynamic(t, t is tensors[0]) for t in tensors)},
            input_names=names,
            output_names=["log_probs", "regret", "score"],
            verbose=False,
        )
    assert program is not None
    content = _without_traces(program.model_proto).SerializeToString()
    session, one = _session(onnxruntime, content), batches.take(prepared, slice(0, 1))
    difference = max(_difference(session, calibrated, x) for x in (prepared, one))
    if not difference <= LARGEST_DIFFERENCE:
        raise ValueError(
            f"the exported model differs by {difference:.2g} in probability on the example: an "
            "operation of the network has another result in onnxruntime"
        )
    return Exported(write_file(Path(path), content), difference)


@final
class _ByPosition(nn.Module):
    """Takes all inputs by position, because torch's exporter fails for keywords of any name."""

    def __init__(self, module: nn.Module, keywords: tuple[str, ...]) -> None:
        super().__init__()
        self.module, self.keywords = module, keywords

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        if self.keywords:
            return self.module(**dict(zip(self.keywords, tensors, strict=True)))
        return self.module(*tensors)


def _dynamic(tensor: Tensor, is_first: bool) -> dict[int, Any]:
    """Return which dimensions of an input vary: the batch, and the length of token ids.

    The first input names them. Those of the others are found to be the same.
    """
    unnamed = torch.export.Dim.DYNAMIC
    names = (torch.export.Dim("batch"), torch.export.Dim("length"))
    batch, length = names if is_first else (unnamed, unnamed)
    is_ids = tensor.ndim == 2 and not tensor.is_floating_point()
    return {0: batch, 1: length} if is_ids else {0: batch}


def _without_traces(model: Any) -> Any:
    """Remove what torch notes about every node: stack traces, with paths of the user's files.

    They are larger than the weights of a small network, and no runtime needs them.
    """
    for part in (model.graph, *model.functions):
        for node in part.node:
            del node.metadata_props[:]
    return model


def _session(onnxruntime: Any, content: bytes) -> Any:
    """Return a session that runs the model, or say what to do about what the runtime lacks."""
    try:
        return onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    except Exception as error:  # of onnxruntime, which has many kinds
        raise ValueError(
            f"onnxruntime cannot run the exported model: {error}; it lacks some operations, most "
            "of them in double precision only: convert the network to single precision "
            "(model.float()) and calibrate it again, or replace the operation in the network"
        ) from error


def _difference(session: Any, calibrated: Calibrated, x: Inputs) -> float:
    """Return the largest difference in probability between a file and the predictor."""
    names = [each.name for each in session.get_inputs()]
    arrays = [tensor.cpu().numpy() for tensor in batches.named_tensors(x).values()]
    try:
        (log_probs,) = session.run(["log_probs"], dict(zip(names, arrays, strict=True)))
    except Exception as error:  # of onnxruntime, which has many kinds
        raise ValueError(
            f"the exported model does not run on a batch of {batches.size(x)}: {error}; the model "
            "may fix its batch size, for example by using len(x) in its forward pass"
        ) from error
    found, expected = torch.from_numpy(log_probs).exp(), calibrated.probs(x).cpu()
    gap = (found - expected).abs()  # padding has no answer in both
    return float(gap.masked_fill(found.isnan() & expected.isnan(), 0.0).max())
