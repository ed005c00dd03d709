"""Heads other than softmax over one vector: single logits, several labels, maps and tokens."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import acnml
from acnml import Acnml, Classifier, calibrate, fit_calibrator, metrics
from acnml._util.params import flatten, unflatten
from acnml.calibration.calibrator import RULES
from acnml.calibration.heads import MOST_PLACES, Head, find_head
from acnml.posteriors import Diagonal
from acnml.solve import Reference
from acnml.solve.sigmoid import solve_sigmoid
from cases import normal, seeded
from dense import covariance
from scalar import solve_diagonal

VARIANCES = [0.0, 1e-6, 1e-2, 0.5, 1.0, 3.0, 20.0, 300.0, 1e6]


# The scalar problem ------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0.1, 1.0, 8.0, 40.0])
@pytest.mark.parametrize("var", VARIANCES)
def test_a_label_is_a_softmax_over_two_classes(var, size):
    z = size * torch.linspace(-3, 3, 601).double()
    v = torch.full_like(z, var)
    both = torch.stack([torch.zeros_like(z), z], -1)
    shared = solve_diagonal(both, torch.stack([v / 2, v / 2], -1))
    alone = solve_diagonal(both, torch.stack([torch.zeros_like(v), v], -1))
    found = solve_sigmoid(z, v)
    torch.testing.assert_close(found, shared, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, alone, rtol=1e-9, atol=1e-9)
    single = solve_sigmoid(z.float(), v.float()).double()
    torch.testing.assert_close(single, found, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("alpha", [0.1, 1.0])
def test_a_single_logit_is_where_the_papers_iteration_converges_to(alpha):
    model = seeded(lambda: nn.Linear(5, 1, bias=False))
    x, weight = normal(4, 5), model.weight.detach()
    posterior = Diagonal({"weight": weight}, {"weight": alpha * torch.ones_like(weight)})
    view = Classifier(model, get_logits=lambda z: torch.cat([torch.zeros_like(z), z], dim=1))
    literal = Reference(steps=1000, step_size=0.05)(view, posterior, x)
    found = solve_sigmoid((x @ weight.T)[:, 0], alpha * (x**2).sum(-1))
    torch.testing.assert_close(found, literal.log_lik, rtol=0, atol=1e-9)


def test_a_label_does_not_depend_on_the_others():
    z, v = 3 * normal(3, 70_000).float(), normal(3, 70_000, seed=1).exp().float()
    found = solve_sigmoid(z, v)  # in blocks
    assert torch.equal(found[1, 123], solve_sigmoid(z[1:2, 123], v[1:2, 123])[0])


# Which head it is --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "labels", "task", "expected"),
    [
        ((6, 3), torch.arange(6) % 3, None, Head()),
        ((6,), torch.arange(6) % 2, None, Head(is_single=True)),
        ((6, 1), torch.arange(6) % 2, None, Head(is_single=True)),
        ((6, 3), torch.ones(6, 3), None, Head(is_multilabel=True)),
        ((6, 3), torch.eye(3).repeat(2, 1), "multilabel", Head(is_multilabel=True)),
        ((2, 5, 7, 8), torch.zeros(2, 7, 8), None, Head(positions=2)),
        ((2, 7, 8, 5), torch.zeros(2, 7, 8), None, Head(axis=-1, positions=2)),
        ((2, 1, 7, 8), torch.zeros(2, 1, 7, 8), None, Head(positions=2, is_single=True)),
        ((2, 1, 7, 8), torch.zeros(2, 7, 8), None, Head(positions=2, is_single=True)),
        ((2, 5, 7, 8), torch.ones(2, 5, 7, 8), None, Head(positions=2, is_multilabel=True)),
        ((2, 9, 4), torch.zeros(2, 9), None, Head(axis=-1, positions=1)),
        ((2, 4, 9), torch.zeros(2, 9), None, Head(positions=1)),
        ((2, 4, 4), torch.zeros(2, 4), "tokens", Head(axis=-1, positions=1)),
        ((2, 4, 4), torch.zeros(2, 4), "dense", Head(positions=1)),
    ],
)
def test_labels_decide(shape, labels, task, expected):
    assert find_head(torch.Size(shape), labels, task) == expected


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [
        ((6, 3), torch.eye(3).repeat(2, 1), r'pass y\.argmax\(1\) .* or task="multilabel"'),
        ((2, 4, 4), torch.zeros(2, 4), 'pass task="dense" .* or task="tokens"'),
        ((2, 4, 8, 8), torch.zeros(2, 16, 16), r"resize the logits"),
    ],
)
def test_what_shapes_do_not_tell_is_asked(shape, labels, message):
    with pytest.raises(ValueError, match=message):
        find_head(torch.Size(shape), labels)
    with pytest.raises(ValueError, match="task must be one of 'multilabel'"):
        find_head(torch.Size(shape), labels, "segmentation")


# A single logit ----------------------------------------------------------------------------------


def binary(count: int = 1200):
    x = normal(count, 4)
    labels = (torch.sigmoid(2 * x[:, 0]) > torch.rand(count, generator=_seeded())).long()
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    with torch.no_grad():
        model[0].weight[0], model[0].bias[0] = torch.eye(4)[0].double(), 0.0
        model[2].weight.copy_(6 * torch.eye(8)[:1])
    return model, x, labels


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(0)


class Both(nn.Module):
    """A second logit, which is zero."""

    def forward(self, z):
        return torch.cat([torch.zeros_like(z), z], dim=1)


@pytest.mark.parametrize("shape", [nn.Identity(), nn.Flatten(0)])
@pytest.mark.parametrize("as_label", [lambda y: y, lambda y: y.double(), lambda y: y.bool()])
def test_one_logit_is_two(shape, as_label):
    model, x, labels = binary()
    data = x[:500], (x[500:], as_label(labels[500:]))
    found = calibrate(nn.Sequential(model, shape), (data[0], as_label(labels[:500])), data[1])
    both = nn.Sequential(model, Both())
    expected = calibrate(both, (x[:500], labels[:500]), (x[500:], labels[500:]))
    assert found.alpha == pytest.approx(expected.alpha)
    assert found.probs(x).shape == (1200, 2)
    for mine, other in zip(found(x), expected(x), strict=True):
        torch.testing.assert_close(mine, other)


# Several labels ----------------------------------------------------------------------------------


def several(count: int = 1200, labels: int = 5):
    x = normal(count, 6)
    z = x @ normal(6, labels, seed=1)
    present = (torch.sigmoid(z) > torch.rand(z.shape, generator=_seeded())).long()
    model = nn.Linear(6, labels).double()
    with torch.no_grad():
        model.weight.copy_(3 * normal(6, labels, seed=1).T)
        model.bias.zero_()
    return model, x, present


@pytest.mark.parametrize("rule", RULES)
def test_the_price_is_counted_in_mean_binary_nll(rule):
    model, x, present = several()
    found = calibrate(model, x[:500], (x[500:], present[500:]), price=0.02, rule=rule)
    assert found.calibrator.head == Head(is_multilabel=True)
    loss = nn.functional.binary_cross_entropy
    z = model(x[500:]).detach() / found.temperature
    plain = loss(torch.sigmoid(z), present[500:].double())
    spent = loss(found.probs(x[500:]), present[500:].double()) - plain
    assert float(spent) == pytest.approx(0.02, rel=0.02)
    assert float(plain) == pytest.approx(found.table[1].nll, abs=1e-9)


def test_several_labels_are_answered_one_by_one():
    model, x, present = several()
    validation = x[500:], present[500:].double()
    found = calibrate(model, (x[:500], present[:500]), validation, rule="acnml")
    answer = found(x)
    assert torch.equal(answer.label, (model(x) > 0).long())
    v = 2 * found.alpha * answer.score.double() ** 2
    z = model(x).detach() / found.temperature
    log_lik = solve_sigmoid(z, v[:, None].expand_as(z))
    torch.testing.assert_close(answer.probs, torch.softmax(log_lik, -1)[..., 1])
    torch.testing.assert_close(answer.regret, torch.logsumexp(log_lik, -1))
    assert answer.abstain.shape == (1200, 5)
    assert answer.score.shape == (1200,)
    rejected = found.abstains(x[500:], share=0.2).double().mean()
    assert float(rejected) == pytest.approx(0.2, abs=0.002)
    far = found(20 * x)
    assert far.regret.mean() > 2 * answer.regret.mean()
    assert (far.regret <= math.log(2) + 1e-9).all()


def test_scores_of_several_labels():
    model, x, present = several()
    probs = calibrate(model, x[:500], (x[500:], present[500:])).probs(x)
    found = metrics.multilabel(probs, present)
    for k in range(5):
        own = torch.stack([1 - probs[:, k], probs[:, k]], 1).log()
        expected = metrics.summary(own, present[:, k])
        assert {name: float(found[name][k]) for name in expected} == pytest.approx(expected)
        is_there = present[:, k] == 1
        auroc = metrics.auroc(probs[~is_there, k], probs[is_there, k])
        assert float(found["auroc"][k]) == pytest.approx(auroc)


# Maps and tokens ---------------------------------------------------------------------------------


class Segmenter(nn.Module):
    """Logits at all positions, or at every second one and then repeated."""

    def __init__(self, coarse: bool) -> None:
        super().__init__()
        self.body = nn.Conv2d(2, 6, 3, padding=1, stride=2 if coarse else 1)
        self.head, self.aux = nn.Conv2d(6, 4, 1), nn.Conv2d(6, 4, 1)
        self.coarse = coarse

    def forward(self, x):
        hidden = torch.tanh(self.body(x))
        logits = 3 * self.head(hidden)
        self.aux(hidden)
        return logits.repeat_interleave(2, -1).repeat_interleave(2, -2) if self.coarse else logits


def maps(count: int = 30, coarse: bool = False):
    model = seeded(lambda: Segmenter(coarse))
    x = normal(count, 2, 8, 10)
    with torch.no_grad():
        noise = 3 * torch.rand(count, 4, 8, 10, generator=_seeded())
        labels = (model(x) + noise).argmax(1)
    return model, x, labels


def flattened(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.movedim(1, -1).flatten(0, -2)


def test_maps_are_rows_of_the_core():
    model, x, labels = maps()
    found = calibrate(model, (x[:10], labels[:10]), (x[10:], labels[10:]), price=0.02)
    assert [str(place) for place in found.places] == ["input of 'head'"]
    z, features = model(x).detach(), torch.tanh(model.body(x)).detach()
    rows = [flattened(each) for each in (z, features)]
    flat = labels.flatten()
    expected = fit_calibrator(
        (rows[1][:800], flat[:800]), (rows[0][800:], rows[1][800:], flat[800:]), price=0.02
    )
    assert found.alpha == pytest.approx(expected.alpha, rel=1e-6)
    answer, by_row = found(x), expected(*rows)
    torch.testing.assert_close(flattened(answer.probs), by_row.probs, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(answer.regret.flatten(), by_row.regret, rtol=1e-5, atol=1e-6)
    assert torch.equal(answer.label, z.argmax(1))
    assert answer.score.shape == answer.abstain.shape == (30, 8, 10)
    arrays = fit_calibrator(
        (features[:10], labels[:10]), (z[10:], features[10:], labels[10:]), price=0.02
    )
    torch.testing.assert_close(arrays.probs(z, features), answer.probs, rtol=1e-5, atol=1e-7)


def test_features_of_a_coarser_map_are_those_of_the_nearest_position():
    model, x, labels = maps(coarse=True)
    found = calibrate(model, (x[:10], labels[:10]), (x[10:], labels[10:]), price=0.02)
    score = found.score(x[:3])
    assert score.shape == (3, 8, 10)
    assert torch.equal(score[:, ::2, ::2], score[:, 1::2, 1::2])
    assert len(score.unique()) == 3 * 20


def test_ignored_positions_do_not_count():
    model, x, labels = maps()
    kept = labels.clone()
    kept[:, 5:] = 255
    found = calibrate(model, (x[:10], kept[:10]), (x[10:], kept[10:]), ignore_index=255)
    z, features = model(x).detach()[:, :, :5], torch.tanh(model.body(x)).detach()[:, :, :5]
    cut = kept[:, :5]
    expected = fit_calibrator((features[:10], cut[:10]), (z[10:], features[10:], cut[10:]))
    assert found.alpha == pytest.approx(expected.alpha, rel=1e-6)
    assert found.calibrator.atypicality.typical == pytest.approx(expected.atypicality.typical)


def test_some_positions_of_large_maps_are_drawn_the_same_in_every_run():
    head = Head(positions=2)
    logits, features = normal(3, 4, 30, 40), normal(3, 2, 30, 40, seed=1)
    labels = torch.zeros(3, 30, 40, dtype=torch.int64)
    labels[0, 1:] = head.ignored
    together = head.read(logits, features, labels, generator=_seeded())
    assert torch.bincount(together.inputs).tolist() == [40, MOST_PLACES, MOST_PLACES]
    generator = _seeded()
    alone = [
        head.read(logits[i : i + 1], features[i : i + 1], labels[i : i + 1], generator=generator)
        for i in range(3)
    ]
    assert torch.equal(torch.cat([each.logits for each in alone]), together.logits)


class Tagger(nn.Module):
    """Logits for every token, which does not look at its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.classifier = nn.Embedding(50, 8), nn.Linear(8, 3)

    def forward(self, input_ids, attention_mask):
        hidden = torch.tanh(self.embedding(input_ids) * attention_mask.unsqueeze(-1))
        return 4 * self.classifier(hidden)


