"""Encoded pictures to model rows: the figures of the reference, and whatever hostile bytes do."""

import io
import random
import resource
import struct
import subprocess
import sys
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, features

from npufleet.errors import InvalidImage
from npufleet.tensors import Array
from npufleet_worker.images import FORMATS, ImageSpec, decode

SPEC = ImageSpec(size=(16, 16))
SAMPLES = ("chelsea.png", "coffee.png", "rocket.jpg")


def rows(data: bytes, spec: ImageSpec = SPEC, dtype: str = "u1", **options: int) -> Array:
    out = np.zeros(spec.row_shape, dtype)
    decode(data, spec, out=out, **options)
    return out


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def halves(mode: str = "RGB", left: Any = (255, 0, 0), right: Any = (0, 0, 255)) -> Image.Image:
    image = Image.new(mode, (32, 32), left)
    image.paste(right, (16, 0, 32, 32))
    return image


def reference(path: Path, crop: float, side: int) -> Array:
    """The preprocessing of the sample model's README, written out as it stands there."""
    image = Image.open(path).convert("RGB")
    c = int(crop * min(image.size))
    left, top = (image.width - c) // 2, (image.height - c) // 2
    square = image.crop((left, top, left + c, top + c))
    return np.asarray(square.resize((side, side), Image.Resampling.BICUBIC))


@pytest.mark.parametrize("name", SAMPLES)
def test_a_photo_becomes_exactly_the_pixels_of_the_reference(models: Path, name: str) -> None:
    """Another rounding would change the probabilities."""
    path = models / "efficientnet-lite0" / "images" / name
    spec = ImageSpec(size=(224, 224), crop=0.875)
    assert np.array_equal(rows(path.read_bytes(), spec), reference(path, 0.875, 224))


def test_a_float_model_gets_normalised_pixels_in_its_own_layout() -> None:
    """(pixel - mean) / std per channel, channels first where the model wants them so."""
    spec = ImageSpec(size=(16, 16), layout="NCHW", mean=(55.0, 0.0, 55.0), std=(2.0, 1.0, 10.0))
    out = rows(encoded(Image.new("RGB", (20, 20), (255, 7, 5))), spec, "<f4")
    assert out.shape == (3, 16, 16)
    assert [float(out[c, 3, 3]) for c in range(3)] == [100.0, 7.0, -5.0]
    half = rows(encoded(Image.new("RGB", (20, 20), (255, 7, 5))), spec, "<f2")
    assert np.array_equal(half, out.astype(np.float16))


def test_the_size_is_height_by_width() -> None:
    """As in the shape of the tensor."""
    assert rows(encoded(halves()), ImageSpec(size=(8, 24))).shape == (8, 24, 3)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_photo_is_turned_upright_before_it_is_cropped(orientation: int) -> None:
    """All eight EXIF orientations of the same scene give the same rows."""
    noise = np.random.default_rng(7).integers(0, 256, (41, 30, 3), dtype=np.uint8)
    scene = Image.fromarray(noise)
    undo = [None, 0, 3, 1, 5, 2, 6, 4][orientation - 1]
    stored = scene if undo is None else scene.transpose(Image.Transpose(undo))
    exif = Image.Exif()
    exif[0x0112] = orientation
    spec = ImageSpec(size=(16, 16), crop=0.9)
    assert np.array_equal(rows(encoded(stored, exif=exif), spec), rows(encoded(scene), spec))


GREY16 = Image.fromarray(np.full((32, 32), 0x80FF, np.uint16))


