"""Data sets: catalogue, folder, downloads and loading. `Labelled` is what all of them return."""

from studies.data.labelled import Labelled, shuffled, split

__all__ = ["Labelled", "shuffled", "split"]
