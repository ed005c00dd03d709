"""A thousand classes.

Features and logits of a thousand classes, made up: no torch model is needed, and the number of
classes costs little. Features that lie between the classes, at a growing distance from the
training data, get a lower confidence.
"""

import matplotlib.pyplot as plt
import torch

import acnml

torch.manual_seed(0)
classes, size, count = 1000, 32, 17_200
centres = torch.randn(classes, size)
labels = torch.arange(count) % classes
features = centres[labels] + 0.5 * torch.randn(count, size)
noise = 3 * torch.randn(classes, size)  # of the weights: a classifier that makes mistakes
logits = features @ (2 * centres + noise).T / size**0.5

half, test = slice(0, 15_000), slice(15_000, 17_000)
calibrator = acnml.fit_calibrator(
    (features[half], labels[half]), (logits[test], features[test], labels[test]), price=0.01
)
distances = torch.linspace(0, 3, 13)
last = slice(17_000, count)
confidence = [
    calibrator.probs(logits[last], features[last] + d * torch.randn(200, size)).amax(-1).mean()
    for d in distances
]
_, ax = plt.subplots(figsize=(6, 3.5), layout="constrained")
ax.axhline(logits[last].softmax(-1).amax(-1).mean(), color="C1", label="network")
ax.plot(distances, confidence, marker="o", label="closed-form NML")
ax.set(xlabel="noise that is added to the features", ylabel="mean confidence", ylim=(0, 1))
ax.legend()
