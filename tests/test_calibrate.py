"""calibrate: what it chooses, what it costs, what it refuses, and that it survives a file."""

from __future__ import annotations

import math
import warnings
from collections import deque
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from torch import nn

import acnml
from acnml import Acnml, Classifier, Map, Place, Score, Tempered, calibrate, metrics, tuning
from acnml.calibration._search import accuracy_is_lower
from cases import normal

# Bounds on the solves of a calibration, on data that fit into the first look and on others.
MOST_SOLVES, MOST_FULL_SOLVES = 27, 16


class Network(nn.Module):
    """Two layers; counts the inputs that pass through any copy of it."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 16), nn.Linear(16, classes)
        self._seen: deque[int] = deque()  # not plain data, so it is not compared by `load`

    def __deepcopy__(self, memo):
        with torch.random.fork_rng():
            copy = Network(self.head.out_features)
        copy.body, copy.head, copy._seen = self.body, self.head, self._seen
        return copy

    def forward(self, x):
        self._seen.append(len(x))
        return self.head(torch.tanh(self.body(x)))


class Twice(nn.Linear):
    """Not what its base class computes."""

    def forward(self, x):
        return 2 * super().forward(x)


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
    curvature = acnml.fit_curvature(tempered, train, layers=[model.head])
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


@pytest.mark.parametrize("curvature", ["kron", "diag", "ekfac", "full"])
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("score", Score)
def test_abstaining_of_networks_in_half_precision(dtype, score):
    model, train, validation, _ = problem()
    half = [[(x.to(dtype), labels) for x, labels in data] for data in (train, validation)]
    result = calibrate(model.to(dtype), *half, price=0.03)
    x, _ = joined(half[1])
    for share in (0.05, 0.2, 0.5):
        rejected = result.abstains(x, share, score).double().mean().item()
        assert rejected == pytest.approx(share, abs=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", Score)
def test_equal_inputs_are_treated_alike(dtype, score):
    """Categorical inputs: scores tie, up to rounding that differs between batches."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kinds = torch.randn(12, 40).to(dtype)
        model = nn.Sequential(nn.Linear(40, 64), nn.Tanh(), nn.Linear(64, 3)).to(dtype)
        which = torch.randint(12, (900,))
        x = kinds[which]
        with torch.no_grad():
            labels = torch.multinomial((2 * model(x)).softmax(-1), 1).squeeze(1)
    result = calibrate(model, x[:400], (x[400:], labels[400:]), price=0.02)
    for share in (0.05, 0.3, 0.9):
        assert result.abstains(x[400:], share, score).double().mean() <= share
        alone = torch.cat([result.abstains(row[None], share, score) for row in kinds])
        assert torch.equal(result.abstains(kinds, share, score), alone)
        assert torch.equal(result.abstains(x[400:], share, score), alone[which[400:]])
        if share == 0.3 and find_spec("pyarrow"):  # which scoring needs
            from acnml.scoring import Answers
            from acnml.scoring.columns import Read
            from acnml.scoring.scorer import Scorer

            scorer = Scorer(result, Answers(abstain_share=share, abstain_by=score.value))
            read = Read({"x": kinds.numpy()}, torch.arange(12).numpy(), {})
            assert scorer(read)["abstain"].to_pylist() == alone.tolist()


@pytest.mark.parametrize("share", [-0.1, 1.1, math.nan])
def test_shares_are_shares(calibrated, share):
    with pytest.raises(ValueError, match="share must be between 0 and 1"):
        calibrated[0].threshold(share)


@pytest.mark.parametrize("score", Score)
def test_scores_by_their_names(calibrated, score):
    result, _, _, _, test = calibrated
    x, _ = joined(test)
    assert result.threshold(0.1, score.value) == result.threshold(0.1, score)
    assert torch.equal(result.abstains(x, 0.1, score.value), result.abstains(x, 0.1, score))
    for use in (lambda: result.threshold(0.1, "margin"), lambda: result.abstains(x, score="")):
        with pytest.raises(ValueError, match="must be a Score or one of 'confidence', 'regret'"):
            use()


