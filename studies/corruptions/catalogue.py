"""All corruptions, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from studies.corruptions.base import Corruption
from studies.corruptions.blur import BLUR, GAUSSIAN_BLUR
from studies.corruptions.digital import DIGITAL
from studies.corruptions.noise import NOISE
from studies.corruptions.weather import WEATHER

# The fifteen over which the benchmark averages, in its order.
BENCHMARK = tuple(corruption.name for corruption in (*NOISE, *BLUR, *WEATHER, *DIGITAL))

CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {c.name: c for c in (*NOISE, *BLUR, *WEATHER, *DIGITAL, GAUSSIAN_BLUR)}
)
