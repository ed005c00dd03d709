"""The playground: its Python, the command that serves it, and the page in a real browser.

`playground/tests/browse.mjs` uses the built page in Chromium and writes down what it sees. It runs
once, and the tests below judge what it saw: each of them is about one promise of the page.
"""

from __future__ import annotations

import json
import threading
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from acnml import Acnml, Linearised, exact

pytest.importorskip("onnx", reason="the playground needs the extra onnx")
pytest.importorskip("sklearn", reason="the playground needs scikit-learn")

from acnml.calibration.calibrator import closed_form, variance
from acnml.calibration.table import EQUAL_PRICE
from browsing import once
from playground import browser, drawing, model, server

ROOT = Path(__file__).parents[2] / "playground"
DIST = ROOT / "dist"
DRAWINGS = json.loads((ROOT / "src" / "digits" / "drawings.json").read_text())
METHODS = ("network", "temperature", "closed", "acnml")


def missing() -> str | None:
    """What a test in the browser lacks, or None."""
    if reason := browser.lacking():
        return reason
    if not (DIST / "index.html").exists() or not (model.FOLDER / model.INFO).exists():
        return "the page is not built, run `make page`"
    sources = [*(ROOT / "src").rglob("*"), ROOT / "index.html", model.FOLDER / model.INFO]
    built = (DIST / "index.html").stat().st_mtime
    if any(path.stat().st_mtime > built for path in sources):
        return "the built page is older than its sources, run `make page`"
    return None


in_browser = pytest.mark.skipif(
    missing() is not None, reason=f"no test of the playground in a browser: {missing()}"
)


def trained_on() -> str | None:
    """The data of the page's network, or None if there is no page."""
    return None if missing() else json.loads((model.FOLDER / model.INFO).read_text())["data"]


# Scikit-learn's digits are too few and too coarse for a network that reads drawings well.
with_mnist = pytest.mark.skipif(
    trained_on() != "MNIST", reason="what a network makes of drawings is tested with MNIST only"
)


@pytest.fixture(scope="session")
def seen(tmp_path_factory, worker_id):
    """What the browser saw; workers share one run."""

    def observe():
        return browser.observe("browse.mjs", DIST)

    return once("playground", tmp_path_factory, worker_id, observe)


def confidence(observed: dict, method: str) -> float:
    """The longest bar, or 0 for an image without an answer."""
    return max(bar["width"] or 0 for bar in observed["bars"][method])


# In the browser: the whole page


@in_browser
def test_it_works_offline_asks_no_other_host_and_writes_no_errors(seen):
    assert seen["finished"]
    assert seen["console"] == seen["foreign"] == []
    assert len(seen["requests"]) >= 6


@in_browser
def test_the_first_load_is_under_4_megabytes_and_the_model_under_1(seen):
    assert sum(request["bytes"] for request in seen["requests"]) < 4e6
    assert sum(path.stat().st_size for path in DIST.rglob("*") if path.is_file()) < 4e6
    (onnx_file,) = DIST.rglob("*.onnx")
    assert onnx_file.stat().st_size < 1e6
    assert onnx_file.read_bytes() == (model.FOLDER / model.ONNX).read_bytes()


# In the browser: digits


@in_browser
@with_mnist
def test_strokes_change_the_bars_and_no_method_abstains_on_the_first_picture(seen):
    for method in METHODS:
        before, seven, three = (
            [bar["width"] or 0 for bar in seen[name]["bars"][method]]
            for name in ("empty", "seven", "three")
        )
        assert int(np.argmax(seven)) == 7
        assert int(np.argmax(three)) == 3
        assert seven != before
    assert sum(seen["empty"]["pixels"]) == 0
    assert set(seen["seven"]["decision"].values()) == {"answers"}


@in_browser
def test_bars_and_texts_agree_and_sum_to_one(seen):
    for name in ("seven", "letter", "example"):
        for method in METHODS:
            bars = seen[name]["bars"][method]
            assert sum(bar["width"] for bar in bars) == pytest.approx(1, abs=1e-3)
            texts = [float(bar["text"].rstrip(" %")) for bar in bars]
            assert texts == pytest.approx([100 * bar["width"] for bar in bars], abs=0.06)


@in_browser
@with_mnist
def test_turning_a_seven_lowers_the_confidence_of_acnml_more_than_the_networks(seen):
    drops = {
        method: confidence(seen["seven"], method)
        - np.mean([confidence(at, method) for at in seen["turned"]])
        for method in METHODS
    }
    assert min(drops["closed"], drops["acnml"]) > drops["network"]
    # At one angle the seven is a digit as good as before, and then so is the answer.
    regrets = np.array([at["regret"] for at in seen["turned"]])
    assert regrets.min() >= seen["seven"]["regret"]
    assert np.median(regrets) > seen["seven"]["regret"] + 0.1


@in_browser
def test_images_of_the_page_are_those_of_python(seen):
    names = {row["name"] for row in seen["images"]}
    assert names == set(DRAWINGS)
    for row in seen["images"]:
        how = drawing.Distortion(**row["distortion"])
        expected = drawing.distort(drawing.render(DRAWINGS[row["name"]]), how)
        np.testing.assert_allclose(row["pixels"], expected.ravel(), rtol=0, atol=1e-6)


