"""Files to pixels: every mode of image, and what happens to broken files."""

import time

import numpy as np
import pytest
import torch
from PIL import Image

from attnkit.tasks.images import scan
from attnkit.tasks.images.decode import (
    Read,
    UndecodableImageError,
    pixel_sums,
    read_file,
    read_image,
    read_picture,
    to_channels,
)
from attnkit.tasks.images.scan import decode_files
from attnkit.tasks.images.sizes import Fit


def gradient(width, height):
    """RGB pixels whose channels differ, so that no swap of axes or channels can hide."""
    rows, columns = np.mgrid[0:height, 0:width]
    red, green = 255 * columns / max(width - 1, 1), 255 * rows / max(height - 1, 1)
    return np.stack([red, green, np.full_like(red, 31)], axis=2).round().astype(np.uint8)


def as_tensor(pixels):
    return torch.from_numpy(pixels).permute(2, 0, 1)


def saved(image, path, **options):
    image.save(path, **options)
    return path


def test_an_image_of_the_right_size_is_read_exactly(tmp_path):
    pixels = gradient(7, 7)
    path = saved(Image.fromarray(pixels), tmp_path / "a.png")
    read = read_image(path, 7)
    assert read.dtype == torch.uint8
    assert torch.equal(read, as_tensor(pixels))


@pytest.mark.parametrize("size", [16, (12, 25)])
@pytest.mark.parametrize(("interpolation", "crop_pct"), [("bicubic", 1.0), ("bilinear", 0.875)])
@pytest.mark.parametrize("shape", [(50, 31), (31, 50), (97, 64)])
def test_images_are_those_of_timms_transform(tmp_path, shape, size, interpolation, crop_pct):
    create_transform = pytest.importorskip("timm.data").create_transform
    noise = np.random.default_rng(0).integers(0, 256, (9, 8, 3), dtype=np.uint8)
    image = Image.fromarray(noise).resize(shape, Image.Resampling.BICUBIC)
    sides = (size, size) if isinstance(size, int) else size
    expected = create_transform(
        (3, *sides), interpolation=interpolation, crop_pct=crop_pct, normalize=False
    )(image)
    read = read_image(saved(image, tmp_path / "a.png"), size, interpolation, crop_pct)
    # Pillow computes the weights of a box in another order.
    assert (read.int() - expected.int()).abs().max() <= 1


def test_an_extreme_shape_takes_no_extreme_memory(tmp_path):
    path = saved(Image.new("RGB", (20000, 1), "red"), tmp_path / "line.png")
    assert read_image(path, 224).shape == (3, 224, 224)


def test_exif_orientation_is_applied(tmp_path):
    pixels = gradient(7, 7)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned clockwise by a quarter
    path = saved(Image.fromarray(pixels), tmp_path / "turned.png", exif=exif)
    assert torch.equal(read_image(path, 7), as_tensor(np.rot90(pixels, -1).copy()))


def test_modes_become_rgb(tmp_path):
    pixels = gradient(7, 7)
    rgb = Image.fromarray(pixels)
    palette = saved(rgb.quantize(49), tmp_path / "palette.png")
    assert (read_image(palette, 7).int() - as_tensor(pixels).int()).abs().max() <= 30
    cmyk = saved(rgb.convert("CMYK"), tmp_path / "cmyk.tif")
    assert torch.equal(read_image(cmyk, 7), as_tensor(pixels))
    grey = saved(Image.fromarray(pixels[:, :, 0]), tmp_path / "grey.png")
    assert torch.equal(read_image(grey, 7), as_tensor(pixels[:, :, :1]).expand(3, -1, -1))
    bits = saved(Image.fromarray(pixels[:, :, 0] > 100), tmp_path / "bits.png")
    assert read_image(bits, 7).unique().tolist() == [0, 255]


def test_sixteen_bits_keep_the_upper_eight(tmp_path):
    wide = np.arange(49, dtype=np.uint16).reshape(7, 7) * 1300
    expected = torch.from_numpy((wide >> 8).astype(np.uint8)).expand(3, -1, -1)
    assert expected.unique().numel() > 40  # clipping at 255 would leave two values
    for name in ("deep.png", "deep.tif"):
        path = saved(Image.fromarray(wide), tmp_path / name)
        assert torch.equal(read_image(path, 7), expected)
    path = saved(Image.fromarray(wide.astype(np.int32)), tmp_path / "deep.pgm")
    assert torch.equal(read_image(path, 7), expected)


def test_floats_are_from_0_to_1(tmp_path):
    floats = np.linspace(-0.5, 1.5, 49, dtype=np.float32).reshape(7, 7)
    path = saved(Image.fromarray(floats), tmp_path / "float.tif")
    expected = torch.from_numpy((floats.clip(0, 1) * 255).round().astype(np.uint8))
    assert torch.equal(read_image(path, 7), expected.expand(3, -1, -1))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparency_is_laid_on_white(tmp_path, mode):
    image = Image.new("RGBA", (7, 7), (0, 0, 0, 0))
    image.paste((0, 0, 0, 255), (0, 0, 7, 3))
    path = saved(image.convert(mode), tmp_path / "clear.png")
    read = read_image(path, 7)
    assert read[:, :3].max() == 0
    assert read[:, 3:].min() == 255


