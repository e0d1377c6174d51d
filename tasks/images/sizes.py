"""Which image and patch size fits the images."""

from attnkit.lightning.errors import UserError

MAX_DEFAULT_SIDE = 224
MIN_GRID = 8
MAX_GRID = 16  # 256 tokens
_POWERS = (16, 8, 4, 2)


def default_image_size(short_side: int) -> int:
    """The largest side, up to the images' own and to 224, that its patch size divides."""
    side = max(min(short_side, MAX_DEFAULT_SIDE), 2 * _POWERS[-1])
    patch = next((p for p in _POWERS if side // p >= MIN_GRID), _POWERS[-1])
    return side // patch * patch


def default_patch_size(image_size: int) -> int:
    """The patch side that fits images of this side: 8 → 2, 32 → 4, 64 → 8, 224 → 16, 384 → 24.

    The largest power of two from 2 to 16 that divides the image into 8 to 16 patches a side, so
    256 tokens at most. Where there is none, the divisor nearest to 16 that does; and images too
    small for 8 patches a side get the smallest divisor above 1.

    Raises:
        UserError: no divisor gives 2 to 16 patches a side (primes, mostly).
    """
    divisors = [p for p in range(2, image_size) if image_size % p == 0]
    fitting = [p for p in divisors if MIN_GRID <= image_size // p <= MAX_GRID]
    powers = [p for p in fitting if p in _POWERS]
    small = [p for p in divisors if image_size // p < MIN_GRID]
    if powers:
        return max(powers)
    if fitting:
        return min(fitting, key=lambda patch: abs(patch - _POWERS[0]))
    if small:
        return min(small)
    near = image_size // 16 * 16 if image_size >= 32 else image_size + 1
    raise UserError(
        f"data.image_size: no patch size divides {image_size} into 2 to {MAX_GRID} patches a side; "
        f"{near} would do"
    )
