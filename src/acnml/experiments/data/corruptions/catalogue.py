"""All corruptions, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from acnml.experiments.data.corruptions.base import Corruption
from acnml.experiments.data.corruptions.blur import BLUR, GAUSSIAN_BLUR
from acnml.experiments.data.corruptions.digital import DIGITAL
from acnml.experiments.data.corruptions.noise import NOISE
from acnml.experiments.data.corruptions.weather import WEATHER

# The fifteen over which the benchmark averages, in its order.
BENCHMARK = tuple(corruption.name for corruption in (*NOISE, *BLUR, *WEATHER, *DIGITAL))

CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {c.name: c for c in (*NOISE, *BLUR, *WEATHER, *DIGITAL, GAUSSIAN_BLUR)}
)
