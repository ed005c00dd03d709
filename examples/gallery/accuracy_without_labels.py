"""Accuracy without labels.

Calibrated probabilities say how often their predictions are right. The estimate needs no labels
of the new data; the interval holds chance and the calibration error on the validation data.
"""

import matplotlib.pyplot as plt
import torch
from scipy.ndimage import rotate
from sklearn.datasets import load_digits
from torch import nn

import acnml

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
_, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for angle in range(0, 61, 10):
    square = rotate(x[test].view(-1, 8, 8), angle, axes=(1, 2), reshape=False, order=1)
    inputs = torch.tensor(square).flatten(1)
    found = calibrated.expected_accuracy(inputs)
    known = (calibrated.predict(inputs) == y[test]).float().mean()
    ax.plot([angle, angle], [found.low, found.high], color="C0", lw=3)
    ax.plot(angle, found.accuracy, "o", color="C0", label="estimated" if angle == 0 else None)
    ax.plot(angle, known, "x", color="black", label="with labels" if angle == 0 else None)
ax.set(xlabel="rotation in degrees", ylabel="accuracy", ylim=(0, 1.02))
ax.legend()
