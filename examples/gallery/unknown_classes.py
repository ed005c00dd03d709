"""Unknown classes.

The network has learnt the digits 0 to 7. It has to name one of them for an 8 or a 9, too. The
regret says which inputs several labels could explain; nothing was trained or chosen on the
unknown digits.
"""

import torch
from sklearn.datasets import load_digits
from torch import nn

import acnml
from acnml import plots

images, labels = load_digits(return_X_y=True)
x, y = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
known, unknown = (y < 8).nonzero().flatten(), x[y >= 8]
torch.manual_seed(0)
train, validation, test = known[torch.randperm(len(known))].split([700, 400, len(known) - 1100])
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 8))
optimiser = torch.optim.Adam(model.parameters(), lr=0.003)
for batch in train.repeat(40).split(50):
    optimiser.zero_grad()
    nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
    optimiser.step()

calibrated = acnml.calibrate(
    model, (x[train], y[train]), (x[validation], y[validation]), price=0.02
)
plots.regret(calibrated.regret(x[test]), calibrated.regret(unknown), names=("0 to 7", "8 and 9"))
