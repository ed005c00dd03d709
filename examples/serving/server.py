"""Serve a network, its calibrated predictor and the exported ONNX model, each at a path of its own.

cd examples && python -m serving.server FOLDER [PORT]

FOLDER has weights.safetensors, predictor.safetensors, model.onnx, and limit.txt with the confidence
below which to abstain, `repr(calibrated.threshold(0.05))`. `serving.files` makes one with a small
network. A request is POST /predictor with {"x": [784 numbers]}. The response is {"label": ...,
"confidence": ..., "regret": ..., "abstain": ...}. GET /health says whether all models are loaded.
Requests that arrive within a few milliseconds are answered in one batch.
"""

# No `from __future__ import annotations`: LitServe reads the type of requests from decode_request.
import sys
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

import litserve
import numpy as np
import safetensors.torch
import torch

import acnml
from acnml import Calibrated, Classifier
from serving.files import PIXELS, build

MAX_BATCH = 64
WAIT = 0.002  # seconds to wait for more requests
SHARE = 0.05  # of validation data on which to abstain

Answer = dict[str, Any]


class Served(litserve.LitAPI, ABC):  # type: ignore[misc]  # LitServe is not annotated
    """A model at a path: requests are decoded, batched, answered together and taken apart again."""

    def __init__(self, folder: Path) -> None:
        path = f"/{type(self).__name__.lower()}"
        super().__init__(max_batch_size=MAX_BATCH, batch_timeout=WAIT, api_path=path)
        self.folder = folder

    @abstractmethod
    def setup(self, device: str) -> None:
        """Load the model, once in every worker."""

    @abstractmethod
    def predict(self, x: np.ndarray) -> list[Answer]:
        """Answer a batch (B, 784)."""

    def decode_request(self, request: Answer) -> np.ndarray:
        """Return the input of a request, or raise an error that the client sees."""
        x = np.asarray(request.get("x", ()), dtype=np.float32)
        if x.shape != (PIXELS,) or not np.isfinite(x).all():
            raise litserve.server.HTTPException(422, f"x must be {PIXELS} finite numbers")
        return x

    def batch(self, inputs: list[np.ndarray]) -> np.ndarray:
        """Join the inputs of several requests."""
        return np.stack(inputs)

    def unbatch(self, output: list[Answer]) -> list[Answer]:
        """Return the answers one by one."""
        return output

    def encode_response(self, output: Answer) -> Answer:
        """Return an answer as it is: plain numbers."""
        return output


@final
class Network(Served):
    """The plain network."""

    def setup(self, device: str) -> None:
        """Load the network."""
        torch.set_num_threads(1)
        self.model = build().eval()
        safetensors.torch.load_model(self.model, str(self.folder / "weights.safetensors"))

    def predict(self, x: np.ndarray) -> list[Answer]:
        """Return labels and confidences."""
        with torch.inference_mode():
            probs = self.model(torch.from_numpy(x)).softmax(-1)
        confidence, label = probs.max(-1)
        pairs = zip(label.tolist(), confidence.tolist(), strict=True)
        return [{"label": y, "confidence": p} for y, p in pairs]


@final
class Predictor(Served):
    """The calibrated predictor."""

    def setup(self, device: str) -> None:
        """Load network and predictor."""
        torch.set_num_threads(1)
        model = build()
        safetensors.torch.load_model(model, str(self.folder / "weights.safetensors"))
        loaded = acnml.load(self.folder / "predictor.safetensors", Classifier(model))
        assert isinstance(loaded, Calibrated)
        self.predictor, self.limit = loaded, loaded.threshold(SHARE)

    def predict(self, x: np.ndarray) -> list[Answer]:
        """Return labels, confidences, regrets, and whether to abstain."""
        answer = self.predictor(torch.from_numpy(x))
        return answers(answer.log_probs.numpy(), answer.regret.numpy(), self.limit)


@final
class Onnx(Served):
    """The calibrated predictor as an ONNX model: the fast variant."""

    def setup(self, device: str) -> None:
        """Load the ONNX model, and the threshold for abstaining."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        path = str(self.folder / "model.onnx")
        self.session = onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])
        self.limit = float((self.folder / "limit.txt").read_text())

    def predict(self, x: np.ndarray) -> list[Answer]:
        """Return labels, confidences, regrets, and whether to abstain."""
        log_probs, regret, _ = self.session.run(None, {self.session.get_inputs()[0].name: x})
        return answers(log_probs, regret, self.limit)


def answers(log_probs: np.ndarray, regret: np.ndarray, limit: float) -> list[Answer]:
    """Return the answers for log-probabilities (B, K) and regrets (B,)."""
    label, confidence = log_probs.argmax(-1), np.exp(log_probs.max(-1))
    rows = zip(label.tolist(), confidence.tolist(), regret.tolist(), strict=True)
    return [
        {"label": y, "confidence": p, "regret": r, "abstain": not p >= limit} for y, p, r in rows
    ]


def main() -> None:
    """Serve until interrupted."""
    folder, port = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8000
    apis = [Network(folder), Predictor(folder), Onnx(folder)]
    server = litserve.LitServer(apis, accelerator="cpu", workers_per_device=1)
    server.run("127.0.0.1", port, generate_client_file=False, log_level="warning")


if __name__ == "__main__":
    main()