def test_a_large_jpeg_decoded_small_matches_the_exact_way(tmp_path):
    rgb = Image.fromarray(gradient(640, 480))
    path = saved(rgb, tmp_path / "large.jpg", quality=95)
    exact = rgb.crop((80, 0, 560, 480)).resize((32, 32), Image.Resampling.BICUBIC)
    difference = read_image(path, 32).int() - as_tensor(np.array(exact)).int()
    assert difference.abs().max() <= 4


def broken_files(folder):
    whole = saved(Image.fromarray(gradient(64, 64)), folder / "whole.jpg").read_bytes()
    (folder / "truncated.jpg").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.png").write_bytes(b"")
    (folder / "text.png").write_text("no image at all")
    return {"truncated.jpg": "truncated", "empty.png": "zero bytes", "text.png": "not an image"}


def test_broken_files_are_refused_with_the_reason(tmp_path):
    for name, reason in broken_files(tmp_path).items():
        with pytest.raises(UndecodableImageError, match=f"(?i){reason}"):
            read_image(tmp_path / name, 32)
    with pytest.raises(UndecodableImageError, match="no such file"):
        read_image(tmp_path / "absent.png", 32)


def test_a_broken_exif_block_leaves_the_image(tmp_path):
    pixels = gradient(7, 7)
    path = saved(Image.fromarray(pixels), tmp_path / "a.png", exif=b"Exif\0\0MM\0*\0\0\0\xff\xff")
    assert torch.equal(read_image(path, 7), as_tensor(pixels))


@pytest.mark.parametrize("suffix", [".jpg", ".png"])
def test_whole_pictures_are_shrunk_by_whole_factors(tmp_path, suffix):
    path = saved(Image.fromarray(gradient(97, 61)), tmp_path / f"a{suffix}")
    sizes = {area: read_picture(path, area).size for area in (97 * 61, 97 * 61 / 4.1, 97 * 61 / 40)}
    # A JPEG is decoded at 1/2, 1/4 or 1/8 of its size.
    small = (25, 16) if suffix == ".jpg" else (17, 11)
    assert list(sizes.values()) == [(97, 61), (49, 31), small]
    for size, area in ((7, 300.0), (23, 97 * 61.0), (2, 97 * 61.0)):
        read = read_file(path, Fit(size), area)
        assert torch.equal(read.image, read_image(path, size))
        assert np.array_equal(read.whole.numpy(), np.array(read_picture(path, area)))


def test_decode_files_numbers_what_failed_and_sums_the_rest(tmp_path):
    broken_files(tmp_path)
    names = ["whole.jpg", "empty.png", "whole.jpg", "truncated.jpg"] + ["whole.jpg"] * 67
    paths = [str(tmp_path / name) for name in names]
    pixels = decode_files(paths, Fit(11), 3, keep=True, title="")
    assert list(pixels.failures) == [1, 3]
    expected = read_image(paths[0], 11)
    good = [number for number in range(71) if number not in (1, 3)]
    assert all(torch.equal(pixels.images[number], expected) for number in good)
    flat = expected.long().flatten(1)
    assert torch.equal(pixels.sums[70], torch.stack([flat.sum(1), (flat * flat).sum(1)]))
    again = decode_files(paths, Fit(11), 3, keep=False, title="")
    assert again.images is None
    assert torch.equal(again.sums, pixels.sums)


def test_to_channels_keeps_grey_values_and_weighs_colours():
    grey = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    assert torch.equal(to_channels(grey.expand(1, 3, 16, 16), 1), grey)
    red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1)
    assert to_channels(red, 1).item() == 76
    assert to_channels(red, 3) is red


def test_pixel_sums_do_not_overflow():
    images = torch.full((2, 3, 301, 301), 255, dtype=torch.uint8)
    sums = pixel_sums(images)
    assert sums[0, 1, 0] == 255**2 * 301**2


def test_what_is_not_begun_when_it_is_stopped_is_not_waited_for(monkeypatch):
    begun = []

    def slow(path, *options):
        begun.append(path)
        time.sleep(0.01)
        return Read(torch.zeros((3, 2, 2), dtype=torch.uint8), None, None)

    def stopped(chunks, total, title):
        yield next(chunks)
        raise KeyboardInterrupt

    monkeypatch.setattr(scan, "read_file", slow)
    monkeypatch.setattr(scan, "with_progress", stopped)
    paths = [__file__] * 2000
    with pytest.raises(KeyboardInterrupt):
        scan.decode_files(paths, Fit(2), 3, keep=False, title="decoding")
    assert 0 < len(begun) < len(paths) / 2


def test_without_a_terminal_it_says_how_far_it_is(monkeypatch, capfd):
    monkeypatch.setattr(scan, "_SILENT_FOR", 0)
    assert len(list(scan.with_progress(iter([32, 32, 6]), 70, "decoding images"))) == 70
    said = capfd.readouterr().out.splitlines()
    assert said == [f"decoding images: {done} of 70" for done in (32, 64, 70)]
