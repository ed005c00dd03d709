"""The models of the serving example answer what the predictor answers, in batches."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    litserve = pytest.importorskip("litserve", reason="needs the extra `serving`")
pytest.importorskip("onnxruntime", reason="needs the extra `onnx`")

sys.path.append(str(Path(__file__).parents[2] / "examples"))

from serving import files
from serving.server import Network, Onnx, Predictor

pytestmark = pytest.mark.filterwarnings("ignore")  # of LitServe and the exporter


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("served")
    files.write(path)
    return path


def answer(api, x: torch.Tensor) -> list[dict[str, float]]:
    """What the server does with requests that arrive together."""
    api.setup("cpu")
    inputs = [api.decode_request({"x": row}) for row in x.tolist()]
    return [api.encode_response(one) for one in api.unbatch(api.predict(api.batch(inputs)))]


def test_all_models_agree(folder):
    x, _ = files.images(20, seed=5)
    network, exact, fast = (answer(kind(folder), x) for kind in (Network, Predictor, Onnx))
    predictor = Predictor(folder)
    predictor.setup("cpu")
    answers_of_all = predictor.predictor(x)
    confidence, label = answers_of_all.probs.max(-1)
    for answers in (exact, fast):
        assert [one["label"] for one in answers] == label.tolist()
        for name, expected in (("confidence", confidence), ("regret", answers_of_all.regret)):
            found = [one[name] for one in answers]
            np.testing.assert_allclose(found, expected.numpy(), rtol=1e-3, atol=1e-4)
    assert [one["label"] for one in network] == predictor.predictor.classifier.logits(x).argmax(
        -1
    ).tolist()
    assert [one["abstain"] for one in exact] == predictor.predictor.abstains(x).tolist()


@pytest.mark.parametrize("x", [[], [0.0] * 3, [float("nan")] * files.PIXELS, "text"])
def test_bad_requests_are_refused(folder, x):
    with pytest.raises((litserve.server.HTTPException, ValueError)):
        Network(folder).decode_request({"x": x})
