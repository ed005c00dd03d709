"""Heads: what the logits of a network stand for, and how they become rows.

The core knows rows only: logits (R, C), a score (R,) and a class (R,). A head lays the outputs of a
network out as rows, and the answers for rows in the layout of its outputs.

- One class per *place*. A place is an input with logits (B, K); a pixel or another position of a
  map (B, K, H, W); or a token (B, T, K). Each place is a row of K logits.
- Several labels per place, each present or absent. Each label is a row of its own with the logits
  [0, z] of two classes: absent and present.

A network with one logit for two classes is the first kind with the logits [0, z].

Labels decide which head it is, where their shape can (`find_head`). Places whose label is -100, and
padding, do not count.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, final

import torch
from torch import Tensor

from acnml._util.batches import Inputs

Task: TypeAlias = Literal["multilabel", "dense", "tokens"]
TASKS = ("multilabel", "dense", "tokens")

# The label of places that do not count, as in torch and transformers.
IGNORED = -100

# Places of an input that are drawn for a fit, if it has more: those of one input are much alike.
MOST_PLACES = 512


class Places(NamedTuple):
    """What was read at some places of a batch."""

    logits: Tensor  # (P, K)
    features: Tensor  # (P, q)
    labels: Tensor | None  # (P,) classes, or (P, K) labels that are 0 or 1
    inputs: Tensor  # (P,) index of the input that a place belongs to


@dataclass(frozen=True)
class Head(ABC):
    """A layout of logits and labels.

    Args:
        axis: the dimension of the logits that counts classes or labels: 1 or -1.
        positions: the number of dimensions of the logits that count positions.
        is_single: whether one logit z stands for two classes, as [0, z].
        ignored: the label of places that do not count.
    """

    axis: int = 1
    positions: int = 0
    is_single: bool = False
    ignored: int = IGNORED

    @property
    def is_plain(self) -> bool:
        """Whether there is one class for every input, and a logit for every class."""
        return self == Softmax(ignored=self.ignored)

    def require_one_row(self, what: str) -> None:
        """Raise an error unless every input has one row: those of one input are alike."""
        if self.positions or isinstance(self, Sigmoid):
            raise ValueError(
                f"{what} needs one class for every input, but this network answers for several "
                "positions or labels of an input, which depend on each other: reduce them to one "
                "outcome of your own, and use the functions of acnml.decisions"
            )

    @abstractmethod
    def rows(self, flat: Tensor) -> Tensor:
        """Return the rows (R, C) of logits (P, K)."""

    @abstractmethod
    def per_row(self, values: Tensor, size: int) -> Tensor:
        """Return values (P,) of places for all their rows (R,); the head has `size` logits."""

    @abstractmethod
    def row_labels(self, labels: Tensor) -> Tensor:
        """Return the class of every row (R,) from the labels of places."""

    @abstractmethod
    def groups(self, labels: Tensor, count: int) -> Tensor:
        """Return the groups of `count` places (P,), with whose mean features are compared."""

    @abstractmethod
    def group_count(self, size: int) -> int:
        """Return the number of these groups for a head with `size` logits."""

    @abstractmethod
    def guessed(self, flat: Tensor) -> Tensor:
        """Return labels of places from their logits (P, K), in place of known ones."""

    @abstractmethod
    def per_place(self, rows: Tensor, size: int) -> Tensor:
        """Return what rows say of their places: (R,) -> (P, …), and (R, C) -> (P, K)."""

    def flat(self, values: Tensor) -> Tensor:
        """Return logits or features (P, q) of all places."""
        if not self.positions:
            return values
        return values.movedim(self.axis, -1).flatten(0, -2).contiguous()

    def expanded(self, logits: Tensor) -> Tensor:
        """Return logits with a dimension for classes, two of them if one logit stands for both."""
        if not self.is_single:
            return logits
        if logits.ndim == self.positions + 1:
            logits = logits.unsqueeze(self.axis)
        return torch.cat([torch.zeros_like(logits), logits], dim=self.axis)

    def laid_out(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Return values (P,) or (P, K) of places in the layout of (expanded) logits."""
        places = self._places(shape)
        if values.ndim == 1:
            return values.reshape(places)
        return values.reshape(*places, -1).movedim(-1, self.axis)

    def on_positions(self, score: Tensor, like: torch.Size, shape: torch.Size) -> Tensor:
        """Return scores (P,) of features with a shape for all positions of logits: the nearest.

        Args:
            score: at the positions of the features.
            like: the shape of the features.
            shape: the shape of the logits.
        """
        own, wanted = self._places(like), self._places(shape)
        if own == wanted:
            return score
        if len(own) != len(wanted) or own[0] != wanted[0]:
            raise ValueError(
                f"features of shape {tuple(like)} do not belong to logits of shape {tuple(shape)}"
            )
        grid = score.reshape(own)
        for dim, (have, want) in enumerate(zip(own[1:], wanted[1:], strict=True), start=1):
            grid = grid.index_select(dim, _nearest(have, want, score.device))
        return grid.flatten()

    def read(
        self,
        logits: Tensor,
        features: Tensor,
        labels: Tensor | None,
        mask: Tensor | None = None,
        generator: torch.Generator | None = None,
    ) -> Places:
        """Return what a fit needs of a batch: places that count, at most so many of an input.

        Args:
            logits: as the network returns them.
            features: in the same layout; they may have fewer positions.
            labels: of the batch, or None.
            mask: which places (B, T) are no padding.
            generator: draws `MOST_PLACES` of an input with more; without one, all are taken.
        """
        logits = self.expanded(logits)
        places = self._places(logits.shape)
        flat = self.flat(logits)
        known = None if labels is None else self._flat_labels(labels, logits.shape)
        counts = torch.ones(places, dtype=torch.bool, device=logits.device).reshape(len(logits), -1)
        if mask is not None:
            counts &= mask.reshape(counts.shape).bool()
        if known is not None:
            counts &= (known.reshape(*counts.shape, -1) != self.ignored).all(-1).to(counts.device)
        chosen = _drawn(counts, generator)
        at, inputs = chosen, chosen // counts.shape[1]
        if self.positions:
            numbers = torch.arange(self._places(features.shape).numel(), device=logits.device)
            at = self.on_positions(numbers, features.shape, logits.shape)[chosen]
        own = None if known is None else known[chosen.to(known.device)]
        return Places(flat[chosen], self.flat(features)[at], own, inputs)

    def _flat_labels(self, labels: Tensor, shape: torch.Size) -> Tensor:
        """Return the labels of all places (P,)."""
        places = self._places(shape)
        if self.is_single and labels.shape == (shape[0], 1, *shape[2:]):
            labels = labels.squeeze(1)
        if labels.shape != places:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, expected {tuple(places)} for logits of "
                f"shape {tuple(shape)}: pass one class index per input"
                + (" and position" if self.positions else "")
            )
        return labels.flatten()

    def _places(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the places of logits or features."""
        return torch.Size(n for dim, n in enumerate(shape) if dim != self.axis % len(shape))


@final
@dataclass(frozen=True)
class Softmax(Head):
    """One class per place: a place is a row."""

    def rows(self, flat: Tensor) -> Tensor:
        """Return the logits (P, K) as they are."""
        return flat

    def per_row(self, values: Tensor, size: int) -> Tensor:
        """Return the values (P,) as they are."""
        return values

    def row_labels(self, labels: Tensor) -> Tensor:
        """Return the labels (P,) as they are."""
        return labels

    def groups(self, labels: Tensor, count: int) -> Tensor:
        """Return the classes."""
        return labels.flatten()

    def group_count(self, size: int) -> int:
        """Return the number of classes."""
        return size

    def guessed(self, flat: Tensor) -> Tensor:
        """Return the likeliest classes (P,)."""
        return flat.argmax(-1)

    def per_place(self, rows: Tensor, size: int) -> Tensor:
        """Return what rows say as it is."""
        return rows


@final
@dataclass(frozen=True)
class Sigmoid(Head):
    """Several labels per place, each present or absent: a label of a place is a row.

    Features are compared with one mean of all data: an input with several labels is at the mean of
    none of them.
    """

    def rows(self, flat: Tensor) -> Tensor:
        """Return the logits [0, z] of absence and presence (P · K, 2)."""
        return torch.stack([torch.zeros_like(flat), flat], dim=-1).flatten(0, 1)

    def per_row(self, values: Tensor, size: int) -> Tensor:
        """Return the value of a place for each of its labels (P · K,)."""
        return values.repeat_interleave(size)

    def row_labels(self, labels: Tensor) -> Tensor:
        """Return whether each label is present (P · K,)."""
        return labels.flatten()

    def groups(self, labels: Tensor, count: int) -> Tensor:
        """Return one group of all places."""
        return torch.zeros(count, dtype=torch.int64, device="cpu")

    def group_count(self, size: int) -> int:
        """Return 1."""
        return 1

    def guessed(self, flat: Tensor) -> Tensor:
        """Return which labels (P, K) are more probable than not."""
        return (flat > 0).long()

    def per_place(self, rows: Tensor, size: int) -> Tensor:
        """Return what rows say, of two classes that of presence (P, K)."""
        present = rows if rows.ndim == 1 else rows[:, 1]
        return present.reshape(-1, size)

    def _flat_labels(self, labels: Tensor, shape: torch.Size) -> Tensor:
        if labels.shape != shape:
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, expected {tuple(shape)} as the logits: "
                "pass 1 for every label that is present and 0 for the others"
            )
        return self.flat(labels)


def find_head(
    shape: torch.Size, labels: Tensor, task: Task | None = None, ignored: int = IGNORED
) -> Head:
    """Return the head of a network from the shape of its logits and from labels of a batch.

    - labels (B,) of classes: `Softmax`; with a single logit, 0 and 1
    - labels (B, H, W) for logits (B, K, H, W), and (B, T) for (B, T, K): `Softmax` at positions
    - labels that are 0 or 1, in the shape of the logits, with several or none in some row:
      `Sigmoid`

    Args:
        shape: of the logits of a batch.
        labels: of the same batch.
        task: "multilabel" for `Sigmoid`; "dense" if dimension 1 counts classes, and "tokens" if the
            last one does, where the shape does not tell.
        ignored: the label of places that do not count.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}, got {task!r}")
    if len(shape) == 1:
        shape = torch.Size([*shape, 1])
    positions = len(shape) - 2
    if task == "multilabel" or (task is None and _is_multi_hot(shape, labels)):
        return Sigmoid(positions=positions, ignored=ignored)
    axis = _axis(shape, labels, task) if positions else 1
    return Softmax(axis, positions, shape[axis] == 1, ignored)


