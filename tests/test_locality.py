"""One call stays local: how many files of the library a prediction passes through."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import acnml
from acnml._util.torch_state import one_thread

ROOT = Path(acnml.__file__).parent
PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"

# The agreed numbers of files, and of functions, which docs/architecture.md states.
LAST_LAYER, ALL_LAYERS, CALIBRATED, FUNCTIONS = 12, 15, 8, 45


def passed(call) -> set[tuple[str, str]]:
    """Return the functions of the library that a function calls, by file and name."""
    found = set()

    def trace(frame, event, _):
        code = frame.f_code
        if event == "call" and Path(code.co_filename).is_relative_to(ROOT):
            found.add((str(Path(code.co_filename).relative_to(ROOT)), code.co_name))

    sys.setprofile(trace)
    try:
        call()
    finally:
        sys.setprofile(None)
    return {(file, name) for file, name in found if not name.startswith("<")}


def files_passed(call) -> set[str]:
    """Return the files of the library in which a function is called."""
    return {file for file, _ in passed(call)}


@pytest.mark.filterwarnings("ignore")  # of few validation data
def test_the_front_door_is_short(setting):
    model, _, _, x = setting
    some, labels = x.repeat(5, 1), model(x).argmax(-1).repeat(5)
    labels[::5] = (labels[::5] + 1) % 3
    calibrated = acnml.calibrate(model, (some, labels), (some + 0.1, labels), temperature=1)
    calibrated.probs(x)  # the first call also makes the copy that later ones run
    with one_thread():  # with several, how many to use is one more question
        functions = passed(lambda: calibrated.probs(x))
    assert len({file for file, _ in functions}) <= CALIBRATED, sorted(functions)
    assert len(functions) <= FUNCTIONS, sorted(functions)


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
    front = re.search(r"`Calibrated.probs`: (\d+) files and (\d+) functions", PAGE.read_text())
    assert front is not None
    assert tuple(map(int, front.groups())) == (CALIBRATED, FUNCTIONS)
