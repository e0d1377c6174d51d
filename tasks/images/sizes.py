"""Default image and patch sizes, and how pictures are resized to them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from attnkit.core.arguments import at_least, choice, pair, up_to_1
from attnkit.lightning.errors import UserError

MAX_DEFAULT_SIDE = 224
MIN_GRID = 8
MAX_GRID = 16  # 256 tokens
FEW_TOKENS = 36
MANY_IMAGES = 20_000
_POWERS = (16, 8, 4, 2)
Size = int | Sequence[int]
INTERPOLATIONS = ("bicubic", "bilinear", "nearest")


class Fit(NamedTuple):
    """Rules by which a picture becomes an image: its largest centred part of the same shape is
    used.

    Attributes:
        size: side in pixels, or [height, width].
        interpolation: "bicubic", "bilinear" or "nearest"; the first two with antialiasing.
        crop_pct: share of that part's sides that is kept; less leaves out more of the border.
        value_range: [low, high], the values of files of more than 8 bits that become 0 and 255;
            None: 0 and 65535 for integers, 0 and 1 for floats.
    """

    size: Size
    interpolation: str = "bicubic"
    crop_pct: float = 1.0
    value_range: Sequence[float] | None = None

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """Return the size that a picture is resized to before its centre is cut out, as in timm."""
        high, wide = (int(side / self.crop_pct) for side in sides(self.size))
        whole = int if high == wide else round
        if height * wide <= width * high:
            return high, max(wide, whole(width * high / height))
        return max(high, whole(height * wide / width)), wide


def fit_of(data: Any, size: Size | None = None) -> Fit:
    """Return how a data module resizes pictures, to `size` or to its own `image_size`."""
    how = data.interpolation or "bicubic", data.crop_pct or 1.0, data.value_range
    return Fit(size or data.image_size, *how)


def least_area(size: Size, crop_min_area: float) -> float:
    """Return the pixels of a picture whose smallest random crop has the sides of `size`."""
    height, width = sides(size)
    return height * width * (4 / 3) / crop_min_area


def sides(size: Size) -> tuple[int, int]:
    """Return height and width."""
    return pair("image_size", list(size) if isinstance(size, Sequence) else size)


def checked_size(size: Size | None) -> int | list[int] | None:
    """Return the size in its written form: one number for a square, else [height, width]."""
    if size is None:
        return None
    height, width = sides(size)
    at_least(2, image_size=min(height, width))
    return height if height == width else [height, width]


def check_fit(
    interpolation: str | None,
    crop_pct: float | None,
    value_range: Sequence[float] | None = None,
) -> None:
    """Raise ValueError if an argument is out of range; None is allowed."""
    if interpolation is not None:
        choice(INTERPOLATIONS, interpolation=interpolation)
    up_to_1(crop_pct=crop_pct)
    if crop_pct == 0:
        raise ValueError("crop_pct: expected a number above 0, got 0")
    if value_range is not None and not (len(value_range) == 2 and value_range[0] < value_range[1]):
        raise ValueError(f"value_range: expected [low, high], low below high, got {value_range}")


def default_image_size(short_side: int) -> int:
    """Return the largest side that its patch size divides, at most `short_side` and 224."""
    side = max(min(short_side, MAX_DEFAULT_SIDE), 2 * _POWERS[-1])
    patch = next((p for p in _POWERS if side // p >= MIN_GRID), _POWERS[-1])
    return side // patch * patch


def default_patch_size(image_size: Size, num_images: int | None = None) -> int:
    """Return the patch side for images of this side: 8 → 2, 32 → 4, 64 → 8, 224 → 16, 384 → 24.

    It is the largest power of two from 2 to 16 that divides the image into 8 to 16 patches a side,
    at most 256 tokens. If there is none, it is the divisor nearest to 16 that does; images too
    small for 8 patches a side get the smallest divisor above 1. For images that are not squares,
    8 to 16 is the square root of the number of patches.

    For fewer than `MANY_IMAGES` images, it is instead the divisor that gives the most tokens up to
    64, if these are at least 36: 28 → 4, 96 → 12, 224 → 28. An epoch then takes a third of the time
    or less, which matters because few images need many epochs.

    Args:
        image_size: side in pixels, or [height, width].
        num_images: number of training images; None: many.

    Raises:
        UserError: no divisor gives 2 to 16 patches a side, mostly because a side is prime.
    """
    height, width = sides(image_size)
    grids = {
        p: (height // p) * (width // p)
        for p in range(2, min(height, width))
        if height % p == width % p == 0
    }
    fitting = [p for p, tokens in grids.items() if MIN_GRID**2 <= tokens <= MAX_GRID**2]
    powers = [p for p in fitting if p in _POWERS]
    small = [p for p, tokens in grids.items() if tokens < MIN_GRID**2]
    cheap = [p for p, tokens in grids.items() if FEW_TOKENS <= tokens <= MIN_GRID**2]
    if cheap and num_images is not None and num_images < MANY_IMAGES:
        return min(cheap)
    if powers:
        return max(powers)
    if fitting:
        return min(fitting, key=lambda patch: abs(patch - _POWERS[0]))
    if small:
        return min(small)
    near = [side // 16 * 16 if side >= 32 else side + 1 for side in (height, width)]
    raise UserError(
        f"data.image_size: no patch size divides {image_size} into 2 to {MAX_GRID} patches a side; "
        f"{near[0] if height == width else near} would do"
    )