TEAL, GREY = (10, 20, 30), (77, 77, 77)
PLAIN = Image.new("RGB", (32, 32), TEAL)
CLEAR = Image.new("RGBA", (32, 32), (*TEAL, 0))
KINDS: dict[str, tuple[bytes, tuple[int, ...]]] = {
    "grey": (encoded(Image.new("L", (32, 32), 77)), GREY),
    "bilevel": (encoded(Image.new("1", (32, 32), 1)), (255, 255, 255)),
    "grey with alpha": (encoded(Image.new("LA", (32, 32), (77, 0))), GREY),
    "transparent": (encoded(CLEAR), TEAL),
    "16 bit": (encoded(GREY16), (0x80, 0x80, 0x80)),
    "palette": (encoded(PLAIN.quantize(4)), TEAL),
    "palette with alpha": (encoded(PLAIN.quantize(4), transparency=b"\0\x40"), TEAL),
    "cmyk": (encoded(Image.new("CMYK", (32, 32), (0, 0, 0, 255)), "JPEG"), (0, 0, 0)),
    "grey jpeg": (encoded(Image.new("L", (32, 32), 77), "JPEG"), GREY),
    "bmp": (encoded(PLAIN, "BMP"), TEAL),
    "webp": (encoded(CLEAR, "WEBP", lossless=True, exact=True), TEAL),
    "one pixel": (encoded(PLAIN.crop((0, 0, 1, 1))), TEAL),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_pixel_has_a_defined_result(kind: str) -> None:
    """Grey, palette, CMYK, transparent and 16-bit pictures are all pictures."""
    data, pixel = KINDS[kind]
    out = rows(data)
    assert np.abs(out.astype(int) - pixel).max() <= 1


@pytest.mark.parametrize("kind", ["WEBP", "PNG"])
def test_of_an_animation_the_first_frame_counts(kind: str) -> None:
    """An animated file is not an error."""
    first, second = Image.new("RGB", (32, 32), (9, 9, 9)), Image.new("RGB", (32, 32), (200, 0, 0))
    options = {"lossless": True} if kind == "WEBP" else {}
    data = encoded(first, kind, save_all=True, append_images=[second], duration=50, **options)
    assert np.abs(rows(data).astype(int) - 9).max() <= 1


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims any size; the data is one compressed run of nothing."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(kind + body))
        return struct.pack(">I", len(body)) + kind + body + check

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = zlib.compress(bytes(1000))
    parts = chunk(b"IHDR", header), chunk(b"IDAT", data), chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


@pytest.mark.parametrize("size", [(60_000, 60_000), (2**31 - 1, 2**31 - 1), (8000, 7000)])
def test_an_image_bomb_is_refused_from_its_header(size: tuple[int, int]) -> None:
    """Nothing is decoded, and Pillow's own warning does not leak (warnings are errors here)."""
    with pytest.raises(InvalidImage, match=f"{size[0]} x {size[1]} pixels"):
        rows(png_claiming(*size))


def test_a_webp_bomb_takes_no_memory() -> None:
    """Its decoder makes room for the whole canvas when it is opened."""
    data = bytearray(encoded(PLAIN, "WEBP", lossless=True))
    assert data[12:16] == b"VP8L"
    data[21:25] = struct.pack("<I", 0x0FFFFFFF)  # 14 bits of width - 1, then of height - 1
    before_kb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(InvalidImage, match="16384 x 16384 pixels"):
        rows(bytes(data))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kb < 50_000


def test_the_bound_on_pixels_is_the_callers() -> None:
    """Exactly the bound is still allowed."""
    data = encoded(halves())
    rows(data, max_pixels=32 * 32)
    with pytest.raises(InvalidImage, match="1,023 are allowed"):
        rows(data, max_pixels=1023)


@pytest.mark.parametrize(
    ("data", "wanted"),
    [
        (b"", r"empty \(0 bytes\)"),
        (b"\0" * 100, "not a JPEG, PNG, WebP or BMP"),
        (b"hello", "not a JPEG"),
        (b"\xff\xd8\xff", "image is"),
        (b"\x89PNG\r\n\x1a\n", "image is"),
        (b"RIFF\x04\0\0\0WEBP", "image is"),
        (b"BM" + b"\xff" * 60, "image is"),
        (encoded(halves(), "GIF"), "not a JPEG"),
        (encoded(halves(), "TIFF"), "not a JPEG"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not a JPEG"),
        (png_claiming(32, 32), "damaged"),
        (png_claiming(0, 0), "image is"),
    ],
)
def test_what_is_no_picture_is_refused_in_a_sentence(data: bytes, wanted: str) -> None:
    """Other formats that Pillow knows are not opened either: each is more code to attack."""
    with pytest.raises(InvalidImage, match=wanted):
        rows(data)


PICTURES: dict[str, Callable[[], bytes]] = {
    "JPEG": lambda: encoded(halves(), "JPEG"),
    "PNG": lambda: encoded(halves(), "PNG"),
    "WEBP": lambda: encoded(halves(), "WEBP"),
    "BMP": lambda: encoded(halves(), "BMP"),
}


@pytest.mark.parametrize("kind", FORMATS)
def test_a_cut_off_file_fails_at_every_length(kind: str) -> None:
    """Half a picture is not a picture; a row that is grey below must never be classified."""
    data = PICTURES[kind]()
    # The last bytes carry no pixels: check sums and end marks.
    for length in range(1, len(data) - 24, max(1, len(data) // 100)):
        with pytest.raises(InvalidImage):
            rows(data[:length])


@pytest.mark.parametrize("kind", FORMATS)
def test_flipped_bytes_give_a_row_or_invalid_image_and_nothing_else(kind: str) -> None:
    """A hostile file fails alone: no other exception, no warning."""
    data, dice = PICTURES[kind](), random.Random(kind)
    for _ in range(300):
        broken = bytearray(data)
        for _ in range(dice.randint(1, 8)):
            broken[dice.randrange(min(len(broken), dice.choice((60, len(broken)))))] = (
                dice.randrange(256)
            )
        with suppress(InvalidImage):
            assert rows(bytes(broken)).shape == SPEC.row_shape


def test_broken_exif_does_not_spoil_a_picture(tmp_path: Path) -> None:
    """It is taken to be upright, in silence (pytest has filters of its own: hence a process)."""
    path = tmp_path / "picture.jpg"
    path.write_bytes(encoded(halves(), "JPEG", exif=b"Exif\0\0II*\0\xff\xff\xff\x7f"))
    code = """
import sys, pathlib, numpy
from npufleet_worker.images import ImageSpec, decode
out = numpy.zeros((16, 16, 3), "u1")
decode(pathlib.Path(sys.argv[1]).read_bytes(), ImageSpec(size=(16, 16)), out=out)
print(*out[8, 2])
"""
    command = [sys.executable, "-W", "error", "-c", code, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    assert done.stdout == "254 0 0\n"


def test_many_threads_decode_at_once_without_mixing(models: Path) -> None:
    """Each thread writes its own row."""
    folder = models / "efficientnet-lite0" / "images"
    spec = ImageSpec(size=(32, 32), crop=0.875)
    wanted = {name: reference(folder / name, 0.875, 32) for name in SAMPLES}
    datas = {name: (folder / name).read_bytes() for name in SAMPLES}
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(lambda name: (name, rows(datas[name], spec)), SAMPLES * 8))
    assert all(np.array_equal(out, wanted[name]) for name, out in got)


def test_this_pillow_can_read_all_four_formats() -> None:
    """A wheel without WebP would only show at the first WebP file."""
    assert features.check("webp")
    assert features.check("jpg")
    assert features.check("zlib")
