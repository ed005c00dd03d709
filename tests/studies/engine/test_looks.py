"""Methods that are drawn together can be told apart."""

from __future__ import annotations

import pytest

from studies.cifar10_c import methods as cifar10_c
from studies.paper_mnist.report import LOOKS
from studies.rotated_mnist import methods as rotated_mnist

GROUPS = {
    "cifar10-c, the paper's": [cifar10_c.LOOKS[m] for m in cifar10_c.PAPER_GROUP],
    "cifar10-c, equal price": [cifar10_c.LOOKS[m] for m in cifar10_c.BUDGET_GROUP],
    "cifar10-c, near": [cifar10_c.LOOKS[m] for m in cifar10_c.NEAR_GROUP],
    "cifar10-c, families": [cifar10_c.LOOKS.get(m) for m in cifar10_c.FAMILIES],
    "rotated-mnist, the paper's": [rotated_mnist.LOOKS[m] for m in rotated_mnist.PAPER],
    "rotated-mnist, matched": [rotated_mnist.LOOKS[m] for m in rotated_mnist.MATCHED],
    "rotated-mnist, network": [rotated_mnist.LOOKS[m] for m in rotated_mnist.AROUND_NETWORK],
    "rotated-mnist, posterior": [rotated_mnist.LOOKS[m] for m in rotated_mnist.AROUND_BBP],
    "naive CNML": list(LOOKS.values()),
}


@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("field", ["label", "colour", "marker"])
def test_no_two_methods_of_a_figure_look_the_same(group, field):
    found = [getattr(look, field) for look in GROUPS[group]]
    assert len(set(found)) == len(found)
