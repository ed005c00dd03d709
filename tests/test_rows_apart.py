"""The rows of a batch must not depend on each other. Models whose rows do are refused by name."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Bma, Classifier, Glm, Gradient, Linearised, Map
from acnml.solve import Reference
from cases import MODELS, TwoLayers, diagonal, normal, seeded

X, Y = normal(12, 4, seed=3), torch.arange(12) % 3
DATA = [(X, Y)]


class Base(TwoLayers):
    def __init__(self) -> None:
        super().__init__(hidden=4)


class Reordered(Base):
    """The logits are right, but every layer gets the rows in another order."""

    def forward(self, x):
        index = x[:, 0].argsort()
        return self.head(torch.tanh(self.body(x[index])))[index.argsort()]


class ReorderedFeatures(Base):
    """Only the last layer gets the rows in another order."""

    def forward(self, x):
        index = x[:, 0].argsort()
        return self.head(torch.tanh(self.body(x))[index])[index.argsort()]


class Centred(Base):
    def forward(self, x):
        y = super().forward(x)
        return y - y.mean(0)


class Attending(Base):
    """Attention over the batch instead of the sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2)

    def forward(self, x):
        mixed, _ = self.attend(x, x, x, need_weights=False)
        return self.head(x + mixed)


class Largest(Base):
    """One row holds the largest number of any batch, and must not look right for it."""

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        return self.head(hidden / hidden.abs().amax())


class FirstMean(Base):
    """Remembers the mean of the first batch."""

    mean = None

    def forward(self, x):
        if self.mean is None:
            self.mean = x.mean(0)
        return super().forward(x - self.mean)


class Branching(Base):
    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else self.head(self.body(x))


WHOLE = "the whole model"
TOUCHING = {
    Reordered: "module 'body'",
    ReorderedFeatures: "module 'head'",
    Centred: WHOLE,
    Attending: "module 'attend'",
    Branching: "module 'head'",
    Largest: "module 'head'",
    FirstMean: WHOLE,
}


def posterior_of(model: nn.Module, names=("head.weight", "head.bias")):
    return diagonal(model, list(names))


USES = {
    "kfac": lambda c: acnml.fit_laplace(c, DATA, layers=[c.model.head]),
    "kfac of two layers": lambda c: acnml.fit_laplace(c, DATA, layers=[c.model.body, c.model.head]),
    "diagonal": lambda c: acnml.fit_laplace(c, DATA, layers=[c.model.head], structure="diag"),
    "full": lambda c: acnml.fit_laplace(c, DATA, layers=[c.model.head], structure="full"),
    "bayes by backprop": lambda c: acnml.fit_bayes_by_backprop(
        c, DATA, epochs=1, layers=[c.model.head]
    ),
    "last layer": lambda c: Acnml(c, posterior_of(c.model))(X),
    "linearised": lambda c: Linearised()(c, diagonal(c.model, ["body.weight", "head.weight"]), X),
    "gradient": lambda c: Gradient(1, 0.3)(c, posterior_of(c.model), X),
    "glm": lambda c: Glm(c, posterior_of(c.model))(X),
}
# These depend on the logits alone, which a model may reorder as it likes.
USES_OF_LOGITS = {
    "map": lambda c: Map(c)(X),
    "bma": lambda c: Bma(c, posterior_of(c.model), samples=2)(X),
    "reference": lambda c: Reference(1)(c, posterior_of(c.model), X),
    "swag": lambda c: acnml.fit_swag(c, DATA, epochs=2, learning_rate=0.5),
    "naive": lambda c: acnml.predictors.NaiveCnml(c, DATA, acnml.fit.Refit(1))(X[:2]),
    "temperature": lambda c: acnml.tuning.temperature_by_nll(Map(c), DATA),
}


REFUSED = [(kind, use) for kind in TOUCHING for use in USES.values()] + [
    (kind, use) for kind in (Centred, Attending, Branching) for use in USES_OF_LOGITS.values()
]


@pytest.mark.parametrize(("kind", "use"), REFUSED)
def test_models_whose_rows_touch_are_refused_by_name(kind, use):
    where = f"depend on the rest of its batch, first seen in the output of {TOUCHING[kind]}"
    with pytest.raises(ValueError, match=where):
        use(Classifier(seeded(kind)))


def test_calibrate_refuses_them_too():
    x, labels = normal(400, 4, seed=5), torch.arange(400) % 3
    with pytest.raises(ValueError, match="the input of 'head', depend on the rest of its batch"):
        acnml.calibrate(seeded(ReorderedFeatures), [x], [(x + 1, labels)])


@pytest.mark.parametrize("threshold", [-0.5, 0.5])
def test_a_check_looks_at_both_ends(threshold):

    class Branch(Base):
        def forward(self, x):
            return super().forward(x) if x.mean() > threshold else self.head(self.body(x))

    x = X - X.mean() + threshold / 5  # the two rows at the end beyond the threshold are far from it
    with pytest.raises(ValueError, match="depend on the rest of its batch"):
        Map(Classifier(seeded(Branch)))(x)


@pytest.mark.parametrize("first", [X[:1], torch.zeros(5, 4).double()], ids=["one", "blank"])
def test_the_check_waits_for_a_batch_that_can_tell(first):
    classifier = Classifier(seeded(Centred))
    Map(classifier)(first)
    Map(classifier)(first)
    with pytest.raises(ValueError, match="depend on the rest of its batch"):
        Map(classifier)(X)


