"""Settings that cannot work are refused when a study is made, before hours of work."""

from __future__ import annotations

from typing import Any

from acnml._util.checks import require_positive


def require_positive_fields(settings: Any, *names: str) -> None:
    """Refuse numbers that are not positive, in tuples as well, and tuples without any.

    None stands for all there are, or for what others say.
    """
    for name in names:
        value = getattr(settings, name)
        values = value if isinstance(value, tuple) else (value,)
        if not values:
            raise ValueError(f"{name} must have one value at least")
        for each in values:
            if each is not None:
                require_positive(each, name)