def texts(length: int = 7):
    model = seeded(Tagger)
    ids = torch.randint(1, 50, (150, length), generator=_seeded())
    mask = torch.arange(length) < torch.randint(2, 7, (150, 1), generator=_seeded())
    x = {"input_ids": ids * mask, "attention_mask": mask.long()}
    with torch.no_grad():
        labels = (model(**x) + 4 * torch.rand(150, length, 3, generator=_seeded())).argmax(-1)
    return model, x, labels


def batches_of(x, labels, rows):
    return [{**{name: each[rows] for name, each in x.items()}, "labels": labels[rows]}]


def test_padding_never_counts():
    model, x, labels = texts()
    ignored = labels.masked_fill(x["attention_mask"] == 0, -100)
    train, validation = slice(0, 60), slice(60, 150)
    found = calibrate(model, batches_of(x, labels, train), batches_of(x, labels, validation))
    by_label = calibrate(model, batches_of(x, ignored, train), batches_of(x, ignored, validation))
    assert found.alpha == by_label.alpha
    more = {name: nn.functional.pad(each, (0, 5)) for name, each in x.items()}
    padded = nn.functional.pad(labels, (0, 5))
    longer = calibrate(model, batches_of(more, padded, train), batches_of(more, padded, validation))
    assert longer.alpha == pytest.approx(found.alpha)
    answer, longer_answer = found(x), longer(more)
    is_text = x["attention_mask"].bool()
    torch.testing.assert_close(longer_answer.probs[:, :7][is_text], answer.probs[is_text])
    assert answer.probs[~is_text].isnan().all()
    assert (answer.label[~is_text] == -1).all()
    assert answer.abstain[~is_text].all()
    expected = torch.softmax(model(**x)[is_text] / found.temperature, -1)
    assert (answer.probs[is_text].amax(-1) <= expected.amax(-1) + 1e-6).all()