def test_inputs_without_an_answer_are_refused_or_flagged(calibrated):
    result, model, train, validation, test = calibrated
    x = joined(test)[0][:6].clone()
    expected, x[2] = result(x), math.nan
    with pytest.raises(ValueError, match="for 1 of 6 inputs, first at index 2"):
        result(x)
    folds = [(model, train, validation)]
    flagged = calibrate(model, train, validation, price=0.02, on_error="flag")
    assert flagged.table == result.table
    by_folds = acnml.calibrate_folds(model, train, folds, price=0.02, on_error="flag")
    for found in (flagged, by_folds):
        assert found.predictor.on_error == "flag"
        assert found.predict(x)[2] == -1
        assert found.abstains(x, score="regret")[2]
    others = [0, 1, 3, 4, 5]
    torch.testing.assert_close(flagged(x)[others], expected[others])
    for wrong in (
        calibrate,
        lambda *args, on_error: acnml.calibrate_folds(*args[:2], folds, on_error=on_error),
    ):
        with pytest.raises(ValueError, match=r"on_error must be one of \('raise', 'flag'\)"):
            wrong(model, train, validation, on_error="ignore")


class TestCostOfTheSearch:
    """Solves of the validation data, counted."""

    @pytest.fixture
    def solves(self, monkeypatch):
        """Pairs (number of rows, α)."""
        found, solve = [], Acnml.solve_features

        def counted(predictor, features):
            found.append((len(features.logits), predictor.alpha))
            return solve(predictor, features)

        monkeypatch.setattr(Acnml, "solve_features", counted)
        return found

    @pytest.mark.parametrize("price", [0.01, 0.05])
    def test_prices_share_their_solves(self, solves, price):
        model, train, validation, _ = problem()
        table = calibrate(model, train, validation, price=price).table
        again = {alpha for _, alpha in solves if solves.count((500, alpha)) > 1}
        assert again <= {row.alpha for row in table}  # solutions of one α at a time are kept
        assert len(solves) <= MOST_SOLVES

    def test_a_first_look_saves_solves_of_all_data(self, solves):
        model, train, validation, test = problem(n=3150)
        calibrate(model, train, joined(validation + test), price=0.05)
        rows = [count for count, _ in solves]
        assert set(rows) == {1000, 3000}
        assert rows.count(3000) <= MOST_FULL_SOLVES

    @pytest.mark.parametrize("by", ["label", "right first", "wrong first"])
    def test_sorted_data_spend_the_price_too(self, monkeypatch, by):
        """The first look is at rows from everywhere: it may not see the errors alone."""
        monkeypatch.setattr("acnml.calibration._search.FIRST_LOOK", 100)
        model, train, validation, _ = problem()
        x, labels = joined(validation)
        wrong = (model(x).argmax(-1) != labels).long()
        order = {"label": labels, "right first": wrong, "wrong first": -wrong}[by].argsort()
        table = calibrate(model, train, (x[order], labels[order]), price=0.03).table
        for row, price in zip(table[3:6], (0.01, 0.03, 0.09), strict=True):
            assert 0.95 * price <= row.nll - table[1].nll <= price + 1e-9


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
    assert any("gives nearly the same predictions" in note for note in notes) == says_so


