"""calibrate: what it chooses, what it costs, what it refuses, and that it survives a file."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Map, Score, Tempered, calibrate, metrics, tuning
from acnml.calibration._search import accuracy_is_lower


class Network(nn.Module):
    """Two layers; counts the inputs that pass through any copy of it."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, classes)
        self._seen: list[int] = []

    def __deepcopy__(self, memo):
        with torch.random.fork_rng():
            copy = Network(self.head.out_features)
        copy.body, copy.head, copy._seen = self.body, self.head, self._seen
        return copy

    def forward(self, x):
        self._seen.append(len(x))
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


@pytest.fixture(scope="module")
def calibrated():
    model, train, validation, test = problem()
    return calibrate(model, train, validation, price=0.02), model, train, validation, test


def joined(loader):
    return tuple(torch.cat(parts) for parts in zip(*loader, strict=True))


def nll(predictor, loader):
    x, labels = joined(loader)
    return metrics.nll(predictor(x), labels)


def test_the_temperature_is_that_of_least_nll(calibrated):
    result, model, _, validation, _ = calibrated
    expected = tuning.temperature_by_nll(Map(Classifier(model)), validation).value
    assert result.temperature == pytest.approx(expected, rel=1e-6)
    assert result.temperature > 1  # the network is overconfident


def test_the_posterior_is_that_of_the_tempered_likelihood(calibrated):
    result, model, train, _, _ = calibrated
    tempered = Classifier(model).tempered(result.temperature)
    curvature = acnml.kronecker_curvature(tempered, train, parameters=[model.head])
    expected = curvature.posterior(1e-2 * curvature.eigenvalues().mean().item())
    found = result.predictor.posterior.blocks[0]
    torch.testing.assert_close(found.var, expected.blocks[0].var, rtol=1e-7, atol=1e-12)


@pytest.mark.parametrize("temperature", [0.5, 49.0])
def test_a_temperature_that_the_classifier_already_has_makes_no_difference(calibrated, temperature):
    result, model, train, validation, test = calibrated
    tempered = Classifier(model).tempered(temperature)
    again = calibrate(tempered, train, validation, price=0.02)
    assert (again.temperature, again.alpha) == (result.temperature, result.alpha)
    assert again.table == result.table
    x, _ = joined(test)
    assert torch.equal(again(x), result(x))
    given = calibrate(tempered, train, validation, price=0.02, temperature=3)
    assert given.temperature == 3


def test_folds_ignore_the_temperatures_of_their_classifiers(calibrated):
    _, model, train, validation, _ = calibrated
    classifier = Classifier(model)
    folds = [(classifier, train, validation[:4]), (classifier, train, validation[4:])]
    expected = acnml.calibrate_folds(model, train, folds, price=0.02)
    tempered = [(own.tempered(t), *data) for (own, *data), t in zip(folds, (2, 3), strict=True)]
    found = acnml.calibrate_folds(classifier.tempered(5), train, tempered, price=0.02)
    assert (found.temperature, found.alpha) == (expected.temperature, expected.alpha)
    assert found.table == expected.table


def test_alpha_is_the_largest_within_the_price(calibrated):
    result, _, _, validation, _ = calibrated
    limit = nll(Map(result.classifier), validation) + 0.02
    assert limit - 0.1 * 0.02 <= nll(result, validation) <= limit + 1e-9
    larger = replace(result.predictor, alpha=1.1 * result.alpha)
    assert nll(larger, validation) > limit


def test_network_runs_once_over_each_data_set():
    model, train, validation, _ = problem()
    calibrate(model, train, validation)
    n_train, n_validation = (len(joined(loader)[1]) for loader in (train, validation))
    checked = 100  # inputs that first-sight checks may look at again
    assert n_train + n_validation <= sum(model._seen) <= n_train + n_validation + checked


