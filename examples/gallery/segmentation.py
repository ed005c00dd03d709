"""Regret map of a segmentation.

A pixel is a row of logits and features. Here two textures are segmented by a linear head on local
features; the disk in the middle has a texture that the training images lack. The head must call
it one of the two, and the regret shows it.
"""

import matplotlib.pyplot as plt
import numpy as np
from scipy.ndimage import gaussian_filter, uniform_filter
from sklearn.linear_model import LogisticRegression

import acnml

rng = np.random.default_rng(0)
side = 64
column, row = np.meshgrid(np.arange(side), np.arange(side))


def image(disk=False):
    mask = column > rng.integers(20, 44)
    fine, coarse = rng.normal(size=(2, side, side))
    picture = np.where(mask, 4 * gaussian_filter(coarse, 2), 0.5 * fine)
    if disk:  # stripes
        picture = np.where(np.hypot(row - 32, column - 32) < 12, np.sin(1.5 * row), picture)
    moments = [uniform_filter(f, 7) for f in (picture, picture**2, np.abs(np.gradient(picture)[0]))]
    return picture, np.stack(moments, -1).reshape(-1, 3), mask.reshape(-1).astype(int)


(_, train, y), (_, held_out, y_held_out) = image(), image()
head = LogisticRegression(C=100).fit(train, y)


def logits(features):
    return np.log(head.predict_proba(features) + 1e-12)


calibrator = acnml.fit_calibrator((train, y), (logits(held_out), held_out, y_held_out), price=0.02)
picture, features, _ = image(disk=True)
answer = calibrator(logits(features), features)
maps = {"image": picture, "predicted": answer.label, "regret": answer.regret}
_, axes = plt.subplots(1, 3, figsize=(9, 3.1), layout="constrained")
for ax, (name, values) in zip(axes, maps.items(), strict=True):
    ax.imshow(np.reshape(values, (side, side)), cmap="magma" if name == "regret" else "gray")
    ax.set(title=name, xticks=[], yticks=[])