def rare_classes(seed: int = 0):
    """A linear model of classes of which some are rare: a large α loses them, and accuracy."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor([0.7, 0.2, 0.07, 0.03])
    labels = torch.multinomial(shares, 1500, replacement=True, generator=generator)
    shift = 1.5 * nn.functional.one_hot(labels, 6)
    x = torch.randn(1500, 6, generator=generator).double() + shift
    model = nn.Linear(6, 4).double()
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=50)

    def loss():
        optimizer.zero_grad()
        value = nn.functional.cross_entropy(model(x[:200]), labels[:200])
        value.backward()
        return value

    optimizer.step(loss)
    return model, x[:200], (x[200:], labels[200:])


class TestUnspentPrice:
    """Something else than the price limits α: the rival must cost what ACNML costs."""

    def check_rival(self, result, model, x, labels):
        plain = metrics.nll(Map(result.classifier)(x), labels)
        spent = metrics.nll(result(x), labels) - plain
        rival = Tempered(Map(Classifier(model)), result.temperature_of_equal_price)
        assert metrics.nll(rival(x), labels) - plain == pytest.approx(spent, rel=1e-4)
        assert result.table[2].method == f"temperature, +{spent:.3g}"
        assert f"a plain temperature of {rival.temperature:.3g} costs as much" in result.notes[0]
        return spent

    def test_accuracy_limits_alpha(self):
        model, train, (x, labels) = rare_classes()
        options = {"curvature": "full", "typicality": False}
        result = calibrate(model, train, (x, labels), price=0.6, **options)
        spent = self.check_rival(result, model, x, labels)
        assert spent < 0.5
        note = f"A larger alpha would lower the accuracy: only {spent:.3g} of 0.6 nats are spent."
        assert note in result.notes
        before = Map(result.classifier)(x).argmax(-1) == labels
        larger = replace(result.predictor, alpha=1.05 * result.alpha)
        assert accuracy_is_lower(larger(x).argmax(-1) == labels, before)

    def test_the_bound_limits_alpha(self):
        """No α makes two classes cost 3 nats: uniform predictions cost less."""
        model, train, validation, _ = problem(classes=2)
        result = calibrate(model, train, validation, price=3)
        spent = self.check_rival(result, model, *joined(validation))
        assert spent < math.log(2)
        note = f"Alpha is at its upper bound of 1e+08: only {spent:.3g} of 3 nats are spent."
        assert note in result.notes

    def test_a_price_that_is_spent_is_that_of_the_rival(self, calibrated):
        result, *_ = calibrated
        assert result.table[2].method == "temperature, +0.02"
        assert not any("are spent" in note for note in result.notes)


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

    def test_data_that_do_not_constrain_the_last_layer(self):
        """All predictions are right and certain: a temperature must be given, and a higher one."""
        model = nn.Linear(2, 2).double()
        with torch.no_grad():
            model.weight.copy_(torch.tensor([[-300.0, 0.0], [300.0, 0.0]]))
        x = normal(200, 2)
        x = x + 2 * x.sign()
        data = x[100:], (model(x[100:]).argmax(-1))
        with pytest.raises(ValueError, match=r"temperature of 1 .* pass a higher temperature"):
            calibrate(model, x[:100], data, temperature=1)
        assert calibrate(model, x[:100], data, temperature=300).alpha > 0

    def test_inputs_with_extreme_logits_are_named(self):
        model, x = nn.Linear(4, 3).double(), normal(200, 4)
        with torch.no_grad():
            model.weight.copy_(torch.eye(3, 4))
        labels = (x[:, :3] + 0.3 * normal(200, 3, seed=1)).argmax(-1)
        held_out = x[100:].clone()
        held_out[[7, 50]] *= 1e6
        labels[100:] = torch.where(
            held_out.abs().amax(1) > 1e3, model(held_out).argmax(-1), labels[100:]
        )
        with pytest.warns(UserWarning, match=r"2 of 100 .* \(index 7, 50\)"):
            calibrate(model, x[:100], (held_out, labels[100:]), price=0.1)

    def test_a_missing_class_is_named(self):
        model, train, validation, _ = problem()
        x, labels = joined(validation)
        some = labels != 1
        with pytest.warns(UserWarning, match=r"1 of 3 classes .* \(1\): alpha is chosen without"):
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
        with pytest.raises(ValueError, match=r"are not the outputs of the layer that .*; name"):
            calibrate(model, train, validation, layer="body")

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                nn.utils.parametrizations.weight_norm,
                r"the weight of layer 'head' .* is parametrised.*parametrize\.remove_param",
            ),
            (
                nn.utils.parametrizations.spectral_norm,
                r"the weight of layer 'head' .* is parametrised.*parametrize\.remove_param",
            ),
            (
                lambda head: nn.utils.prune.l1_unstructured(head, "weight", 0.5),
                r"layer 'head' \(Linear\) is pruned: .* by torch\.nn\.utils\.prune\.remove",
            ),
            (lambda _: Twice(16, 3), r"layer 'head' \(Twice\) is a subclass of nn\.Linear with"),
        ],
    )
    def test_heads_that_are_not_plain(self, change, message):
        model, train, validation, _ = problem()
        model.head = change(model.head).double()
        with pytest.raises(ValueError, match=message):
            calibrate(model, train, validation)
        assert not model._seen

    def test_a_pruned_head_as_the_message_says(self):
        model, train, validation, _ = problem()
        nn.utils.prune.l1_unstructured(model.head, "weight", 0.2)
        nn.utils.prune.remove(model.head, "weight")
        assert calibrate(model, train, validation).alpha > 0

    def test_shared_heads(self):
        model, train, validation, _ = problem()
        model.tied = nn.Embedding(3, 16).double()
        model.tied.weight = model.head.weight
        with pytest.raises(ValueError, match=r"'head.weight' and 'tied.weight' are the same"):
            calibrate(model, train, validation)
        del model.tied
        model.fc = model.head
        with pytest.raises(ValueError, match="the same layer is registered as 'head' and as 'fc'"):
            calibrate(model, train, validation)

    @pytest.mark.parametrize("after", [nn.LogSoftmax(-1), nn.Hardtanh()])
    def test_what_follows_the_head_is_told(self, after):
        model, train, validation, _ = problem()
        message = r"owns \['0.head.weight', '0.head.bias'\]: the model changes these outputs before"
        with pytest.raises(ValueError, match=message):
            calibrate(nn.Sequential(model, after), train, validation)

    def test_the_same_loader_twice(self):
        model, train, _, _ = problem()
        with pytest.raises(ValueError, match="are the same object"):
            calibrate(model, train, train)

    @pytest.mark.parametrize("price", [0, -1, math.inf, math.nan])
    def test_prices(self, price):
        with pytest.raises(ValueError, match="price must be a positive, finite number"):
            calibrate(nn.Linear(2, 2), [], [], price=price)

    @pytest.mark.parametrize(
        ("argument", "value", "message"),
        [
            ("typicality", None, "typicality must be True, False or a list of places .* got None"),
            ("typicality", ["1"], r"typicality must be True, False or a list .* got \['1'\]"),
            ("typicality", [], r"typicality must be True, False or a list of places .* got \[\]"),
            ("typicality", Place("body"), r"typicality must be True, False .* got Place\("),
            ("typicality", [Place("bodi")], "no module 'bodi' .* did you mean 'body'"),
            ("curvature", "kfac", "curvature must be one of .*, got 'kfac'"),
            ("prior_precision", -1, "prior_precision must be a positive, finite number, got -1"),
            ("temperature", 0, "temperature must be a positive, finite number, got 0"),
        ],
    )
    def test_arguments_are_checked_before_data_are_read(self, argument, value, message):
        model, read = Network().double(), []

        def unread():
            read.append(1)
            yield torch.zeros(2, 4).double(), torch.zeros(2).long()

        train, validation = unread(), unread()
        with pytest.raises((TypeError, ValueError), match=message):
            calibrate(model, train, validation, **{argument: value})
        if argument != "typicality":
            folds = [(model, train, validation)]
            with pytest.raises((TypeError, ValueError), match=message):
                acnml.calibrate_folds(model, train, folds, **{argument: value})
        assert not read
        assert not model._seen


def test_layers_by_name_and_by_module(calibrated):
    result, model, train, validation, _ = calibrated
    for layer in ("head", model.head):
        again = calibrate(model, train, validation, price=0.02, layer=layer)
        assert again.alpha == result.alpha


def test_accuracy_may_fall_by_sampling_error_only():
    """With three more lost than won it is chance, with ten lost and none won it is not."""

    def correct(wrong: range) -> torch.Tensor:
        return torch.tensor([row not in wrong for row in range(100)])

    plain = correct(range(4))
    assert not accuracy_is_lower(correct(range(2, 9)), plain)
    assert accuracy_is_lower(correct(range(14)), plain)
    assert not accuracy_is_lower(plain, plain)


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


def test_calibration_does_not_depend_on_the_scale_of_features():
    """Features times c and weights divided by c are the same network, with the same answers."""
    model, train, validation, test = problem()
    x, _ = joined(test)
    results = []
    for scale in (1.0, 100.0):
        head = nn.Linear(16, 3, bias=False).double()
        with torch.no_grad():
            head.weight.copy_(model.head.weight / scale)
        network = nn.Sequential(model.body, nn.Tanh(), Scale(scale), head)
        results.append(calibrate(network, train, validation, price=0.03).probs(x))
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=1e-3)


class Scale(nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x):
        return self.factor * x
