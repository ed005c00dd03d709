"""Conformal sets under shift.

Sets of labels that hold the right one with 90 %: guaranteed on data like the calibration data,
not on turned digits. With calibrated probabilities the sets grow under the shift, and lose less
coverage.
"""

import matplotlib.pyplot as plt
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import nn

import acnml
from acnml import conformal
from acnml.conformal import SetScore

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
torch.manual_seed(0)
order = torch.randperm(len(x))
train, validation, test = order[:800], order[800:1300], order[1300:]
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
for batch in train.repeat(40).split(50):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimiser.step()
data = (x[train], y[train]), (x[validation], y[validation])

calibrated = acnml.calibrate(model, *data, price=0.02)
one, other = test[:250], test[250:]
methods = {"network": acnml.Map(acnml.Classifier(model)), "closed-form NML": calibrated.log_probs}
_, axes = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for name, method in methods.items():
    fitted = conformal.fit(method(x[one]), y[one], coverage=0.9, score=SetScore.APS)
    found = []
    for angle in range(0, 61, 10):
        turned = rotate(x[other].view(-1, 8, 8), angle, axes=(1, 2), reshape=False, order=1)
        sets = fitted.sets(method(torch.tensor(turned).flatten(1)))
        found.append((conformal.coverage_of(sets, y[other]), conformal.mean_size(sets)))
    for ax, values in zip(axes, zip(*found, strict=True), strict=True):
        ax.plot(range(0, 61, 10), values, marker="o", label=name)
axes[0].set(xlabel="rotation in degrees", ylabel="coverage", ylim=(0, 1.02))
axes[1].set(xlabel="rotation in degrees", ylabel="labels in a set")
axes[0].legend()