# What every head can do --------------------------------------------------------------------------


def kinds():
    model, x, labels = binary()
    yield "single", model, x, labels
    yield "several", *several()
    yield "maps", *maps()
    yield "tokens", *texts()


@pytest.mark.parametrize("kind", ["single", "several", "maps", "tokens"])
def test_it_is_stored_exported_and_a_module(kind, tmp_path):
    model, x, labels = next(rest for name, *rest in kinds() if name == kind)
    model = model.float()
    if isinstance(x, dict):
        data = [batches_of(x, labels, rows) for rows in (slice(0, 60), slice(60, None))]
        some = {name: each[:5] for name, each in x.items()}
    else:
        x, half = x.float(), len(x) // 2
        data, some = [(x[:half], labels[:half]), (x[half:], labels[half:])], x[:5]
    found = calibrate(model, *data, price=0.02)
    answer = found(some)
    acnml.save(found, tmp_path / "found.safetensors")
    again = acnml.load(tmp_path / "found.safetensors", model)
    for mine, its in zip(answer, again(some), strict=True):
        torch.testing.assert_close(its, mine, rtol=0, atol=0, equal_nan=True)
    module = found.as_module()
    log_probs, regret, score = module(**some) if isinstance(some, dict) else module(some)
    torch.testing.assert_close(log_probs, answer.log_probs, equal_nan=True)
    torch.testing.assert_close(regret, answer.regret, rtol=1e-4, atol=1e-5, equal_nan=True)
    torch.testing.assert_close(score, answer.score, equal_nan=True)
    pytest.importorskip("onnxruntime", reason="needs onnxruntime")
    exported = acnml.export_onnx(found, some, tmp_path / "found.onnx")
    assert exported.difference < 1e-4


