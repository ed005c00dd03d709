"""Data sets: catalogue, folder, downloads and loading. `Labelled` is what all of them return."""

from acnml.cli._shared.digits import Labelled, shuffled

__all__ = ["Labelled", "shuffled"]
