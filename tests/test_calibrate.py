"""calibrate: what it chooses, costs, answers and refuses, and its core on arrays."""

from __future__ import annotations

import copy
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier, calibrate, fit_calibrator, metrics
from acnml.calibration.calibrator import RULES, variance
from cases import normal
from scalar import solve_diagonal


class Network(nn.Module):
    """Two layers; counts the inputs that pass through any copy of it."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, classes)
        self._seen: list[int] = []

    def __deepcopy__(self, memo):
        with torch.random.fork_rng():
            other = Network(self.head.out_features)
        other.body, other.head = copy.deepcopy(self.body, memo), copy.deepcopy(self.head, memo)
        other._seen = self._seen
        return other

    def forward(self, x):
        self._seen.append(x.shape[0])
        return self.head(torch.tanh(self.body(x)))


def problem(classes: int = 3, n: int = 900, seed: int = 0):
    """An overconfident network, trained too long on noisy clusters, and three splits of data."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        centres = 1.2 * torch.randn(classes, 4).double()
        labels = torch.randint(classes, (n,))
        x = centres[labels] + torch.randn(n, 4).double()
        model = Network(classes).double()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
        for _ in range(150):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[:150]), labels[:150]).backward()
            optimizer.step()
    model._seen.clear()
    parts = [slice(0, 150), slice(150, 650), slice(650, n)]
    train, validation, test = (
        list(zip(x[s].split(64), labels[s].split(64), strict=True)) for s in parts
    )
    return model, train, validation, test


