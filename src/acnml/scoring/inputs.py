"""Which kind of source a path names."""

from __future__ import annotations

from glob import escape
from pathlib import Path

from acnml.scoring.arrays import ArraySource
from acnml.scoring.files import Files, find_files
from acnml.scoring.images import ImageSource
from acnml.scoring.job import Reading, ScoringError, is_uri
from acnml.scoring.parquet import ParquetSource
from acnml.scoring.sources import Source

TABLES: dict[tuple[str, ...], type[ParquetSource | ArraySource]] = {
    (".parquet", ".pq"): ParquetSource,
    (".npy",): ArraySource,
    (".npz",): ArraySource,
}


def open_source(path: str, reading: Reading, output: str | None = None) -> Source:
    """Return the source for a file, a folder, a pattern or a URI, without files of the output."""
    files = find_files(path, output)
    suffixes = {file.suffix.lower() for file in files.paths}
    for own, kind in TABLES.items():
        if suffixes & set(own) and (kind is ParquetSource or not is_uri(path)):
            _require_only(own, files, path)
            _refuse_image_settings(reading)
            return kind(files, reading)
    if is_uri(path):
        raise ScoringError(
            f"{path} has no Parquet files, and nothing else is read from a URI: convert the files "
            "to Parquet, or copy them to a local folder"
        )
    return ImageSource(files, reading)


def _require_only(suffixes: tuple[str, ...], files: Files, path: str) -> None:
    """Raise an error if some files are of another kind that would be left out."""
    others = [file for file in files.paths if file.suffix.lower() not in suffixes]
    if others:
        pattern = Path(escape(path) if Path(path).exists() else path) / f"*{suffixes[0]}"
        raise ScoringError(
            f"{path} has {suffixes[0]} files and others, such as {others[0].name}: move these away "
            f"or, if the files are local, name those to score, for example --input '{pattern}'"
        )


def _refuse_image_settings(reading: Reading) -> None:
    for name in ("transform", "image_size", "image_mode"):
        if getattr(reading, name) != getattr(Reading, name):
            raise ScoringError(f"`{name}` is for folders of images: leave it out")
