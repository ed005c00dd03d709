"""`python -m playground`: train, calibrate and export the model of the page."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from playground.model import FOLDER, build
from studies.terminal import one_thread


def main() -> None:
    """Write the model, unless it is current."""
    parser = argparse.ArgumentParser(prog="python -m playground", description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the model")
    with one_thread():
        build(parser.parse_args().out, partial(print, flush=True))


if __name__ == "__main__":
    main()
