"""A monitoring report.

Ten windows of answers without labels. From the sixth on, the digits slowly turn. The evidence of
a change exceeds its threshold only if something has changed, with a false alarm in at most 1 % of
all runs, however long they are.
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
monitor = calibrated.monitor(level=0.01)
evidence, expected = [], []
for window in range(10):
    some = x[test[torch.randperm(len(test))[:48]]].view(-1, 8, 8)
    turned = rotate(some, 8 * max(0, window - 4), axes=(1, 2), reshape=False, order=1)
    report = monitor.update(calibrated(torch.tensor(turned).flatten(1)))
    evidence.append(report.evidence)
    expected.append(report.accuracy.accuracy)

_, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
left.plot(range(1, 11), expected, marker="o")
left.set(xlabel="window", ylabel="expected accuracy", ylim=(0, 1.02))
right.plot(range(1, 11), evidence, marker="o")
right.axhline(2, color="0.5", ls="--", label="alarm")
right.set(xlabel="window", ylabel="evidence of a change, powers of ten")
right.legend()