@in_browser
def test_answers_of_the_page_are_those_of_pytorch(seen):
    """The library's own rules, not the exported file, for all images and four methods."""
    calibrated = model.load()
    rows = seen["images"]
    pixels = torch.tensor([row["pixels"] for row in rows], dtype=torch.float32)
    images = pixels.view(-1, 1, drawing.SIDE, drawing.SIDE)
    answer = calibrated(images)
    logits = calibrated.classifier.logits(images).detach()
    closed, plain = (model.row_of(calibrated, name) for name in ("closed-form", EQUAL_PRICE))
    explained = closed_form(logits / calibrated.temperature, variance(closed.alpha, answer.score))
    expected = {
        "network": logits.softmax(-1),
        "temperature": (logits / plain.temperature).softmax(-1),
        "closed": explained.softmax(-1),
        "acnml": answer.probs,
    }
    for method in METHODS:
        found = torch.tensor([row["probabilities"][method] for row in rows])
        torch.testing.assert_close(found, expected[method], rtol=0, atol=1e-4)
    regret = torch.tensor([row["regret"] for row in rows])
    torch.testing.assert_close(regret, answer.regret, rtol=0, atol=1e-4)


@in_browser
def test_a_finger_draws_and_the_page_fits_a_phone(seen):
    touch = seen["touch"]
    assert sum(touch["blank"]["pixels"]) == 0
    assert int(np.argmax([bar["width"] for bar in touch["drawn"]["bars"]["network"]])) == 1
    assert touch["widths"][0] <= touch["widths"][1]
    assert touch["scrolled"] == 0


# In the browser: keyboard and screen readers


@in_browser
def test_tab_reaches_every_control_and_the_focus_is_visible(seen):
    order = [stop["element"] for stop in seen["keyboard"]["order"]]
    first = order[: order.index("share") + 1]
    assert {"tab-digits", "theme", "pad", "undo", "clear", "reset", "share"} <= set(first)
    assert {f"Digit {digit}" for digit in range(10)} <= set(first)
    sliders = ["rotation", "scale", "right", "down", "blur", "noise"]
    assert {f"slide-{name}" for name in sliders} <= set(first)
    shown = seen["keyboard"]["order"][: len(first)]
    assert [stop["element"] for stop in shown if not stop["isVisible"]] == []


@in_browser
def test_every_control_has_a_name_and_changes_are_announced(seen):
    assert seen["unnamed"] == []
    for text in ("Network: ", "Temperature: ", "ACNML: ", "Regret "):
        assert text in seen["live"]
    assert seen["example"]["confidence"]["acnml"] in seen["live"]
    assert "ACNML abstains below" in seen["chart"]


# In the browser: the plane


@in_browser
def test_the_plane_computes_what_acnml_exact_computes(seen):
    for case in seen["judgements"]:
        found = {
            name: torch.tensor([row[name] for row in case["found"]], dtype=torch.float64)
            for name in case["found"][0]
        }
        for name, expected in judged(case).items():
            torch.testing.assert_close(found[name], expected, rtol=0, atol=1e-4)


def judged(case: dict) -> dict[str, torch.Tensor]:
    """The same numbers by the library: p(1|x) and log C of three methods at all queries."""
    queries = features(case["queries"])
    if not case["samples"]:  # without data: the prior alone, with covariance I/2λ
        return of_the_prior(queries, case["penalty"])
    labels = torch.tensor([sample["label"] for sample in case["samples"]])
    problem = exact.LogisticProblem(features(case["samples"]), labels, case["penalty"])
    laplace, refits = exact.laplace(problem), exact.cnml(problem, queries)
    solver = Linearised(tolerance=1e-8)
    approximate = Acnml(laplace.classifier, laplace.posterior, alpha=1.0, solver=solver)
    solved = approximate.solve(queries)
    return {
        "plain": laplace.fit.log_probs(queries)[:, 1].exp(),
        "acnml": solved.log_probs[:, 1].exp(),
        "acnmlRegret": solved.regret,
        "cnml": refits.log_probs[:, 1].exp(),
        "cnmlRegret": refits.regret,
    }


def of_the_prior(queries: torch.Tensor, penalty: float) -> dict[str, torch.Tensor]:
    """By symmetry 1/2 everywhere; the margin solves m = κσ(-m) for both labels and methods."""
    kappa = queries.square().sum(-1) / (2 * penalty)
    low, high = torch.zeros_like(kappa), kappa
    for _ in range(200):
        middle = (low + high) / 2
        above = middle > kappa * torch.sigmoid(-middle)
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    half, regret = torch.full_like(kappa, 0.5), torch.log(2 * torch.sigmoid(low))
    probs = dict.fromkeys(("plain", "acnml", "cnml"), half)
    return probs | dict.fromkeys(("acnmlRegret", "cnmlRegret"), regret)


def features(places: list[dict]) -> torch.Tensor:
    points = [[place["x"], place["y"]] for place in places]
    return exact.with_intercept(torch.tensor(points, dtype=torch.float64))


