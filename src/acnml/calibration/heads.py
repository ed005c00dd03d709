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

from collections.abc import Mapping, Sequence
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


class Cases(NamedTuple):
    """What was read at some places of a batch."""

    logits: Tensor  # (P, K)
    features: Tensor  # (P, q)
    labels: Tensor | None  # (P,) classes, or (P, K) labels that are 0 or 1
    inputs: Tensor  # (P,) index of the input that a place belongs to


@final
@dataclass(frozen=True)
class Head:
    """A layout of logits and labels.

    Args:
        axis: the dimension of the logits that counts classes or labels: 1 or -1.
        positions: the number of dimensions of the logits that count positions.
        is_single: whether one logit z stands for two classes, as [0, z].
        is_multilabel: whether every logit is one of several labels, each present or absent.
        ignored: the label of places that do not count.
    """

    axis: int = 1
    positions: int = 0
    is_single: bool = False
    is_multilabel: bool = False
    ignored: int = IGNORED

    @property
    def is_plain(self) -> bool:
        """Whether there is one class for every input, and a logit for every class."""
        return not (self.positions or self.is_single or self.is_multilabel)

    def require_one_row(self, what: str) -> None:
        """Raise an error unless every input has one row: those of one input are alike."""
        if self.positions or self.is_multilabel:
            raise ValueError(
                f"{what} needs one class for every input, but this network answers for several "
                "positions or labels of an input, which depend on each other: reduce them to one "
                "outcome of your own, and use the functions of acnml.decisions"
            )

    def rows(self, flat: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        """Return the rows (R, C) of logits (P, K), and values (P,) of places for all their rows."""
        if not self.is_multilabel:
            return flat, *values
        logits = torch.stack([torch.zeros_like(flat), flat], dim=-1).flatten(0, 1)
        return logits, *(each.repeat_interleave(flat.shape[1]) for each in values)

    def per_place(self, rows: Sequence[Tensor], size: int) -> Sequence[Tensor]:
        """Return what rows say of their places: (R,) -> (P, …), and (R, C) -> (P, K).

        Of two classes, several labels have that of presence.
        """
        if not self.is_multilabel:
            return rows
        return [(own if own.ndim == 1 else own[:, 1]).reshape(-1, size) for own in rows]

    def group_count(self, size: int) -> int:
        """Return the number of groups with whose mean features an input is compared.

        They are the classes. An input with several labels is at the mean of none of them, and is
        compared with the mean of all data.
        """
        return 1 if self.is_multilabel else size

    def groups(self, labels: Tensor, count: int) -> Tensor:
        """Return the groups (P,) of so many places with labels."""
        if self.is_multilabel:
            return torch.zeros(count, dtype=torch.int64, device="cpu")
        return labels.flatten()

    def guessed(self, flat: Tensor) -> Tensor:
        """Return labels of places from their logits (P, K), in place of known ones."""
        return (flat > 0).long() if self.is_multilabel else flat.argmax(-1)

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
    ) -> Cases:
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
        return Cases(flat[chosen], self.flat(features)[at], own, inputs)

    def _flat_labels(self, labels: Tensor, shape: torch.Size) -> Tensor:
        """Return the labels (P,) or (P, K) of all places of logits with this shape."""
        if self.is_single and labels.shape == (shape[0], 1, *shape[2:]):
            labels = labels.squeeze(1)
        expected = shape if self.is_multilabel else self._places(shape)
        if labels.shape != expected:
            remedy = "one class index per input" + (" and position" if self.positions else "")
            if self.is_multilabel:
                remedy = "1 for every label that is present and 0 for the others"
            raise ValueError(
                f"labels have shape {tuple(labels.shape)}, expected {tuple(expected)} for logits "
                f"of shape {tuple(shape)}: pass {remedy}"
            )
        return self.flat(labels) if self.is_multilabel else labels.flatten()

    def _places(self, shape: torch.Size) -> torch.Size:
        """Return the shape of the places of logits or features."""
        return torch.Size(n for dim, n in enumerate(shape) if dim != self.axis % len(shape))


def find_head(
    shape: torch.Size, labels: Tensor, task: Task | None = None, ignored: int = IGNORED
) -> Head:
    """Return the head of a network from the shape of its logits and from labels of a batch.

    - labels (B,): one class per input; with a single logit, 0 and 1
    - labels (B, H, W) for logits (B, K, H, W), and (B, T) for (B, T, K): one class per position
    - labels that are 0 or 1, in the shape of the logits, with several or none in some row: several
      labels

    Args:
        shape: of the logits of a batch.
        labels: of the same batch.
        task: "multilabel" for several labels; "dense" if dimension 1 counts classes, and "tokens"
            if the last one does, where the shape does not tell.
        ignored: the label of places that do not count.
    """
    if task is not None and task not in TASKS:
        raise ValueError(f"task must be one of {', '.join(map(repr, TASKS))}, got {task!r}")
    if len(shape) == 1:
        shape = torch.Size([*shape, 1])
    positions = len(shape) - 2
    if task == "multilabel" or (task is None and _is_multi_hot(shape, labels)):
        return Head(positions=positions, is_multilabel=True, ignored=ignored)
    axis = _axis(shape, labels, task) if positions else 1
    return Head(axis, positions, shape[axis] == 1, ignored=ignored)


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
