"""The scalar solver against the paper's iteration, against K² Newton steps, and its properties."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import acnml
from acnml import Classifier
from acnml.posteriors import Diagonal
from acnml.solve.isotropic import solve_isotropic
from cases import normal, seeded
from scalar import solve_diagonal, solve_exactly

ALPHAS = [1e-6, 1e-3, 0.1, 1.0, 10.0, 100.0, 1e4, 1e6]


def logits_of(kind: str, classes: int, inputs: int = 4) -> torch.Tensor:
    """Logits that are flat, ordinary, confident, or far apart."""
    size = {"flat": 0.0, "ordinary": 2.0, "confident": 8.0, "far apart": 40.0}[kind]
    return size * normal(inputs, classes, seed=classes)


each_kind = pytest.mark.parametrize("kind", ["flat", "ordinary", "confident", "far apart"])


@pytest.mark.parametrize(("classes", "alpha"), [(2, 1e-3), (3, 3.0), (7, 0.1)])
def test_it_is_where_the_papers_iteration_converges_to(classes, alpha):
    """A posterior of independent weights with one variance for all classes has V = vI."""
    model = seeded(lambda: nn.Linear(5, classes, bias=False))
    x, weight = normal(3, 5), model.weight.detach()
    posterior = Diagonal({"weight": weight}, {"weight": alpha * torch.ones_like(weight)})
    literal = acnml.solve.Reference(steps=4000, step_size=0.02)(Classifier(model), posterior, x)
    found = solve_diagonal(x @ weight.T, alpha * (x**2).sum(-1, keepdim=True).expand(-1, classes))
    torch.testing.assert_close(found, literal.log_lik, rtol=0, atol=1e-9)


@each_kind
@pytest.mark.parametrize("alpha", ALPHAS[::2])
@pytest.mark.parametrize("classes", [2, 10, 40])
def test_newton_steps_leave_no_residual(classes, alpha, kind):
    """z_y = z + v(e_y - softmax z_y), solved for all labels at once."""
    logits, v = logits_of(kind, classes), alpha * normal(4, seed=1).exp()
    log_lik = solve_diagonal(logits, v[:, None].expand_as(logits))
    own = log_lik.exp()
    # L follows from the label's own equation, and the other probabilities from L.
    L = logits + v[:, None] * (1 - own) - log_lik
    others = torch.full_like(own, 0.0)
    for y in range(classes):
        p = _shares(logits - L[:, y : y + 1], v)
        others[:, y] = p.sum(-1) - p[:, y]
    rounding = 1e-15 * v[:, None]  # of L
    assert ((own + others - 1).abs() <= 1e-9 + rounding).all()


def _shares(a: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Solve log g + v g = a by bisection on log g."""
    low, high = torch.minimum(a - v[:, None], -a.abs() - 50), a.clamp(max=700.0)
    for _ in range(80):
        middle = (low + high) / 2
        above = middle + v[:, None] * middle.exp() > a
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return ((low + high) / 2).exp()


@each_kind
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("classes", [2, 3, 10, 60])
def test_the_curve_gives_newtons_answers(classes, alpha, kind):
    inputs = 4 if classes < 100 else 1  # Newton's K² equations take long
    logits, v = logits_of(kind, classes, inputs), alpha * normal(inputs, seed=1).exp()
    exact = solve_diagonal(logits, v[:, None].expand_as(logits))
    torch.testing.assert_close(solve_exactly(logits, v), exact, rtol=0, atol=1e-9)
    single = solve_isotropic(logits.float(), v.float()).double()
    # Single precision holds logits of a hundred to 1e-5.
    assert ((single - exact).abs() <= stated(v) + 2e-7 * logits.abs().amax()).all()


def stated(v: torch.Tensor) -> torch.Tensor:
    """The accuracy that `solve_isotropic` states (B, 1), for spreads (B,)."""
    return torch.where(v <= 20, 1e-5, 4e-3)[:, None].double()


@each_kind
@pytest.mark.parametrize("alpha", [1e-6, 1e-2, 1.0, 20.0, 1e3, 1e6])
@pytest.mark.parametrize("classes", [300, 10_000])
def test_many_classes(classes, alpha, kind):
    """The labels' own equations hold, and the curve has their solutions."""
    logits, v = logits_of(kind, classes, 1), torch.tensor([alpha]).double()
    chosen = torch.cat([logits[0].topk(3).indices, torch.tensor([0, classes // 2])])
    exact = solve_exactly(logits, v, chosen)
    p, own = exact[0].exp(), logits[0, chosen]
    L = own + v * (1 - p) - exact[0]
    shares = _shares(logits - L[:, None], v.expand(len(chosen)))
    total = shares.sum(-1) - shares[range(len(chosen)), chosen] + p
    assert ((total - 1).abs() <= 1e-9 + 1e-15 * v).all()
    single = solve_isotropic(logits.float(), v.float()).double()[:, chosen]
    assert ((single - exact).abs() <= stated(v) + 2e-7 * logits.abs().amax()).all()


@pytest.mark.parametrize("classes", [2, 10, 500])
def test_more_spread_is_never_surer(classes):
    logits = 4 * normal(6, classes).float()
    spreads = torch.logspace(-4, 5, 40)
    top = []
    for spread in spreads:
        log_lik = solve_isotropic(logits, spread.expand(6))
        stated = 1e-4 if spread <= 100 else 3e-3
        assert (log_lik >= torch.log_softmax(logits, -1) - stated).all()
        regret = torch.logsumexp(log_lik, -1)
        assert ((regret >= -stated) & (regret <= math.log(classes) + stated)).all()
        top.append(torch.softmax(log_lik, -1).amax(-1))
    falls = torch.stack(top).diff(dim=0)
    assert (falls <= 3e-3).all()
    assert (top[0] - top[-1] > 0.05).any()


@pytest.mark.parametrize("rows", [1, 3, 200])
def test_inputs_do_not_depend_on_each_other(rows):
    logits, v = 3 * normal(rows, 40).float(), normal(rows, seed=5).exp().float()
    together = solve_isotropic(logits, v)
    for i in range(min(rows, 5)):
        alone = solve_isotropic(logits[i : i + 1], v[i : i + 1])
        torch.testing.assert_close(together[i : i + 1], alone, rtol=0, atol=2e-6)


def test_labels_keep_their_order_and_equal_labels_are_equal():
    logits = torch.tensor([[3.0, 1.0, 1.0, -2.0, -30.0, 3.0]])
    for v in (1e-5, 0.3, 8.0, 1e3):
        found = solve_isotropic(logits, torch.tensor([v]))[0]
        assert found[0] == found[5]
        assert found[1] == found[2]
        assert (found[[0, 1, 3, 4]].diff() <= 1e-6).all()