@in_browser
def test_the_keyboard_moves_points_changes_classes_adds_and_removes(seen):
    plane = seen["plane"]
    before, after = plane["removed"]["samples"][0], plane["moved"]["samples"][0]
    assert after["x"] == pytest.approx(before["x"] + 0.1)
    assert after["y"] == pytest.approx(before["y"] + 0.5)
    assert after["label"] != before["label"]
    keys = plane["keys"]["samples"]
    assert keys[1] == plane["moved"]["samples"][2]  # the second is gone
    assert keys[-1]["label"] == 0
    assert plane["focus"].startswith("Blue point at ")


@in_browser
def test_the_table_of_the_query_shows_the_methods(seen):
    state = seen["plane"]["penalty"]
    case = {**state, "queries": [state["query"]]}
    expected = judged(case)
    for panel in ("plain", "acnml", "cnml"):
        blue, orange, regret = state["rows"][panel]
        share = 100 * expected[panel].item()
        assert float(orange.rstrip(" %")) == pytest.approx(share, abs=0.06)
        assert float(blue.rstrip(" %")) == pytest.approx(100 - share, abs=0.06)
        if panel != "plain":
            assert float(regret) == pytest.approx(expected[f"{panel}Regret"].item(), abs=6e-4)


# Without a browser


@pytest.mark.parametrize("name", sorted(DRAWINGS))
def test_ink_fits_the_box_and_its_mass_is_central(name):
    """To a fifth of a pixel, because the moved ink is drawn anew; MNIST moves by whole pixels."""
    image = drawing.render(DRAWINGS[name])
    rows, columns = np.nonzero(image > 0.5)
    longer = max(np.ptp(rows), np.ptp(columns)) + 1
    assert drawing.BOX - 2 <= longer <= drawing.BOX + 1
    where = np.arange(drawing.SIDE)
    centre = ((image.sum(0) * where).sum(), (image.sum(1) * where).sum()) / image.sum()
    np.testing.assert_allclose(centre, drawing.CENTRE, rtol=0, atol=0.2)


def test_distortions_against_scipy():
    """Turns by scipy's interpolation, blurs by its Gaussian filter, shifts by slices."""
    from scipy import ndimage

    image = drawing.render(DRAWINGS["2"])
    turned = ndimage.rotate(image, 33, axes=(-1, -2), reshape=False, order=1, mode="grid-constant")
    ours = drawing.distort(image, drawing.Distortion(rotation=33))
    np.testing.assert_allclose(ours, turned, atol=1e-12)
    blurred = ndimage.gaussian_filter(image, 1.2, mode="constant", radius=4)
    ours = drawing.distort(image, drawing.Distortion(blur=1.2))
    np.testing.assert_allclose(ours, blurred, atol=1e-12)
    shifted = drawing.distort(image, drawing.Distortion(right=3, down=-2))
    np.testing.assert_allclose(shifted[:-2, 3:], image[2:, :-3], atol=1e-12)
    assert shifted[:, :3].sum() == shifted[-2:].sum() == 0


def test_small_digits_are_enlarged_by_the_rules_of_drawings():
    """Ink of scikit-learn's digits: 20 pixels along the longer side, mass in the centre."""
    from studies.data.digits import all_digits

    small = all_digits().inputs[:200]
    images = model.fitted(small)[:, 0].double()
    assert images.shape == (200, drawing.SIDE, drawing.SIDE)
    where = torch.arange(drawing.SIDE)
    total = images.sum((1, 2))
    for axis in (1, 2):
        centres = (images.sum(axis) * where).sum(1) / total
        assert (centres - drawing.CENTRE).abs().max() < 0.05
    ink = images > 0.5 * images.amax((1, 2), keepdim=True)
    longest = torch.maximum(ink.any(2).sum(1), ink.any(1).sum(1))
    assert longest.max() <= drawing.BOX + 1
    assert longest.min() >= drawing.BOX - 1


def test_the_command_serves_its_folder_to_this_machine_only(tmp_path):
    (tmp_path / "index.html").write_text("the page")
    (tmp_path / "module.mjs").write_text("export {}")
    with server.serve(0, tmp_path) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        with urllib.request.urlopen(server.address(running)) as page:
            assert page.read() == b"the page"
        with urllib.request.urlopen(server.address(running) + "module.mjs") as module:
            assert module.headers["Content-Type"] == "text/javascript"
        running.shutdown()
    assert running.server_address[0] == "127.0.0.1"


def test_a_model_is_built_again_only_if_something_changed(tmp_path):
    assert not model.is_current(tmp_path, "digest")
    for name in (model.NETWORK, model.CALIBRATED, model.ONNX):
        (tmp_path / name).touch()
    (tmp_path / model.INFO).write_text('{"fingerprint": "digest"}')
    assert model.is_current(tmp_path, "digest")
    assert not model.is_current(tmp_path, "other")
    (tmp_path / model.ONNX).unlink()
    assert not model.is_current(tmp_path, "digest")
    assert model.fingerprint("MNIST") != model.fingerprint("scikit-learn digits")
