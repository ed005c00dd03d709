"""The catalogue of data sets, as plain values: their files, checksums and public sources.

Checksums are published ones: md5 for MNIST and the archives of CIFAR-10 and CIFAR-10-C, SHA-1 for
the files of CIFAR-10, SHA-256 for the pictures of frost. For notMNIST and CLINC150 there are none:
theirs are those of the files that their sources offer. Nothing here uses the disk or the network;
`folder` inspects the files, `download` fetches them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, final


@final
@dataclass(frozen=True)
class DataFile:
    """A file of a data set.

    Args:
        path: its place below the data folder.
        size: in bytes.
        checksum: "md5:…", "sha1:…" or "sha256:…"; None where none is published.
        alternatives: the same data in other accepted forms.
    """

    path: str
    size: int
    checksum: str | None = None
    alternatives: tuple[DataFile, ...] = ()

    @property
    def folder(self) -> str:
        """Its folder, below the data folder."""
        return self.path.rpartition("/")[0]

    @property
    def name(self) -> str:
        """Its name without the folder."""
        return self.path.rpartition("/")[2]


@final
@dataclass(frozen=True)
class Download:
    """A file on the web.

    Args:
        file: what is downloaded, and where to.
        mirrors: its addresses, tried in this order.
        contents: if it is a tar archive, the files to take out of it, named as in the archive.
    """

    file: DataFile
    mirrors: tuple[str, ...]
    contents: tuple[DataFile, ...] = ()

    @property
    def delivers(self) -> tuple[DataFile, ...]:
        """The files that it adds to the data folder."""
        return self.contents or (self.file,)


@final
@dataclass(frozen=True)
class DataSet:
    """A data set: its name, what it is, and how to get it."""

    name: str
    about: str
    downloads: tuple[Download, ...]

    @property
    def files(self) -> tuple[DataFile, ...]:
        """All files that a complete data set has."""
        return tuple(file for download in self.downloads for file in download.delivers)

    @property
    def folder(self) -> str:
        """The folder of its files, below the data folder."""
        return self.files[0].folder

    @property
    def download_size(self) -> int:
        """Bytes to download for all of it."""
        return sum(download.file.size for download in self.downloads)


class Study(NamedTuple):
    """A study, the data sets it uses, and what it does without them."""

    name: str
    uses: tuple[DataSet, ...]
    remark: str


def _zipped(path: str, size: int, md5: str, unzipped_size: int, unzipped_md5: str) -> DataFile:
    unzipped = DataFile(path.removesuffix(".gz"), unzipped_size, f"md5:{unzipped_md5}")
    return DataFile(path, size, f"md5:{md5}", (unzipped,))


def _one_by_one(files: tuple[DataFile, ...], folders: tuple[str, ...]) -> tuple[Download, ...]:
    """Files that several web folders hold under their own names."""
    return tuple(Download(file, tuple(each + file.name for each in folders)) for file in files)


_MNIST_FILES = (
    _zipped(
        *("mnist/train-images-idx3-ubyte.gz", 9912422, "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
        *(47040016, "6bbc9ace898e44ae57da46a324031adb"),
    ),
    _zipped(
        *("mnist/train-labels-idx1-ubyte.gz", 28881, "d53e105ee54ea40749a09fcbcd1e9432"),
        *(60008, "a25bea736e30d166cdddb491f175f624"),
    ),
    _zipped(
        *("mnist/t10k-images-idx3-ubyte.gz", 1648877, "9fb629c4189551a2d022fa330f9573f3"),
        *(7840016, "2646ac647ad5339dbf082846283269ea"),
    ),
    _zipped(
        *("mnist/t10k-labels-idx1-ubyte.gz", 4542, "ec29112dd5afa0611ce80d1b7f02629c"),
        *(10008, "27ae3e4e09519cfbb04c329615203637"),
    ),
)
_NOTMNIST_FILES = (
    _zipped(
        *("notmnist/t10k-images-idx3-ubyte.gz", 3172375, "2c87c839a4ef9b238846600eec8c35b7"),
        *(7840016, "1e78b07d677d6e4de2c8857bafff012e"),
    ),
    _zipped(
        *("notmnist/t10k-labels-idx1-ubyte.gz", 5118, "7ea9118cbafd0f6e3ee2ad771d782a01"),
        *(10008, "b10b3ef34b4e468313a7b24c216c6a53"),
    ),
)
# Of every batch: the SHA-1 of the binary file, size and md5 of the python file, size of the mosaic.
_CIFAR10_BATCHES = {
    "data_batch_1": (
        "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
        *(31035704, "c99cafc152244af753f735de768cd75f", 17108202),
    ),
    "data_batch_2": (
        "c0ba65cce70568cd57b4e03e9ac8d2a5367c1795",
        *(31035320, "d4bba439e000b95fd0a9bffe97cbabec", 17150384),
    ),
    "data_batch_3": (
        "1dd00a74ab1d17a6e7d73e185b69dbf31242f295",
        *(31035999, "54ebc095f3ab1f0389bbae665268c751", 17160158),
    ),
    "data_batch_4": (
        "aab85764eb3584312d3c7f65fd2fd016e36a258e",
        *(31035696, "634d18415352ddfa80567beed471001a", 17128486),
    ),
    "data_batch_5": (
        "26e2849e66a845b7f1e4614ae70f4889ae604628",
        *(31035623, "482c414d41f54cd18b22e5b47cb7c3cb", 17110208),
    ),
    "test_batch": (
        "67eb016db431130d61cd03c7ad570b013799c88c",
        *(31035526, "40351d587109b95175f43aff81a1287e", 17138714),
    ),
}
_CIFAR10_FILES = tuple(
    DataFile(
        *(f"cifar-10-batches-bin/{name}.bin", 30730000, f"sha1:{sha1}"),
        (
            DataFile(f"cifar-10-batches-py/{name}", python_size, f"md5:{python_md5}"),
            DataFile(f"cifar10/{name}.webp", mosaic_size),
        ),
    )
    for name, (sha1, python_size, python_md5, mosaic_size) in _CIFAR10_BATCHES.items()
)
_CIFAR10_C_NAMES = (
    *("gaussian_noise", "shot_noise", "impulse_noise", "defocus_blur", "glass_blur"),
    *("motion_blur", "zoom_blur", "snow", "frost", "fog", "brightness", "contrast"),
    *("elastic_transform", "pixelate", "jpeg_compression"),
    *("speckle_noise", "gaussian_blur", "spatter", "saturate"),
)
_FROST_SHA256 = {
    "frost1.png": (1199930, "ff9f907860bd7a835d459e32f9d588062b7f61ee267343cc7222b56753a14755"),
    "frost2.png": (299002, "fe211a89b336999c207a852ce05818d4545d0b57c5beadd824b4cc9d9a9b6137"),
    "frost3.png": (299002, "2d0d50b4a9bb213f38b024ef7768731bb83cc08d2f26b5766bbc167cdfa0e504"),
    "frost4.jpg": (36734, "3f8b91ca1a9fa7167b09e773da53f5ae60d0a1fd88f02a783f6e328a72887f6e"),
    "frost5.jpg": (155150, "5fc6a19df4a429ba68abdcc8f8a4278d4c9f81c9ccafd2c92ab0c8cf8992ebd2"),
    "frost6.jpg": (90185, "1f92b2f48408748085b68dd81d816ef239f42cef3029c25d041fcb6760fb4f25"),
}

MNIST = DataSet(
    name="mnist",
    about="handwritten digits",
    downloads=_one_by_one(
        _MNIST_FILES,
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "https://raw.githubusercontent.com/fgnt/mnist/master/",
        ),
    ),
)
NOTMNIST = DataSet(
    name="notmnist",
    about="letters in many fonts",
    downloads=_one_by_one(
        _NOTMNIST_FILES,
        (
            "https://raw.githubusercontent.com/davidflanagan/notMNIST-to-MNIST/master/",
            "https://github.com/davidflanagan/notMNIST-to-MNIST/raw/master/",
        ),
    ),
)
CIFAR10 = DataSet(
    name="cifar10",
    about="photographs",
    downloads=(
        Download(
            DataFile("cifar-10-binary.tar.gz", 170052171, "md5:c32a1d4ab5d03f1284b67883e8d87530"),
            (
                "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
                "https://cave.cs.toronto.edu/kriz/cifar-10-binary.tar.gz",
            ),
            _CIFAR10_FILES,
        ),
    ),
)
CIFAR10_C = DataSet(
    name="cifar10-c",
    about="the same, corrupted",
    downloads=(
        Download(
            DataFile("CIFAR-10-C.tar", 2918471680, "md5:56bf5dcef84df0e2308c6dcbcbbd8499"),
            (
                "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar",
                "https://zenodo.org/record/2535967/files/CIFAR-10-C.tar",
            ),
            (
                *(DataFile(f"CIFAR-10-C/{name}.npy", 153600128) for name in _CIFAR10_C_NAMES),
                DataFile("CIFAR-10-C/labels.npy", 50128),
            ),
        ),
    ),
)
FROST = DataSet(
    name="frost",
    about="pictures of frost",
    downloads=_one_by_one(
        tuple(
            DataFile(f"frost/{name}", size, f"sha256:{sha256}")
            for name, (size, sha256) in _FROST_SHA256.items()
        ),
        (
            "https://raw.githubusercontent.com/hendrycks/robustness/master"
            "/ImageNet-C/imagenet_c/imagenet_c/frost/",
            "https://raw.githubusercontent.com/hendrycks/robustness/master/ImageNet-C/create_c/",
        ),
    ),
)
CLINC150 = DataSet(
    name="clinc150",
    about="questions to an assistant",
    downloads=_one_by_one(
        (
            DataFile(
                *("clinc150/data_full.json", 2495390),
                "sha256:36923c3705a59e08fe9c3883d8bc2dd966ef93e22cb78ac41171782a698d56e0",
            ),
        ),
        (
            "https://raw.githubusercontent.com/clinc/oos-eval/master/data/",
            "https://github.com/clinc/oos-eval/raw/master/data/",
        ),
    ),
)

STREAMS = DataSet(
    name="streams",
    about="electricity prices and weather in the order of time",
    downloads=_one_by_one(
        (
            DataFile(
                *("streams/elec.csv", 3200586),
                "sha256:cdf901433885f29eca6911f70c0eeafb50d90596c879c30c5b99f5a2e8e734ff",
            ),
            DataFile(
                *("streams/weather.csv", 772138),
                "sha256:3c38f05bdc5c4cb115f122414c66976e3662c875d96d7199d9e47fc46aff150e",
            ),
        ),
        (
            "https://raw.githubusercontent.com/scikit-multiflow/streaming-datasets/master/",
            "https://github.com/scikit-multiflow/streaming-datasets/raw/master/",
        ),
    ),
)

_ALL = (MNIST, NOTMNIST, CIFAR10, CIFAR10_C, FROST, CLINC150, STREAMS)
CATALOGUE = {each.name: each for each in _ALL}

STUDIES = (
    Study("demo", (), "scikit-learn's digits suffice"),
    Study("toy", (), "makes its own data"),
    Study("theory", (), "makes its own data"),
    Study(
        "evidence",
        (MNIST, NOTMNIST, CIFAR10, CIFAR10_C, FROST, CLINC150),
        "no cifar10-c: makes it; needs weights",
    ),
    Study("text", (CLINC150,), "its encoder is a package"),
    Study("tabular", (), "its tables are in packages"),
    Study("fidelity", (MNIST,), "and scikit-learn's digits"),
    Study("heads", (MNIST,), "and the English Web Treebank"),
    Study("label-noise", (MNIST, CIFAR10), "needs weights for cifar10"),
    Study("if-comp", (CIFAR10, CIFAR10_C, FROST), "no cifar10-c: makes it; needs weights"),
    Study("linearised", (MNIST,), "needs mnist"),
    Study(
        "decisions",
        (MNIST, CIFAR10, CIFAR10_C, FROST, STREAMS),
        "leaves out networks and streams without data",
    ),
    Study("paper-mnist", (MNIST,), "needs mnist"),
    Study("rotated-mnist", (MNIST, NOTMNIST), "no mnist: scikit-learn's digits"),
    Study("cifar10-c", (CIFAR10, CIFAR10_C, FROST), "no cifar10-c: makes it; needs weights"),
)