def as_labels(labels: Tensor) -> Tensor:
    """Return labels as int64; floating point ones must be 0 and 1, as for a binary loss."""
    if labels.dtype == torch.bool or not labels.is_floating_point():
        return labels.long()
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise TypeError(
            f"labels must be a tensor of integers, got {labels.dtype}: pass class indices, for "
            "example labels.long()"
        )
    return labels.long()


def _is_multi_hot(shape: torch.Size, labels: Tensor) -> bool:
    """Whether labels can only be those of several labels per place."""
    if labels.shape != shape or shape[1] == 1 or len(shape) == 3:
        return False
    if not bool(((labels == 0) | (labels == 1)).all()):
        return False
    if bool((labels.sum(1) == 1).all()):
        raise ValueError(
            "every label has exactly one 1, so they may be classes or several labels per input: "
            'pass y.argmax(1) of one-hot labels, or task="multilabel"'
        )
    return True


def _axis(shape: torch.Size, labels: Tensor, task: Task | None) -> int:
    """Return which dimension of logits with positions counts the classes."""
    if task in ("dense", "tokens"):
        return 1 if task == "dense" else -1
    fits = {1: (shape[0], *shape[2:]), -1: tuple(shape[:-1])}
    found = [axis for axis, places in fits.items() if tuple(labels.shape) == places]
    if labels.shape == shape and shape[1] == 1:
        found = [1]
    if len(found) == 1:
        return found[0]
    if len(found) == 2:
        raise ValueError(
            f'logits of shape {shape} may be maps or tokens: pass task="dense" if dimension 1 '
            'counts the classes, or task="tokens" if the last one does'
        )
    raise ValueError(
        f"labels of shape {tuple(labels.shape)} do not belong to logits of shape {tuple(shape)}: "
        f"pass one class per position, {fits[1]} for maps or {fits[-1]} for tokens; if the labels "
        "have more positions, let Classifier(model, get_logits=...) resize the logits"
    )


def _drawn(counts: Tensor, generator: torch.Generator | None) -> Tensor:
    """Return the indices of places that count (B, n), at most so many of each input."""
    if generator is not None and counts.shape[1] > MOST_PLACES:
        keys = torch.rand(counts.shape, generator=generator, device="cpu").to(counts.device)
        best = keys.masked_fill(~counts, -1.0).topk(MOST_PLACES, dim=1).indices
        counts = counts & torch.zeros_like(counts).scatter(1, best, True)
    return counts.flatten().nonzero().squeeze(1)


def _nearest(have: int, want: int, device: torch.device) -> Tensor:
    """Return for each of `want` positions along a line the nearest of `have`."""
    middles = (torch.arange(want, device=device) + 0.5) * have / want
    return middles.long().clamp(max=have - 1)


def padding(head: Head, x: Inputs, logits: Tensor) -> Tensor | None:
    """Return which tokens (B, T) of a batch are no padding; None if it does not say."""
    if head.positions != 1 or not isinstance(x, Mapping):
        return None
    mask = x.get("attention_mask")
    fits = mask is not None and mask.shape == head._places(logits.shape)
    return mask.bool() if mask is not None and fits else None
