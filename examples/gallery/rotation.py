"""Confidence over rotation.

The accuracy falls as digits are turned. The confidence of the network hardly does, that of a
temperature of equal price a little. Closed-form NML knows from the features that turned digits are
unlike the training data.
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
warmth = calibrated.calibrator.temperature_of_equal_price
curves = {"network": [], "temperature of equal price": [], "closed-form NML": [], "accuracy": []}
for angle in range(0, 181, 15):
    square = rotate(x[test].view(-1, 8, 8), angle, axes=(1, 2), reshape=False, order=1)
    inputs = torch.tensor(square).flatten(1)
    logits = model(inputs).detach()
    found = [logits.softmax(-1), (logits / warmth).softmax(-1), calibrated.probs(inputs)]
    values = [p.amax(-1).mean() for p in found] + [(logits.argmax(-1) == y[test]).float().mean()]
    for curve, value in zip(curves.values(), values, strict=True):
        curve.append(float(value))

_, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
for name, curve in curves.items():
    ax.plot(range(0, 181, 15), curve, label=name, color="0.5" if name == "accuracy" else None)
ax.set(xlabel="rotation in degrees", ylabel="mean confidence, accuracy", ylim=(0, 1.02))
ax.legend()
