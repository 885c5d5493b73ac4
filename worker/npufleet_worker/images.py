"""Encoded pictures to rows of a model's input. Knows nothing of requests, queues or batches."""

import io
import warnings
from typing import Annotated, Any, Literal

import numpy as np
from PIL import Image, UnidentifiedImageError
from pydantic import BaseModel, ConfigDict, Field

from npufleet.errors import InvalidImage
from npufleet.tensors import Array

FORMATS = ("JPEG", "PNG", "WEBP", "BMP")

MAX_PIXELS = 50_000_000

# `decode` has its own bound, from the header. Pillow's would warn on the way to it.
Image.MAX_IMAGE_PIXELS = None
# Broken metadata of a picture is no news for the operator of a fleet.
warnings.filterwarnings("ignore", module=r"PIL\.")

_ORIENTATION = 0x0112
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

_Size = Annotated[int, Field(ge=1, le=16384)]
_Std = Annotated[float, Field(gt=0)]


class ImageSpec(BaseModel):
    """How a model wants its pictures.

    `input` names the input (None: the first one); `size` is (height, width) in pixels; `crop` is
    the side of the middle square that is kept, as a part of the shorter side. A float input gets
    (pixel - mean) / std, with pixels from 0 to 255; an integer one gets the pixels.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    input: str | None = None
    size: Annotated[tuple[_Size, _Size], Field(strict=False)]
    crop: Annotated[float, Field(gt=0, le=1)] = 1.0
    layout: Literal["NHWC", "NCHW"] = "NHWC"
    mean: Annotated[tuple[float, float, float], Field(strict=False)] = (0.0, 0.0, 0.0)
    std: Annotated[tuple[_Std, _Std, _Std], Field(strict=False)] = (1.0, 1.0, 1.0)

    @property
    def row_shape(self) -> tuple[int, int, int]:
        """The shape of one row in the model's layout."""
        height, width = self.size
        return (height, width, 3) if self.layout == "NHWC" else (3, height, width)


def decode(
    data: bytes | bytearray | memoryview,
    spec: ImageSpec,
    *,
    out: Array,
    max_pixels: int = MAX_PIXELS,
) -> None:
    """Write the encoded picture as RGB into `out`, one row of shape `spec.row_shape`.

    JPEG, PNG, WebP or BMP; of an animation the first frame; transparency is dropped, 16 bits are
    cut to 8. Upright by EXIF, then the middle square, then bicubic. Raises InvalidImage whatever
    the bytes are, and then `out` is undefined. May run in many threads at once.
    """
    if not len(data):
        raise InvalidImage("the image is empty (0 bytes)")
    try:
        pixels = _pixels(data, spec, max_pixels)
    except InvalidImage:
        raise
    except UnidentifiedImageError:
        raise InvalidImage(
            f"the image is not a JPEG, PNG, WebP or BMP file that can be read ({len(data)} bytes)"
        ) from None
    except Exception as error:  # noqa: BLE001 - on hostile bytes a codec raises what it trips over
        raise InvalidImage(f"the image is damaged: {_sentence(error)}") from None
    _write(pixels, spec, out)


def _pixels(data: Any, spec: ImageSpec, max_pixels: int) -> Array:
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        width, height = image.size
        if width * height > max_pixels:
            raise InvalidImage(
                f"the image has {width} x {height} pixels; {max_pixels:,} are allowed"
            )
        image.load()
        turn = _UPRIGHT.get(_orientation(image))
        upright = image.transpose(turn) if turn is not None else image
        square = _rgb(_middle(upright, spec.crop))
        wanted = (spec.size[1], spec.size[0])
        return np.asarray(square.resize(wanted, Image.Resampling.BICUBIC))


def _orientation(image: Image.Image) -> int:
    try:
        value = image.getexif().get(_ORIENTATION, 1)
    except Exception:  # noqa: BLE001 - a picture with broken EXIF is a picture; see decode
        return 1
    return value if isinstance(value, int) else 1


def _middle(image: Image.Image, crop: float) -> Image.Image:
    width, height = image.size
    side = max(1, int(crop * min(width, height)))
    left, top = (width - side) // 2, (height - side) // 2
    return image.crop((left, top, left + side, top + side))


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    if image.mode.startswith("I"):
        # Pillow would clip 16 bits at 255, which leaves a white picture.
        return Image.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.mode == "P":
        # Palettes with transparency convert to RGB by way of RGBA only.
        return image.convert("RGBA").convert("RGB")
    return image.convert("RGB")


def _write(pixels: Array, spec: ImageSpec, out: Array) -> None:
    target = out if spec.layout == "NHWC" else np.moveaxis(out, 0, -1)
    if out.dtype.kind == "f":
        scaled = pixels.astype(np.float32)
        scaled -= np.asarray(spec.mean, np.float32)
        scaled /= np.asarray(spec.std, np.float32)
        pixels = scaled
    np.copyto(target, pixels, casting="same_kind")


def _sentence(error: Exception) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= 200 else text[:200] + "…"
