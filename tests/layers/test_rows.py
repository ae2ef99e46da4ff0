import pytest
import torch
import torch.nn.functional as F
from torch import nn

from softline.errors import UserError
from softline.heads import segmenters as segmenters_module
from softline.layers import rows as rows_module
from softline.layers.bands import CPU_BAND_NUMBERS, RETURNING_BANDS, shrunk_bands
from softline.layers.rows import added, doubled, each_neighbourhood, group_normed, resized, rows_likeliest, rows_of
from tests.heads.test_segmenters import EVERY, segmenters

CPU = torch.device("cpu")


def in_bands(rows, step=3):
    """Read all rows, a few at a time."""
    starts = range(0, rows.size[0], step)
    return torch.cat([rows.read(first, min(first + step, rows.size[0])) for first in starts], dim=2)


@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("size", [(20, 30), (40, 60), (33, 17), (7, 30), (20, 41), (1, 1), (400, 31)])
def test_resizing_row_by_row_is_torchs(size, align):
    maps = torch.randn(2, 3, 20, 30)
    expected = F.interpolate(maps, size=size, mode="bilinear", align_corners=align)
    assert torch.allclose(in_bands(resized(rows_of(maps), size, align_corners=align)), expected, atol=1e-5)


def test_doubling_and_neighbourhoods_and_group_norm():
    maps, conv, norm = torch.randn(2, 6, 13, 9).double(), nn.Conv2d(6, 8, 5, padding=2).double(), nn.GroupNorm(4, 8)
    norm = norm.double()
    nn.init.normal_(norm.weight)
    nn.init.normal_(norm.bias)
    with torch.no_grad():
        assert torch.equal(in_bands(doubled(rows_of(maps))), F.interpolate(maps, scale_factor=2.0))
        convolved = each_neighbourhood(conv, rows_of(maps), reach=2)
        assert torch.allclose(in_bands(convolved), conv(maps), atol=1e-12)
        with shrunk_bands(2 * 8 * 9 / CPU_BAND_NUMBERS):
            assert torch.allclose(in_bands(group_normed(norm, convolved, CPU)), norm(conv(maps)), atol=1e-12)


def test_a_stored_map_is_computed_once_in_bands():
    maps, conv, read = torch.randn(2, 6, 13, 9).double(), nn.Conv2d(6, 8, 3, padding=1).double(), []

    def convolve(part):
        read.append(part.shape[2])
        return conv(part)

    with torch.no_grad(), shrunk_bands(3 * 8 * 9 / CPU_BAND_NUMBERS):
        stored = each_neighbourhood(convolve, rows_of(maps)).stored(8 * 9, CPU)
        assert read == [4, 5, 5, 5, 2]
        assert torch.allclose(stored.whole(), conv(maps), atol=1e-12)
        assert torch.equal(in_bands(stored), stored.whole())
        assert len(read) == 5


def test_logits_that_are_no_numbers_are_refused():
    logits = torch.randn(1, 3, 8, 8)
    logits[0, 1, 5, 5] = torch.nan
    with pytest.raises(UserError, match="not numbers"):
        rows_likeliest(rows_of(logits), 24, CPU)


@EVERY
@pytest.mark.parametrize("size", [(96, 64), (75, 133)])
@pytest.mark.parametrize("wanted", [None, (130, 50)])
def test_large_images_are_labelled_in_bands_as_they_are_whole(kind, size, wanted, monkeypatch):
    model = segmenters()[kind]().double().eval()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    nn.init.normal_(model.classifier[-1].weight)
    images, wanted = torch.randn(2, 3, *size).double(), wanted or size
    with torch.no_grad():
        logits = F.interpolate(model(images), size=wanted, mode="bilinear", align_corners=False)
        whole = model(images, wanted)
        decoded = []
        decode = model.decode_rows
        monkeypatch.setattr(model, "decode_rows", lambda *given: decoded.append(given) or decode(*given))
        monkeypatch.setattr(segmenters_module, "WHOLE_NUMBERS", 0)
        with shrunk_bands(2**12 / CPU_BAND_NUMBERS):
            found = model(images, wanted)
    assert decoded
    first, second = logits.topk(2, dim=1).values.unbind(1)
    # rounding may decide where two classes are equally probable
    clear = first - second > 1e-5 * logits.abs().max()
    assert clear.float().mean() > 0.99
    for labels in (whole, found):
        assert labels.dtype == torch.int64
        assert torch.equal(labels[clear], logits.argmax(1)[clear])


@pytest.mark.parametrize(("classes", "dtype"), [(256, torch.uint8), (257, torch.int16)])
def test_labels_have_the_smallest_dtype_that_has_all_classes(classes, dtype):
    logits = torch.randn(1, classes, 4, 5)
    logits[0, -1, 2, 3] = 99
    labels = rows_likeliest(rows_of(logits), classes * 5, CPU)
    assert labels.dtype == dtype
    assert torch.equal(labels.long(), logits.argmax(1))


def test_memory_is_returned_after_every_few_bands(monkeypatch):
    returned = []
    monkeypatch.setattr(rows_module, "return_memory", lambda: returned.append(len(read)))
    read = []
    for rows, _ in rows_of(torch.randn(1, 1, 2 * RETURNING_BANDS + 3, 4)).bands(CPU_BAND_NUMBERS, CPU):
        read.append(rows)
    assert len(read) == 2 * RETURNING_BANDS + 3
    assert returned == [RETURNING_BANDS, 2 * RETURNING_BANDS]


def test_sums_do_not_overwrite_their_maps():
    maps = torch.randn(3, 1, 2, 5, 4)
    kept = maps.clone()
    assert torch.allclose(in_bands(added([rows_of(part) for part in maps])), maps.sum(0))
    assert torch.equal(maps, kept)
