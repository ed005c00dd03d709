"""A whole run: everything is measured once, and is what the library's predictors give."""

from __future__ import annotations

from studies.rotated_mnist import methods


def test_methods_are_compared_on_the_same_images(finished):
    """Those that see more are scored on the first of them as well, which all have seen."""
    _, results = finished
    shared = results.inputs(methods.CHEAP)
    assert shared < results.inputs([methods.MAP])
    for method in methods.CHEAP:
        assert len(results.values(method, "ece", "90°", shared)) == 1, method.name