def test_the_table_is_what_the_predictors_do(calibrated):
    result, model, _, validation, _ = calibrated
    x, labels = joined(validation)
    network, tempered, equal, *acnmls = result.table
    for row in result.table:
        assert (row.alpha is None) == (row.regret is None)
    for row, predictor in (
        (network, Map(Classifier(model))),
        (tempered, Tempered(Map(Classifier(model)), result.temperature)),
        (equal, Tempered(Map(Classifier(model)), equal.temperature)),
        *((row, replace(result.predictor, alpha=row.alpha)) for row in acnmls),
    ):
        log_probs = predictor(x)
        expected = metrics.summary(log_probs, labels)
        assert {name: getattr(row, name) for name in expected} == pytest.approx(expected, abs=1e-7)
        assert row.confidence == pytest.approx(log_probs.amax(-1).exp().mean().item(), abs=1e-7)
        if row.regret is not None:
            assert row.regret == pytest.approx(predictor.regret(x).mean().item(), abs=1e-7)
    assert equal.nll == pytest.approx(tempered.nll + 0.02, abs=1e-6)
    assert result.temperature_of_equal_price == equal.temperature > tempered.temperature


def test_a_higher_price_is_more_cautious():
    model, train, validation, test = problem(seed=1)
    results = [calibrate(model, train, validation, price=price) for price in (0.005, 0.02, 0.1)]
    alphas = [result.alpha for result in results]
    assert alphas == sorted(alphas)
    x, _ = joined(test)
    confidences = [result.probs(5 * x).amax(-1).mean().item() for result in results]
    assert confidences == sorted(confidences, reverse=True)


@pytest.mark.parametrize(
    "curvature", [acnml.kronecker_curvature, acnml.diagonal_curvature, acnml.full_curvature]
)
@pytest.mark.parametrize("classes", [2, 5])
def test_all_curvatures_spend_the_price(curvature, classes):
    model, train, validation, _ = problem(classes)
    result = calibrate(model, train, validation, curvature=curvature)
    added = nll(result, validation) - nll(Map(result.classifier), validation)
    assert 0.009 <= added <= 0.01 + 1e-9


def test_answers(calibrated):
    result, _, _, _, test = calibrated
    x, _ = joined(test)
    assert torch.equal(result(x), result.log_probs(x))
    torch.testing.assert_close(result.probs(x).sum(-1), torch.ones(len(x)).double())
    assert torch.equal(result.predict(x), result.probs(x).argmax(-1))
    assert (result.regret(x) >= 0).all()
    assert (result.regret(x) <= math.log(3)).all()


@pytest.mark.parametrize("score", Score)
@pytest.mark.parametrize("share", [0.0, 0.05, 0.2, 1.0])
def test_abstaining_rejects_the_share_in_validation(calibrated, score, share):
    result, _, _, validation, _ = calibrated
    x, _ = joined(validation)
    rejected = result.abstains(x, share, score).double().mean().item()
    assert rejected == pytest.approx(share, abs=1.5 / 500 + 0.001)
    assert result.abstains(100 * x[:50], 0.05, score).double().mean() >= 0


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_shares_are_shares(calibrated, share):
    with pytest.raises(ValueError, match="share must be between 0 and 1"):
        calibrated[0].threshold(share)
    with pytest.raises(TypeError, match=r"Score\.CONFIDENCE or Score\.REGRET"):
        calibrated[0].threshold(0.1, "regret")


def test_one_file_holds_all_of_it(calibrated, tmp_path):
    result, model, _, _, test = calibrated
    x, _ = joined(test)
    acnml.save(result, tmp_path / "calibrated.safetensors")
    loaded = acnml.load(tmp_path / "calibrated.safetensors", Classifier(model))
    assert torch.equal(loaded(x), result(x))
    assert torch.equal(loaded.abstains(x), result.abstains(x))
    assert (loaded.table, loaded.notes, loaded.price) == (result.table, result.notes, result.price)
    assert str(loaded) == str(result)


def test_printed_it_explains_itself(calibrated):
    text = str(calibrated[0])
    for words in ("network", "temperature", "ACNML, +0.02", "NLL", "ECE", "regret", "layer 'head'"):
        assert words in text
    assert "nats" in text


@pytest.mark.parametrize(("price", "says_so"), [(1e-6, True), (0.1, False)])
def test_it_says_when_a_temperature_would_do(price, says_so):
    """For next to no price there is next to no caution, and any method gives the same answers."""
    model, train, validation, _ = problem()
    notes = calibrate(model, train, validation, price=price).notes
    assert any("would do as well" in note for note in notes) == says_so