@pytest.mark.parametrize("make", [several, maps])
def test_guarantees_are_for_independent_answers(make):
    model, x, labels = make()
    half = len(x) // 2
    found = calibrate(model, x[:half], (x[half:], labels[half:]))
    for ask in (
        lambda: found.abstention(risk=0.1),
        found.monitor,
        lambda: found.expected_accuracy(x),
    ):
        with pytest.raises(ValueError, match="depend on each other"):
            ask()


def test_an_input_without_an_answer_is_named_or_flagged():
    model, x, labels = maps()
    data = x[:10], (x[10:], labels[10:])
    found = calibrate(model, *data)
    core, z, features = found.calibrator, model(x[:4]).detach(), found.features(x[:4])
    z[2, 1, 3, 3] = math.nan
    with pytest.raises(ValueError, match="for 1 of 4 inputs, first at index 2"):
        core(z, features)
    flagged = calibrate(model, *data, on_error="flag").calibrator(z, features)
    assert (flagged.label == -1).nonzero().tolist() == [[2, 3, 3]]
    assert flagged.probs.isnan().any(1).nonzero().tolist() == [[2, 3, 3]]


# Two heads --------------------------------------------------------------------------------------


class Averaged(nn.Module):
    """Two heads, as those of DeiT-distilled and LeViT."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head, self.head_dist = nn.Linear(4, 6), nn.Linear(6, 3), nn.Linear(6, 3)

    def forward(self, x):
        x = torch.tanh(self.stem(x))
        return (self.head(x) + self.head_dist(x**2)) / 2


@pytest.mark.parametrize("layers", ["last", ["head", "head_dist"]])
def test_two_averaged_heads_are_calibrated_and_linearised(layers):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, x = Averaged().eval().double(), normal(120, 4)
        with torch.no_grad():
            model.head.bias -= 2 * model(x).mean(0)
            for head in (model.head, model.head_dist):
                head.weight *= 10
                head.bias *= 10
        labels = model(x).softmax(-1).multinomial(1).flatten()
    found = calibrate(model, (x[:60], labels[:60]), (x[60:], labels[60:]), price=0.05)
    assert [place.module for place in found.places[-2:]] == ["head", "head_dist"]
    posterior = acnml.fit_laplace(model, (x, labels), layers=layers, progress=False)
    kernel = Acnml(Classifier(model), posterior).problem(x[:2]).kernel
    centred = torch.eye(3).double() - 1 / 3  # the kernel may be that of differences of logits
    mean, cov = posterior.mean, covariance(posterior)
    for own, each in zip(kernel, x, strict=False):

        def logits(theta, each=each):
            return functional_call(model, unflatten(theta, mean), (each,))

        jacobian = jacrev(logits)(flatten(mean, mean))
        expected = centred @ jacobian @ cov @ jacobian.T @ centred
        torch.testing.assert_close(centred @ own @ centred, expected, rtol=1e-9, atol=1e-12)
