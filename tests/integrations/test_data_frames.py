"""Data frames, and networks of skorch, in `CalibratedClassifier` and in the predictors."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.compose import ColumnTransformer
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import OneHotEncoder, StandardScaler
from torch import nn

from acnml import Classifier, Map
from acnml._util.batches import as_loader
from cases import MLP
from test_sklearn import NAMES, data, fast

pandas = pytest.importorskip("pandas", reason="needs pandas")

# Few data make every price uncertain.
pytestmark = pytest.mark.filterwarnings("ignore:The price of")


def test_data_frames_and_columns_of_text():
    x, y = data()
    frame = pandas.DataFrame(x, columns=list("abcdef"))
    found = fast().fit(frame, pandas.Series(y))
    assert found.feature_names_in_.tolist() == list("abcdef")
    expected = fast().fit(x, y).predict_proba(x)
    np.testing.assert_allclose(found.predict_proba(frame), expected, rtol=1e-9)
    frame["a"] = np.where(x[:, 0] > 0, "high", "low")
    columns = ColumnTransformer([("text", OneHotEncoder(), ["a"])], remainder=StandardScaler())
    mixed = fast(make_pipeline(columns, LogisticRegression())).fit(frame, y)
    assert mixed.score(frame, y) > 0.5
    assert mixed.n_features_in_ == 6


def test_columns_in_another_order_are_refused_unless_they_are_found_by_name():
    x, y = data()
    frame = pandas.DataFrame(x, columns=list("abcdef"))
    turned = frame[list("fedcba")]
    with pytest.raises(ValueError, match="Feature names must be in the same order"):
        fast().fit(frame, y).predict_proba(turned)
    columns = ColumnTransformer([("kept", "passthrough", list("abcdef"))])
    by_name = fast(make_pipeline(columns, LogisticRegression())).fit(frame, y)
    np.testing.assert_array_equal(by_name.predict_proba(turned), by_name.predict_proba(frame))


def test_a_net_of_skorch():
    skorch = pytest.importorskip("skorch", reason="needs skorch")
    x, y = data()
    settings = {"max_epochs": 30, "lr": 0.1, "verbose": 0, "train_split": None}
    loss = nn.CrossEntropyLoss
    net = skorch.NeuralNetClassifier(lambda: nn.Linear(6, 3), criterion=loss, **settings)
    found = fast(net).fit(x.astype(np.float32), np.searchsorted(NAMES, y))
    probs = found.predict_proba(x.astype(np.float32))
    assert probs.shape == (240, 3)
    assert (probs.max(1) < found.estimator_.predict_proba(x.astype(np.float32)).max(1)).mean() > 0.5


def test_predictors_ask_for_arrays():
    x, y = pandas.DataFrame(MLP.x(4).numpy()), pandas.Series([0, 1, 2, 0])
    with pytest.raises(TypeError, match=r"got a DataFrame: pass its to_numpy\(\)"):
        Map(Classifier(MLP.model()))(x)
    with pytest.raises(TypeError, match=r"got a DataFrame: pass its to_numpy\(\)"):
        as_loader((x, y))
    with pytest.raises(TypeError, match=r"got a Series: pass its to_numpy\(\)"):
        as_loader((MLP.x(4), y))
