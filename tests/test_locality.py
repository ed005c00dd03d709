"""One call stays local: how many files of the library a prediction passes through."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import acnml

ROOT = Path(acnml.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

# The agreed numbers of files, which docs/architecture.md states.
LAST_LAYER, ALL_LAYERS = 14, 18


def files_passed(call) -> set[str]:
    """Return the files of the library in which a function is called."""
    files = set()

    def trace(frame, event, _):
        if event == "call":
            files.add(frame.f_code.co_filename)

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {str(Path(f).relative_to(ROOT)) for f in files if Path(f).is_relative_to(ROOT)}


@pytest.fixture(scope="module")
def setting():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 4, generator=generator)
    return model, acnml.Classifier(model), [(x, x.argmax(-1) % 3)], x


@pytest.mark.parametrize(("covered", "most"), [("last", LAST_LAYER), ("all", ALL_LAYERS)])
def test_a_prediction_passes_few_files(setting, covered, most):
    model, classifier, data, x = setting
    parameters = [model[2]] if covered == "last" else None
    posterior = acnml.fit_laplace(classifier, data, layers=parameters)
    predict = acnml.Acnml(classifier, posterior, alpha=0.1)
    predict(x)  # the first call also checks the model
    files = files_passed(lambda: predict(x))
    assert len(files) <= most, sorted(files)


def test_the_page_states_these_numbers():
    stated = re.search(r"agreed: (\d+) for the last layer, (\d+) for all layers", PAGE.read_text())
    assert stated is not None
    assert tuple(map(int, stated.groups())) == (LAST_LAYER, ALL_LAYERS)