def joined(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


@pytest.fixture(scope="module")
def fitted():
    model, train, validation, test = problem()
    return calibrate(model, train, validation, price=0.02), model, train, validation, test


# What it chooses ---------------------------------------------------------------------------------


def test_the_temperature_is_that_of_least_nll(fitted):
    found, model, _, validation, _ = fitted
    x, labels = joined(validation)
    logits = model(x).detach()

    def nll(temperature):
        return metrics.nll(torch.log_softmax(logits / temperature, -1), labels)

    best = nll(found.temperature)
    assert all(best <= nll(found.temperature * factor) for factor in (0.99, 1.01, 0.5, 2.0))
    assert found.temperature > 1  # the network is overconfident


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("classes", [2, 5])
def test_every_rule_spends_the_price(rule, classes):
    model, train, validation, _ = problem(classes)
    found = calibrate(model, train, validation, price=0.02, rule=rule)
    x, labels = joined(validation)
    rows = {row.method: row for row in found.table}
    spent = metrics.nll(found.log_probs(x), labels) - rows["temperature"].nll
    assert 0.99 * 0.02 <= spent <= 0.02 + 1e-6
    assert rows[rule].alpha == found.alpha
    assert rows[rule].nll == pytest.approx(rows["temperature"].nll + spent, abs=1e-6)
    equal = rows["temperature of equal price"]
    assert equal.nll == pytest.approx(rows[rule].nll, abs=1e-3 * 0.02 + 0.005 * 0.02)
    assert found.calibrator.temperature_of_equal_price == equal.temperature > found.temperature


def test_the_table_is_what_the_rules_do(fitted):
    found, model, _, validation, _ = fitted
    x, labels = joined(validation)
    for row in found.table[3:]:
        own = replace(found.calibrator, rule=row.method, alpha=row.alpha)
        answer = own(model(x), found.features(x))
        expected = metrics.summary(answer.log_probs.double(), labels)
        assert {name: getattr(row, name) for name in expected} == pytest.approx(expected, abs=1e-5)
        assert row.confidence == pytest.approx(float(answer.probs.amax(-1).mean()), abs=1e-5)
        assert row.regret == pytest.approx(float(answer.regret.mean()), abs=1e-5)


def test_the_answers_are_those_of_the_rule_by_hand(fitted):
    """The closed form as it is written down; ACNML with V = α m² I, label by label."""
    found, model, _, _, test = fitted
    x, _ = joined(test)
    score = found.calibrator.atypicality(found.features(x)).double()
    v = (found.alpha * score**2).unsqueeze(1)
    z = model(x).detach().double() / found.temperature
    p = torch.softmax(z, -1)
    by_hand = {
        "closed-form": (p / (p + p ** (v / (1 + v)) * (1 - p))).log(),
        "acnml": solve_diagonal(z, v.expand_as(z)),
    }
    for rule, log_lik in by_hand.items():
        answer = replace(found.calibrator, rule=rule)(model(x), found.features(x))
        log_probs, regret = torch.log_softmax(log_lik, -1), torch.logsumexp(log_lik, -1)
        close = {"rtol": 0, "atol": 1e-5, "check_dtype": False}
        torch.testing.assert_close(answer.log_probs, log_probs, **close)
        torch.testing.assert_close(answer.regret, regret, **close)
        torch.testing.assert_close(answer.score.double(), score)


def test_a_higher_price_is_more_cautious():
    model, train, validation, test = problem(seed=1)
    found = [calibrate(model, train, validation, price=price) for price in (0.01, 0.03, 0.1)]
    alphas = [each.alpha for each in found]
    assert alphas == sorted(alphas)
    x, _ = joined(test)
    sure = [float(each.probs(5 * x).amax(-1).mean()) for each in found]
    assert sure == sorted(sure, reverse=True)


def test_atypical_inputs_are_less_certain(fitted):
    found, model, _, _, test = fitted
    x, _ = joined(test)
    far = found(30 * x)
    assert float(far.score.median()) > 3 * float(found(x).score.median())
    assert float(far.regret.mean()) > 2 * float(found(x).regret.mean())
    tempered = torch.softmax(model(30 * x) / found.temperature, -1).amax(-1)
    assert (far.probs.amax(-1) <= tempered + 1e-6).all()


def test_labels_of_the_training_data_may_be_missing(fitted):
    _, model, train, validation, test = fitted
    inputs = [x for x, _ in train]
    own = calibrate(model, inputs, validation, price=0.02)
    predicted = [(x, model(x).argmax(-1)) for x in inputs]
    by_hand = calibrate(model, predicted, validation, price=0.02)
    x, _ = joined(test)
    torch.testing.assert_close(own.score(x), by_hand.score(x))


def test_a_temperature_that_the_classifier_has_makes_no_difference(fitted):
    found, model, train, validation, _ = fitted
    again = calibrate(Classifier(model).tempered(7.0), train, validation, price=0.02)
    assert again.table == found.table
    given = calibrate(model, train, validation, price=0.02, temperature=3.0)
    assert given.temperature == 3.0
    assert given.table[1].temperature == 3.0


def test_the_network_runs_once_over_each_data_set_and_once_for_an_answer():
    model, train, validation, _ = problem()
    found = calibrate(model, train, validation)
    count = len(joined(train)[1]) + len(joined(validation)[1])
    checked = 100  # inputs that first-sight checks may look at again
    assert count <= sum(model._seen) <= count + checked
    model._seen.clear()
    found(train[0][0])
    assert model._seen == [64]


def test_it_is_quiet_and_leaves_the_model_alone(capsys):
    model, train, validation, _ = problem()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    model.train()
    state = torch.get_rng_state()
    calibrate(model, train, validation)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert capsys.readouterr() == ("", "")


# What it answers ---------------------------------------------------------------------------------


def test_an_answer_is_all_of_it(fitted):
    found, _, _, _, test = fitted
    x, _ = joined(test)
    answer = found(x)
    for name in ("log_probs", "probs", "regret", "score"):
        assert torch.equal(getattr(answer, name), getattr(found, name)(x))
    assert torch.equal(answer.label, found.predict(x))
    assert torch.equal(answer.abstain, found.abstains(x))
    torch.testing.assert_close(answer.probs.sum(-1), torch.ones(len(x)).double())
    assert torch.equal(answer.label, answer.probs.argmax(-1))
    assert (answer.regret >= 0).all()
    assert (answer.regret <= math.log(3)).all()


@pytest.mark.parametrize("by", ["confidence", "regret"])
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 1.0])
def test_abstaining_rejects_the_share_in_validation(fitted, by, share):
    found, _, _, validation, _ = fitted
    x, _ = joined(validation)
    rejected = float(found.abstains(x, share=share, by=by).double().mean())
    assert rejected == pytest.approx(share, abs=1.5 / 500 + 0.001)


