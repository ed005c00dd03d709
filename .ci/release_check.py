"""A dry run of a release: `make release-check` builds, checks and installs what would be published.

The wheel is installed into an environment that has nothing else but what it asks for. These
packages are linked from the environment that runs this file, so nothing is downloaded.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import venv
import zipfile
from importlib.metadata import Distribution, PathDistribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
OUT = ROOT / "build" / "release"
LARGEST_WHEEL = 1_000_000  # bytes

# A newcomer's first lines: a toy problem, calibrated, stored and loaded.
SMOKE_TEST = """
import sys, tempfile, torch, acnml
assert acnml.__file__.startswith(sys.prefix), acnml.__file__
x = torch.randn(2000, 4, generator=torch.Generator().manual_seed(0))
labels = (x[:, 0] + 0.5 * x[:, 1] > 0).long()
model = torch.nn.Linear(4, 2)
model.weight.data = torch.tensor([[-3.0, 0.0, 0.0, 0.0], [3.0, 0.0, 0.0, 0.0]])
calibrated = acnml.calibrate(model, (x[:1000], labels[:1000]), (x[1000:], labels[1000:]))
answer = calibrated(x[:5])
assert torch.allclose(answer.probs.sum(-1), torch.ones(5))
with tempfile.TemporaryDirectory() as folder:
    acnml.save(calibrated, f"{folder}/calibrated.safetensors")
    again = acnml.load(f"{folder}/calibrated.safetensors", model)
assert torch.equal(again(x[:5]).probs, answer.probs)
extras = [name for name in ("sklearn", "matplotlib", "typer") if name in sys.modules]
assert not extras, f"the core imports {extras}"
"""


def main() -> None:
    """Build, check, install and use the distribution."""
    shutil.rmtree(OUT, ignore_errors=True)
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", OUT, ROOT)
    files = sorted(OUT.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *files)
    (wheel,) = OUT.glob("*.whl")
    require_content(wheel)
    with tempfile.TemporaryDirectory() as folder:
        python = empty_environment(Path(folder), wheel)
        install(python, wheel)
        run(python, "-c", SMOKE_TEST, cwd=folder)
        run(python.with_name("acnml"), "--version", cwd=folder)
    print(f"Ready to publish: {', '.join(file.name for file in files)}")


def run(*command: str | Path, cwd: str | Path = ROOT) -> None:
    """Run a command, without the modules of this repository; a failure ends the check."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    subprocess.run([str(word) for word in command], cwd=cwd, env=environment, check=True)


def require_content(wheel: Path) -> None:
    """Check that the wheel is small, and has the library with types and licence only."""
    size = wheel.stat().st_size
    names = set(zipfile.ZipFile(wheel).namelist())
    version = wheel.name.split("-")[1]
    info = f"acnml-{version}.dist-info"
    expected = {"acnml/__init__.py", "acnml/py.typed", f"{info}/licenses/LICENSE"}
    if missing := expected - names:
        sys.exit(f"{wheel.name} lacks {', '.join(sorted(missing))}")
    if foreign := sorted(name for name in names if name.split("/")[0] not in ("acnml", info)):
        sys.exit(f"{wheel.name} holds more than the library: {', '.join(foreign)}")
    if size > LARGEST_WHEEL:
        sys.exit(f"{wheel.name} has {size:,} bytes, more than {LARGEST_WHEEL:,}")
    print(f"{wheel.name}: {size / 1000:.0f} kB, {len(names)} files")


def empty_environment(folder: Path, wheel: Path) -> Path:
    """Make an environment with nothing but the wheel's dependencies; return its Python."""
    venv.create(folder, symlinks=True)
    python = folder / "bin" / "python"
    (site,) = folder.glob("lib/python*/site-packages")
    (info,) = (path for path in zipfile.Path(wheel).iterdir() if path.name.endswith(".dist-info"))
    for name in sorted(needed(PathDistribution(info))):
        for top in top_level(distribution(name)):
            link = site / top.name
            if not link.exists():
                link.symlink_to(top)
    return python


def needed(root: Distribution) -> set[str]:
    """Return the names of everything that a distribution asks for, without extras."""
    found: set[str] = set()
    waiting = [root]
    while waiting:
        for line in waiting.pop().requires or ():
            wanted = Requirement(line)
            name = wanted.name.lower()
            if name in found or (wanted.marker and not wanted.marker.evaluate({"extra": ""})):
                continue
            found.add(name)
            waiting.append(distribution(name))
    return found


def top_level(package: Distribution) -> set[Path]:
    """Return the folders and files that a distribution has put into its site-packages."""
    base = Path(str(package.locate_file("")))
    tops = {Path(file).parts[0] for file in package.files or ()}
    return {base / top for top in tops if top not in ("..", "__pycache__")}


def install(python: Path, wheel: Path) -> None:
    """Install the wheel by the pip of this environment, without a network."""
    quiet = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check")
    run(sys.executable, "-m", "pip", "--python", python, "install", *quiet, wheel)


if __name__ == "__main__":
    main()
