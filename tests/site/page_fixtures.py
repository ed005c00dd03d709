"""The names that pages of the documentation start with, and checks of what their code made."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

from cases import normal
from fits import loaders as noisy_loaders
from pages import Names, fixture
from test_calibrate import problem


def loaders() -> Names:
    train, validation = noisy_loaders()
    x = train.dataset.tensors[0][:5]
    return {"train_loader": train, "validation_loader": validation, "x": x}


def small_model() -> Names:
    """A trained model, its loaders, and five inputs."""
    model, train, validation, _ = problem()
    return {
        "model": model,
        "train_loader": train,
        "validation_loader": validation,
        "x": normal(5, 4, seed=1),
    }


@fixture("README.md")
def readme() -> Iterator[Names]:
    names = small_model()
    yield names
    answer = names["answer"]
    assert answer.probs.shape == (5, 3)
    assert answer.label.shape == answer.regret.shape == answer.abstain.shape == (5,)
    assert torch.equal(names["calibrated"].probs(names["x"]), answer.probs)  # loaded again


@fixture("index.md", "transformers", "datasets")
def index() -> Iterator[Names]:
    import test_transformers as tiny

    model = tiny.bert()
    train, validation = (tiny.dataset(model, tiny.make_tokenizer(), 80, seed) for seed in (0, 1))
    names = {"bert": model, "tokenizer": tiny.make_tokenizer()}
    names |= {"train": train, "validation": validation}
    yield names
    assert names["answer"].probs.shape == names["probabilities"].shape == (297, 10)
    assert set(names["ask"]("a good film")[0]) == {"label", "score", "regret"}


@fixture("howto/transformers.md", "transformers", "peft", "datasets")
def transformers() -> Iterator[Names]:
    import test_transformers as tiny

    model = tiny.bert()
    tokenizer = tiny.make_tokenizer()
    parts = [tiny.dataset(model, tokenizer, 80, seed) for seed in (0, 1)]
    names = {"model": model, "tokenizer": tokenizer, "train": parts[0], "validation": parts[1]}
    yield names
    assert len(names["answers"]) == len(names["out_of_scope"]) == len(names["ranked"]) == 2
    assert names["ask"](["a good film", "so so"]) == names["answers"]


@fixture("howto/timm.md", "timm", "sklearn")
def timm() -> Iterator[Names]:
    names: Names = {}
    yield names
    assert names["turned"].abstain.float().mean() > 2 * names["answer"].abstain.float().mean()


@fixture("howto/lightning.md", "lightning")
def lightning() -> Iterator[Names]:
    import test_lightning as small

    names: dict[str, Any] = {**loaders(), "module": small.Network()}
    yield names
    assert torch.equal(names["again"].probs(names["x"]), names["probs"])
    assert names["swag"].swag.updates == 3
    assert names["scores"].compute().keys() == {"nll", "brier", "ece", "aurc"}


@fixture("howto/laplace-torch.md", "laplace")
def laplace_torch() -> Iterator[Names]:
    from test_laplace_torch import mlp

    model, data = mlp().float(), loaders()
    for x, labels in list(data["train_loader"]) * 20:
        loss = torch.nn.functional.cross_entropy(model(x), labels)
        for parameter, gradient in zip(
            model.parameters(), torch.autograd.grad(loss, list(model.parameters())), strict=True
        ):
            parameter.data -= 0.1 * gradient
    names = {**data, "model": model}
    yield names
    assert names["difference"].abs().max() < 1e-5


@fixture("explanation/atypicality.md")
def atypicality() -> Iterator[Names]:
    names = small_model()
    yield names
    assert names["scores"].shape == names["unknown"].shape == (5,)


@fixture("explanation/nml-family.md")
def nml_family() -> Iterator[Names]:
    names = small_model()
    other = copy.deepcopy(names["model"])
    with torch.no_grad():
        other.body.weight.mul_(1.1)
    names |= {"networks": [names["model"], other], "labels": torch.tensor([0, 1, 2, 0, 1])}
    yield names
    x = names["x"]
    chosen = names["modes"].with_alpha(names["choice"].value)
    assert torch.equal(names["loaded"](x), chosen(x))
    assert sorted(names["suspects"].tolist()) == [0, 1, 2, 3, 4]
    assert names["suspicious"].shape == names["ood"].shape == names["regret"].shape == (5,)


@fixture("howto/wrong-labels.md")
def wrong_labels() -> Iterator[Names]:
    names = small_model() | {"labels": torch.tensor([0, 1, 2, 0, 1])}
    yield names
    assert sorted(names["suspects"].tolist()) == [0, 1, 2, 3, 4]
    assert names["scores"].shape == names["margin"].shape == (5,)


@fixture("howto/set-the-price.md")
@fixture("howto/decide.md")
@fixture("howto/estimate-accuracy.md")
@fixture("howto/notice-change.md")
@fixture("howto/choose-a-posterior.md")
@fixture("howto/write-your-own.md")
@fixture("howto/reproduce-the-paper.md")
def your_model() -> Iterator[Names]:
    yield small_model()


@fixture("howto/arrays.md", "sklearn", "onnx", "onnxruntime")
def arrays() -> Iterator[Names]:
    names: Names = {}
    yield names
    assert names["accuracy"] > 0.9
    assert names["strange"].abstain.mean() > 2 * names["answer"].abstain.mean()


@fixture("howto/deploy.md", "onnx", "onnxruntime", "onnxscript")
def deploy() -> Iterator[Names]:
    names = {**loaders(), "model": torch.nn.Linear(4, 3)}
    with torch.no_grad():
        names["model"].weight.copy_(4 * torch.eye(3, 4))
    yield names
    log_probs = torch.as_tensor(names["results"]["log_probs"])
    assert torch.allclose(log_probs.exp(), names["probs"], atol=1e-4)


@fixture("reference/file-format.md")
def file_format() -> Iterator[Names]:
    import acnml

    model = torch.nn.Linear(4, 3)
    yield {"posterior": acnml.fit_laplace(acnml.Classifier(model), normal(50, 4).float())}