class TestRefusals:
    def test_too_few_validation_data(self):
        model, train, validation, _ = problem()
        with pytest.raises(ValueError, match="10 validation examples are too few"):
            calibrate(model, train, [(validation[0][0][:10], validation[0][1][:10])])

    def test_softmax_inside(self):
        model, train, validation, _ = problem()
        wrapped = nn.Sequential(model, nn.Softmax(-1))
        with pytest.raises(ValueError, match="the model's outputs are probabilities"):
            calibrate(wrapped, train, validation)

        class Probabilities(nn.Module):
            def __init__(self):
                super().__init__()
                self.head = nn.Linear(3, 3).double()
                with torch.no_grad():
                    self.head.weight.copy_(torch.eye(3))
                    self.head.bias.zero_()

            def forward(self, x):
                return self.head(x[:, :3].softmax(-1))

        with pytest.raises(ValueError, match="the model's outputs are probabilities"):
            calibrate(Probabilities(), train, validation)
        with pytest.raises(ValueError, match="the model's outputs are probabilities"):
            calibrate(Classifier(Probabilities()).tempered(2), train, validation)

    def test_perfect_on_validation(self):
        model, train, validation, _ = problem()
        x, _ = joined(validation)
        with pytest.raises(ValueError, match="every validation point is predicted correctly"):
            calibrate(model, train, [(x, model(x).argmax(-1))])

    def test_a_missing_class_is_named(self):
        model, train, validation, _ = problem()
        x, labels = joined(validation)
        some = labels != 1
        with pytest.warns(UserWarning, match=r"1 of 3 classes have no validation data \(1\)"):
            calibrate(model, train, [(x[some], labels[some])])

    def test_an_uncertain_price_is_told(self):
        model, train, validation, _ = problem()
        few = [(validation[0][0][:60], validation[0][1][:60])]
        with pytest.warns(UserWarning, match="is known only to"):
            result = calibrate(model, train, few, price=0.001)
        assert any("is known only to" in note for note in result.notes)

    def test_no_linear_layer(self):
        model = nn.Sequential(nn.Conv2d(1, 3, 2), nn.Flatten())
        with pytest.raises(ValueError, match=r"has no nn\.Linear layer"):
            calibrate(model, [], [])

    def test_wrong_layers(self):
        model, train, validation, _ = problem()
        with pytest.raises(
            ValueError, match=r"no layer 'fc'; its Linear layers are \['body', 'head'\]"
        ):
            calibrate(model, train, validation, layer="fc")
        with pytest.raises(
            TypeError, match=r"layer must be an nn\.Linear or its name, got a Network"
        ):
            calibrate(model, train, validation, layer=model)
        with pytest.raises(ValueError, match="the logits are not the outputs of the layer"):
            calibrate(model, train, validation, layer="body")

    def test_the_same_loader_twice(self):
        model, train, _, _ = problem()
        with pytest.raises(ValueError, match="are the same object"):
            calibrate(model, train, train)

    @pytest.mark.parametrize("price", [0, -1, math.inf, math.nan])
    def test_prices(self, price):
        with pytest.raises(ValueError, match="price must be a positive, finite number"):
            calibrate(nn.Linear(2, 2), [], [], price=price)


def test_layers_by_name_and_by_module(calibrated):
    result, model, train, validation, _ = calibrated
    for layer in ("head", model.head):
        again = calibrate(model, train, validation, price=0.02, layer=layer)
        assert again.alpha == result.alpha


def test_accuracy_may_fall_by_sampling_error_only():
    """Ten data change: with three more lost than won it is chance, with all ten lost it is not."""
    labels = torch.zeros(100).long()

    def predictions(wrong: range) -> torch.Tensor:
        log_probs = torch.tensor([0.9, 0.1]).log().repeat(100, 1)
        log_probs[wrong.start : wrong.stop] = torch.tensor([0.1, 0.9]).log()
        return log_probs

    plain = predictions(range(4))
    assert not accuracy_is_lower(predictions(range(2, 9)), plain, labels)
    assert accuracy_is_lower(predictions(range(14)), plain, labels)
    assert not accuracy_is_lower(plain, plain, labels)


def test_it_is_quiet_and_leaves_the_model_alone(capsys):
    model, train, validation, _ = problem()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        calibrate(model, train, validation, price=0.02)
    assert capsys.readouterr() == ("", "")
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_calibrated_predictor_is_an_acnml_predictor(calibrated):
    result, _, _, _, test = calibrated
    x, _ = joined(test)
    posterior, typicality = result.predictor.posterior, result.typicality
    same = Acnml(result.classifier, posterior, alpha=result.alpha, typicality=typicality)
    assert torch.equal(result(x), same(x))
