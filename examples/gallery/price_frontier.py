"""What caution costs.

Every price buys some caution: the mean confidence on validation data falls, and their negative
log-likelihood (NLL) rises. The plot shows all methods and the price that was asked for.
"""

import torch
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
print(calibrated)
plots.price_frontier(calibrated)
