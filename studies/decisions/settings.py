"""The settings of the study."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from studies.evidence.settings import NETWORKS, TEXT, EvidenceStudy

DIGITS, IMAGES = "digits", "resnet20"
ELEC, WEATHER, TURNING, CORRUPTED = "elec", "weather", "turning digits", "corrupted photographs"


@final
@dataclass(frozen=True)
class DecisionsStudy:
    """The settings.

    Args:
        networks: `DIGITS`, a small network, and `IMAGES`, which is one of the study `evidence`.
        others: more networks of the study `evidence`, for the accuracy without labels alone.
        streams: data in the order of time.
        risks: largest tolerated error rates.
        confidence: with which they hold.
        resamples: of labelled data, for the share of failed guarantees.
        labelled: examples in a resample.
        level: largest probability of a false alarm.
        quiet_streams: simulated streams without a change.
        window: inputs of a window.
        corruptions: of photographs, at severities 3 and 5.
        seeds: of networks for digits.
    """

    networks: tuple[str, ...] = (DIGITS, IMAGES)
    others: tuple[str, ...] = tuple(name for name in NETWORKS if name not in (IMAGES, TEXT))
    streams: tuple[str, ...] = (ELEC, WEATHER, TURNING, CORRUPTED)
    risks: tuple[float, ...] = (0.01, 0.02, 0.05)
    confidence: float = 0.95
    resamples: int = 1000
    labelled: int = 1000
    level: float = 0.01
    quiet_streams: int = 1000
    window: int = 200
    corruptions: tuple[str, ...] = (
        *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur"),
        *("fog", "brightness", "contrast"),
    )
    seeds: tuple[int, ...] = (0,)

    def evidence(self) -> EvidenceStudy:
        """Return the settings for the network of the study `evidence`."""
        return EvidenceStudy()


PRESETS: Mapping[str, DecisionsStudy] = {
    "quick": DecisionsStudy(
        networks=(DIGITS,), others=(), streams=(TURNING,), resamples=100, quiet_streams=50
    ),
    "full": DecisionsStudy(),
}