def test_later_batches_are_checked_again():
    """Up to batch 15 all inputs take one branch."""
    model, low = seeded(Branching), -X.abs() - 1
    classifier = Classifier(model)
    for _ in range(15):
        Map(classifier)(low)
    with pytest.raises(ValueError, match="depend on the rest of its batch"):
        Map(classifier)(torch.cat([low, -low]))


class SequenceFirst(nn.Module):
    """Linear layers on (T, B, d); every layer computes the same for another order of dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(torch.tanh(self.embed(x.transpose(0, 1))).mean(0))


@pytest.mark.parametrize("steps", [2, 3, 4, 5, 16])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_sequence_first_is_refused_though_the_batch_is_as_long_as_the_sequence(structure, steps):
    data = [(normal(steps, steps, 3), torch.arange(steps) % 3)]
    with pytest.raises(ValueError, match=r"layer 'embed' .*its first dimension must be the batch"):
        acnml.fit_laplace(SequenceFirst().double(), data, structure=structure)


# Ordinary models are accepted --------------------------------------------------------------------


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.LSTM(3, 32, 2, batch_first=True), nn.Linear(32, 5)

    def forward(self, x):
        return self.head(self.body(x)[0][:, -1])


class Tokens(nn.Module):
    """Token ids and a mask, as mapping; trimmed to the longest input of the batch."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 4)
        self.body = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, ids, mask):
        longest = int(mask.sum(1).max())
        ids, mask = ids[:, :longest], mask[:, :longest]
        hidden = self.body(self.embed(ids), src_key_padding_mask=~mask)
        return self.head((hidden * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True))


class Experts(nn.Module):
    """Every row goes to one of two experts, by a gate that rounding may flip."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.a, self.b = nn.Linear(64, 2), nn.Linear(64, 3), nn.Linear(64, 3)

    def forward(self, x):
        choice = self.gate(x).argmax(-1, keepdim=True)
        return torch.where(choice == 0, self.a(x), self.b(x))


class Squeezing(nn.Module):
    """Drops the batch dimension of a single input, a common slip."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Conv2d(1, 4, 3), nn.Linear(4, 3)

    def forward(self, x):
        return self.head(self.body(x).mean((2, 3), keepdim=True).squeeze())


class Cancelling(nn.Module):
    """Logits of about 1 as differences of numbers of about 1e6: rounding is large beside them."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(512, 512), nn.Linear(512, 3)

    def forward(self, x):
        large = self.body(1e4 * x)
        return self.head(large) - self.head(large.flip(1).flip(1) + 1e-3 * x)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(16, 5),
    )


def tokens(n: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 10, (n, 1), generator=generator)
    ids = torch.randint(0, 20, (n, 10), generator=generator)
    return {"ids": ids, "mask": torch.arange(10) < lengths}


ORDINARY = {
    "convolutional": (convolutional, lambda n: normal(n, 1, 9, 9).float()),
    "recurrent": (Recurrent, lambda n: normal(n, 7, 3).float()),
    "tokens": (Tokens, tokens),
    "experts": (Experts, lambda n: normal(n, 64).float()),
    "squeezing": (Squeezing, lambda n: normal(n, 1, 5, 5).float()),
    "cancelling": (Cancelling, lambda n: normal(n, 512).float()),
    **{case.name: (case.build, lambda n, case=case: case.x(n)) for case in MODELS},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ORDINARY)
def test_ordinary_models_are_accepted(name, dtype):
    build, inputs = ORDINARY[name]
    for seed in range(2):
        classifier, x = Classifier(seeded(build, seed).to(dtype)), inputs(40)
        if name == "cancelling" and dtype not in (torch.float32, torch.float64):
            pytest.skip("overflows")
        Map(classifier)(x)
        data = [(x, torch.zeros(40, dtype=torch.long))]
        acnml.fit_laplace(classifier, data, layers="last")
        assert classifier.findings.apart  # it was checked


def test_a_model_is_checked_once():
    calls = []

    class Counting(Base):
        def forward(self, x):
            calls.append(len(x))
            return super().forward(x)

    model = seeded(Counting)
    careful = Acnml(Classifier(model), posterior_of(model), alpha=0.1)
    for predict in (careful, Map(Classifier(model))):
        calls.clear()
        predict(X)
        assert sum(calls) <= len(X) + 24  # the checks run a few inputs
        calls.clear()
        for _ in range(14):
            predict(X)
        assert calls == [len(X)] * 14


class Limited(Base):
    """Takes the first eight rows only, as an expert of limited capacity does."""

    def forward(self, x):
        return super().forward(torch.where(torch.arange(len(x))[:, None] < 8, x, 0.0))


class Crowded(Base):
    """Large batches take another branch."""

    def forward(self, x):
        return super().forward(x if len(x) < 8 else 2 * x)


class Alarmed(Base):
    """A single row sends all others another way."""

    def forward(self, x):
        return super().forward(2 * x if bool((x[:, 0] == 7).any()) else x)


@pytest.mark.parametrize("kind", [Limited, Crowded, Alarmed])
def test_what_shows_in_whole_batches_only_is_noticed(kind):
    x = normal(200, 4)
    x[60, 0] = 7.0
    with pytest.raises(ValueError, match="depend on the rest of its batch"):
        Map(Classifier(kind()))(x)
    with pytest.raises(ValueError, match="depend on the rest of its batch"):
        acnml.fit_laplace(kind(), (x.float(), torch.zeros(len(x)).long()), layers="last")
