"""CNML in two dimensions.

Logistic regression on 24 points. CNML fits it again for every label of every query, and is sure
only where one label cannot be explained. ACNML replaces the points by a Gaussian around the
trained weights, and needs no fit.
"""

import matplotlib.pyplot as plt
import torch

from acnml import Acnml, exact

generator = torch.Generator().manual_seed(1)
labels = torch.arange(24) % 2
spread = torch.randn(24, 2, generator=generator, dtype=torch.float64)
points = spread + 2 * (2 * labels - 1).unsqueeze(1) * torch.tensor([1.0, 0.5])
problem = exact.LogisticProblem(exact.with_intercept(points), labels, 0.1)

axis = torch.linspace(-8, 8, 41, dtype=torch.float64)
grid = torch.cartesian_prod(axis, axis)
queries = exact.with_intercept(grid)
laplace = exact.laplace(problem)
found = {
    "trained model": laplace.fit.log_probs(queries),
    "ACNML": Acnml(laplace.classifier, laplace.posterior)(queries),
    "CNML": exact.cnml(problem, queries).log_probs,
}
_, axes = plt.subplots(1, 3, figsize=(9, 3.1), layout="constrained")
for ax, (name, log_probs) in zip(axes, found.items(), strict=True):
    picture = log_probs[:, 1].exp().view(41, 41).T
    ax.imshow(picture, extent=(-8, 8, -8, 8), origin="lower", cmap="RdBu_r", vmin=0, vmax=1)
    ax.scatter(*points.T, c=labels, cmap="RdBu_r", edgecolors="black", s=18)
    ax.set(title=name, xticks=[], yticks=[])
