"""Archives: unpacked, removed, and writing nowhere else."""

from __future__ import annotations

import io
import tarfile

from described import described
from studies.data.catalogue import DataSet, Download
from studies.data.download import fetch

from .web_site import Heard, Site, files_below

MEMBERS = {"set/one": b"1" * 1000, "set/two": b"22" * 1000}


def archive(members: dict[str, bytes], *special: tarfile.TarInfo) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member in special:
            tar.addfile(member)
    return buffer.getvalue()


def packed(site: Site, content: bytes) -> DataSet:
    site.files["pack.tar.gz"] = content
    contents = tuple(described(path, member) for path, member in MEMBERS.items())
    address = f"{site.address}/pack.tar.gz"
    download = Download(described("pack.tar.gz", content), (address,), contents)
    return DataSet("set", "for tests", (download,))


def test_an_archive_is_unpacked_and_removed(site, folder):
    data_set = packed(site, archive({**MEMBERS, "set/readme": b"not wanted"}))
    heard = Heard()
    fetch(data_set, heard)
    assert {path: (folder / path).read_bytes() for path in files_below(folder)} == MEMBERS
    assert heard.begun[1] == ("Unpacking pack.tar.gz", 3000, 0)
    assert heard.bytes[-2:] == [1000, 3000]
    fetch(data_set, Heard())
    assert site.requests == [("pack.tar.gz", 0)]


def link(name: str, target: str) -> tarfile.TarInfo:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member


def test_an_archive_writes_nowhere_but_where_it_should(site, folder, tmp_path):
    outside = tmp_path / "outside"
    evil = archive({"../outside": b"x", str(outside): b"x", **MEMBERS}, link("set/x", "/etc"))
    fetch(packed(site, evil), Heard())
    assert files_below(folder) == set(MEMBERS)
    assert not outside.exists()
    assert not (folder / "set/x").is_symlink()
