"""Reliability before and after.

A small network classifies digits that are turned by 30°. Below the diagonal it is overconfident.
The temperature costs as much on upright validation digits as closed-form NML does.
"""

import matplotlib.pyplot as plt
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import nn

import acnml
from acnml import plots

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
turned = rotate(x[test].view(-1, 8, 8), 30, axes=(1, 2), reshape=False, order=1)
turned = torch.tensor(turned).flatten(1)
logits = model(turned).detach()
warm = logits / calibrated.calibrator.temperature_of_equal_price

_, axes = plt.subplots(1, 3, figsize=(9, 3), layout="constrained", sharey=True)
plots.reliability(logits.log_softmax(-1), y[test], label="network", ax=axes[0])
plots.reliability(warm.log_softmax(-1), y[test], label="temperature", ax=axes[1])
plots.reliability(calibrated.log_probs(turned), y[test], label="closed-form NML", ax=axes[2])
