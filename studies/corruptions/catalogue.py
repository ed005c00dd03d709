"""All corruptions, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from studies.corruptions.base import Corruption
from studies.corruptions.blur import BLUR, GAUSSIAN_BLUR
from studies.corruptions.digital import DIGITAL, SATURATE
from studies.corruptions.noise import NOISE, SPECKLE_NOISE
from studies.corruptions.spatter import SPATTER
from studies.corruptions.weather import WEATHER

# The fifteen over which the benchmark averages, in its order.
BENCHMARK = tuple(corruption.name for corruption in (*NOISE, *BLUR, *WEATHER, *DIGITAL))

# Those that it has beside them.
EXTRA = (SPECKLE_NOISE, GAUSSIAN_BLUR, SPATTER, SATURATE)

CORRUPTIONS: Mapping[str, Corruption] = MappingProxyType(
    {c.name: c for c in (*NOISE, *BLUR, *WEATHER, *DIGITAL, *EXTRA)}
)