@pytest.mark.parametrize("by", ["confidence", "regret"])
def test_equal_inputs_are_treated_alike(by):
    """Categorical inputs: scores tie, up to rounding that differs between batches."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kinds = torch.randn(12, 40)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 3))
        which = torch.randint(12, (900,))
        x = kinds[which]
        with torch.no_grad():
            labels = torch.multinomial((2 * model(x)).softmax(-1), 1).squeeze(1)
    found = calibrate(model, x[:400], (x[400:], labels[400:]), price=0.02)
    for share in (0.05, 0.3, 0.9):
        assert found.abstains(x[400:], share=share, by=by).double().mean() <= share
        alone = torch.cat([found.abstains(row[None], share=share, by=by) for row in kinds])
        assert torch.equal(found.abstains(kinds, share=share, by=by), alone)
        assert torch.equal(found.abstains(x[400:], share=share, by=by), alone[which[400:]])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_networks_in_half_precision(dtype):
    model, train, validation, test = problem()
    single = calibrate(
        model.float(), *([(x.float(), y) for x, y in d] for d in (train, validation))
    )
    half = [[(x.to(dtype), y) for x, y in d] for d in (train, validation)]
    found = calibrate(model.to(dtype), *half)
    x, _ = joined(test)
    assert found(x).probs.dtype == torch.float32
    difference = (found.probs(x) - single.probs(x.float())).abs()
    assert float(difference.mean()) < 0.05


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["logits", "features"])
def test_the_core_refuses_or_flags_what_is_not_finite(fitted, broken, where):
    found, model, _, _, test = fitted
    x, _ = joined(test)
    data = {"logits": model(x[:5]).detach(), "features": found.features(x[:5])}
    data[where][3, 0] = broken
    with pytest.raises(ValueError, match="for 1 of 5 inputs, first at index 3"):
        found.calibrator(**data)
    flagged = replace(found.calibrator, on_error="flag")(**data)
    assert flagged.label.tolist().index(-1) == 3
    assert flagged.probs[[0, 1, 2, 4]].isfinite().all()


def test_eight_threads_get_the_same_numbers(fitted):
    _, model, train, validation, test = fitted
    found = calibrate(nn.Sequential(model.body, nn.Tanh(), model.head), train, validation)
    x, _ = joined(test)
    inputs = [x[:1], x[1:4], x[4:40]]
    expected = [found.log_probs(each) for each in inputs]
    before = torch.get_num_threads()

    def differing(_):
        pairs = ((found.log_probs(inputs[i % 3]), expected[i % 3]) for i in range(60))
        return sum(not torch.equal(a, b) for a, b in pairs)

    with ThreadPoolExecutor(8) as pool:
        assert sum(pool.map(differing, range(8))) == 0
    assert torch.get_num_threads() == before


def test_one_file_holds_all_of_it(fitted, tmp_path):
    found, model, _, _, test = fitted
    x, _ = joined(test)
    acnml.save(found, tmp_path / "calibrated.safetensors")
    loaded = acnml.load(tmp_path / "calibrated.safetensors", model)
    assert all(torch.equal(a, b) for a, b in zip(loaded(x), found(x), strict=True))
    assert str(loaded) == str(found)
    acnml.save(found.calibrator, tmp_path / "core.safetensors")
    core = acnml.load(tmp_path / "core.safetensors")
    assert torch.equal(core.probs(model(x), found.features(x)), found.probs(x))
    assert torch.equal(core.regret(model(x), found.features(x)), found.regret(x))


def test_printed_it_explains_itself(fitted):
    text = str(fitted[0])
    for words in ("network", "temperature of equal price", "acnml", "closed-form", "NLL", "nats"):
        assert words in text
    assert "<b>closed-form</b>" in fitted[0]._repr_html_()


# The core on arrays ------------------------------------------------------------------------------


def arrays(classes: int = 4, count: int = 1500, seed: int = 0):
    """Logits, features and labels of a classifier that is too sure."""
    generator = np.random.default_rng(seed)
    labels = np.arange(count) % classes
    features = 1.5 * np.eye(classes, 6)[labels] + generator.normal(size=(count, 6))
    logits = 4 * features[:, :classes] + generator.normal(size=(count, classes))
    return logits, features, labels


@pytest.mark.parametrize("classes", [2, 30])
def test_moments_of_parts_stand_for_the_training_data(classes):
    logits, features, labels = arrays(classes=min(classes, 4))
    validation = (logits[700:], features[700:], labels[700:])
    count = logits.shape[1]
    parts = [acnml.atypicality.Moments(count) for _ in range(3)]
    for part, rows in zip(parts, np.array_split(np.arange(700), 3), strict=True):
        part.add(torch.from_numpy(features[rows]), torch.from_numpy(labels[rows]))
    nothing = acnml.atypicality.Moments(count)
    merged = fit_calibrator(nothing + parts[0] + parts[1] + parts[2], validation)
    whole = fit_calibrator((features[:700], labels[:700]), validation)
    assert merged.alpha == pytest.approx(whole.alpha, rel=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_no_score_is_the_softmax_and_a_huge_one_forgets_the_logits(rule):
    logits = 3 * normal(4, 6).float()
    probs = torch.softmax(logits, -1)
    # Closed-form NML keeps the order of the labels: h is at most 1.
    forgotten = 1 / (2 - probs) if rule == "closed-form" else torch.ones_like(probs)
    for alpha, weights in ((0.0, probs), (1e3, forgotten)):
        log_lik = RULES[rule](logits, variance(alpha, torch.full((4,), 1e10)))
        expected = (weights / weights.sum(-1, keepdim=True)).log()
        found = torch.log_softmax(log_lik, -1)
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("rule", RULES)
def test_many_data_meet_the_price_exactly_and_rivals_nearly(rule, monkeypatch):
    monkeypatch.setattr("acnml.calibration.fitting.SEARCHED", 2000)
    labels = torch.randint(5, (3000,), generator=torch.Generator().manual_seed(0))
    features = normal(3000, 6).float()
    features[torch.arange(3000), labels] += 1.5
    validation = (3 * features[1500:, :5], features[1500:], labels[1500:])
    found = fit_calibrator((features[:1500], labels[:1500]), validation, price=0.02, rule=rule)
    rows = {row.method: row for row in found.table}
    for name in (*RULES, "temperature of equal price"):
        spent = rows[name].nll - rows["temperature"].nll
        if name == rule or name != "acnml":
            assert 0.99 * 0.02 <= spent <= 0.02 + 1e-9
        else:
            assert spent == pytest.approx(0.02, rel=0.3)


# What it refuses, and what it warns of -----------------------------------------------------------


def test_validation_data_that_cannot_be_used():
    model, train, validation, _ = problem()
    x, labels = joined(validation)
    for data, message in (
        ((x[:10], labels[:10]), "10 validation examples are too few"),
        ((x, model(x).argmax(-1)), "every validation example is predicted correctly"),
        ((x, (model(x).argmin(-1))), "the labels are no more probable than other classes"),
        ((x, labels + 1), "label 3 is outside the model's 3 classes"),
        (x, "there are no labels"),
    ):
        with pytest.raises(ValueError, match=message):
            calibrate(model, train, data)
    with pytest.raises(ValueError, match="are the same object"):
        calibrate(model, train, train)
    with pytest.raises(ValueError, match="rule must be one of 'closed-form'"):
        calibrate(model, train, validation, rule="nml")
    with pytest.raises(ValueError, match="price must be a positive, finite number"):
        calibrate(model, train, validation, price=0)


def test_probabilities_are_not_logits():
    model, train, validation, _ = problem()
    with pytest.raises(ValueError, match="outputs are probabilities"):
        calibrate(nn.Sequential(model, nn.Softmax(-1)), train, validation)
    logits, features, labels = arrays()
    probs = torch.softmax(torch.from_numpy(logits), -1)
    with pytest.raises(ValueError, match="the logits are probabilities"):
        fit_calibrator((features, labels), (probs, features, labels))


@pytest.mark.filterwarnings("ignore:The network says hardly more")
def test_shuffled_labels_are_warned_of():
    logits, features, labels = arrays()
    shuffled = np.random.default_rng(1).permutation(labels)
    shuffled[:300] = labels[:300]  # a little better than chance
    with pytest.warns(UserWarning, match="price sets no limit: check that the labels belong"):
        fit_calibrator((features, labels), (logits, features, shuffled), price=0.2)


def test_a_few_validation_data_and_missing_classes_are_warned_of():
    logits, features, labels = arrays()
    few = labels < 2
    validation = logits[few][:12], features[few][:12], labels[few][:12]
    with pytest.warns(UserWarning, match="validation") as caught:
        fit_calibrator((features, labels), validation, temperature=1.0)
    texts = "\n".join(str(each.message) for each in caught)
    assert "12 validation examples say little about thresholds" in texts
    assert "2 of 4 classes have no validation data: 2, 3" in texts


def test_few_training_data_for_many_features_do_no_harm():
    """A covariance of 1,500 features from 300 inputs must not make a weak shift look extreme."""
    generator = torch.Generator().manual_seed(0)
    mixing = torch.randn(20, 1500, generator=generator)
    labels = torch.arange(1300) % 4
    hidden = torch.randn(1300, 20, generator=generator) + 2 * torch.eye(4, 20)[labels]
    features = hidden @ mixing + 3 * torch.randn(1300, 1500, generator=generator)
    logits = 3 * hidden[:, :4] + torch.randn(1300, 4, generator=generator)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        core = fit_calibrator(
            (features[:300], labels[:300]), (logits[300:], features[300:], labels[300:])
        )
    weak = features[300:] + 1.0 * torch.randn(1000, 1500, generator=generator)
    assert float(core(logits[300:], weak).score.mean()) < 1.5
    plain = core.probs(logits[300:], features[300:]).amax(-1).mean()
    assert float(plain - core.probs(logits[300:], weak).amax(-1).mean()) < 0.05
