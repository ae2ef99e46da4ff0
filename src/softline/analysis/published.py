"""ImageNet-1K results as both papers publish them for their models and their rivals.

Multiply-adds are what the papers call FLOPs. SOFT's leave out the iterations of Newton's method. Models that are in
SOFT's Figs. 1a and 3 alone have no printed numbers and are not listed. InLine's rivals are those of the figure in its
release; its softmax baselines have the numbers that FLatten (ICCV 2023) and Agent Attention (ECCV 2024) print for them.
The run times of InLine's figure were read from the picture, to about 1 %.
"""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from softline.measure.catalog import REPORTED_GMACS, REPORTED_TOP1

Paper = Literal["soft", "inline"]
Entry: TypeAlias = tuple[str, float, float | None, float]
"""Name, millions of parameters, billions of multiply-adds, top-1 accuracy in percent."""


@dataclass(frozen=True)
class Published:
    """A model as a paper lists it."""

    paper: Paper
    """The paper that compares itself with the model."""
    family: str
    name: str
    parameters: float
    macs: float | None
    """Multiply-adds of one image; None if the paper gives none."""
    top1: float
    """Accuracy in percent."""
    source: str
    """Where the numbers are printed."""
    image_size: int = 224
    model: str | None = None
    """The name in softline."""
    per_second: float | None = None
    """Images per second of inference."""
    device: str | None = None
    """The device of that speed."""


TABLE_2, TABLE_3 = "SOFT, Table 2", "SOFT, Table 3"
SOFT_RELEASE, INLINE_RELEASE = "README of SOFT's release", "README of InLine's release"
INLINE_FIGURE = "classification figure of InLine's release"
BASELINES = "FLatten and Agent Attention, baselines"

V100 = {"Transformer": 3240, "Linformer": 3779, "Performer": 3657, "Nyströmformer": 3518}
V100 |= {"SOFT-Tiny": 3436, "SOFT++-Tiny": 3436}
"""Images per second of inference on a V100, as in Table 2 of SOFT."""
RTX_3090 = {
    **{"PVT-S": 0.82, "PVT-M": 1.23, "PVT-L": 1.76, "InLine-PVT-S": 1.02, "InLine-PVT-M": 1.55, "InLine-PVT-L": 2.22},
    **{"Swin-T": 1.01, "Swin-S": 1.70, "Swin-B": 2.41, "InLine-Swin-T": 0.95, "InLine-Swin-S": 1.64},
}
"""Milliseconds for an image on an RTX 3090, read from the speed figure of InLine's release."""


def _rows(
    paper: Paper, family: str, source: str, *entries: Entry, image_size: int = 224, models: tuple[str, ...] = ()
) -> list[Published]:
    """The rows of a family; ``models`` are their names in softline, if they have one."""
    names: tuple[str | None, ...] = models or (None,) * len(entries)
    return [
        Published(
            *(paper, family, name, 1e6 * millions, None if billions is None else 1e9 * billions, top1, source),
            image_size,
            model,
            *_speed(paper, name),
        )
        for (name, millions, billions, top1), model in zip(entries, names, strict=True)
    ]


def _own(paper: Paper, family: str, source: str, **models: tuple[str, float]) -> list[Published]:
    """The rows of softline's models by their names: the paper's name and millions of parameters.

    The paper's name ends with the image size if it is not 224.
    """
    rows = []
    for model, (name, millions) in models.items():
        entry = (name, millions, REPORTED_GMACS[model], REPORTED_TOP1[model])
        size = int(name.partition(", ")[2] or 224)
        rows += _rows(paper, family, source, entry, image_size=size, models=(model,))
    return rows


def _speed(paper: Paper, name: str) -> tuple[float | None, str | None]:
    if paper == "soft":
        return (V100[name], "V100") if name in V100 else (None, None)
    return (1e3 / RTX_3090[name], "RTX 3090") if name in RTX_3090 else (None, None)


def _released(family: str, title: str, prefix: str) -> list[Published]:
    sizes = {"tiny": 13, "small": 24, "medium": 45, "large": 64, "huge": 87}
    rows = {f"{prefix}_release_{size}": (f"{title}-{size.capitalize()} (release)", n) for size, n in sizes.items()}
    return _own("soft", family, SOFT_RELEASE, **rows)


SOFT_ROWS = [
    *_rows("soft", "Transformer", TABLE_2, ("Transformer", 13, 3.9, 80.0)),
    *_rows("soft", "Linformer", TABLE_2, ("Linformer", 13, 1.9, 78.2)),
    *_rows("soft", "Performer", TABLE_2, ("Performer", 13, 2.2, 76.1)),
    *_rows("soft", "Nyströmformer", TABLE_2, ("Nyströmformer", 13, 2.0, 80.1)),
    *_rows(
        *("soft", "ResNet", TABLE_3),
        *[("ResNet-18", 11, 1.9, 69.8), ("ResNet-50", 25, 4.1, 78.5), ("ResNet-101", 44, 7.9, 79.8)],
    ),
    *_rows(
        *("soft", "PVT", TABLE_3),
        *[("PVT-Tiny", 13, 1.9, 75.1), ("PVT-Small", 24, 4.0, 79.8), ("PVT-Medium", 44, 7.0, 81.2)],
    ),
    *_rows("soft", "ConViT", TABLE_3, ("ConViT-Ti+", 10, 2.0, 76.7)),
    *_rows("soft", "CoaT", TABLE_3, ("CoaT-Lite Mini", 11, 2.0, 78.9)),
    *_rows("soft", "LambdaNets", TABLE_3, ("LambdaNets-50", 16, None, 78.9)),
    *_rows("soft", "ViP", TABLE_3, ("ViP-Ti", 13, 1.7, 79.0)),
    *_rows(
        *("soft", "Swin", TABLE_3),
        *[("Swin-T", 29, 4.5, 81.3), ("Swin-S", 50, 8.7, 83.0), ("Swin-B", 88, 15.4, 83.3)],
    ),
    *_rows("soft", "Twins-SVT", TABLE_3, ("Twins-SVT-S", 24, 3.7, 81.7), ("Twins-SVT-L", 99, 14.8, 83.3)),
    *_rows(
        *("soft", "CoAtNet", TABLE_3),
        *[("CoAtNet-0", 25, 4.2, 81.6), ("CoAtNet-1", 42, 8.4, 83.3), ("CoAtNet-2", 75, 15.7, 84.1)],
    ),
    *_rows("soft", "DeiT III", TABLE_3, ("DeiT III-S", 22, 4.6, 81.4), ("DeiT III-B", 87, 15.5, 83.8)),
    *_rows(
        *("soft", "SwinV2", TABLE_3),
        *[("SwinV2-T", 29, 4.5, 81.7), ("SwinV2-S", 50, 8.7, 83.6), ("SwinV2-B", 88, 15.4, 84.1)],
        image_size=256,
    ),
    # ConvNeXt-B is printed as ConvNext-S
    *_rows(
        "soft",
        "ConvNeXt",
        TABLE_3,
        ("ConvNeXt-T", 29, 4.5, 82.1),
        ("ConvNeXt-S", 50, 8.7, 83.1),
        ("ConvNeXt-B", 89, 15.4, 83.8),
    ),
    *_rows("soft", "ViT", TABLE_3, ("ViT-Small/16", 48, 9.9, 80.8)),
    *_rows("soft", "CaiT", TABLE_3, ("CaiT-S36", 88, 13.9, 83.3)),
    *_own(
        *("soft", "SOFT", TABLE_3),
        soft_tiny=("SOFT-Tiny", 13),
        soft_small=("SOFT-Small", 27),
        soft_medium=("SOFT-Medium", 48),
        soft_large=("SOFT-Large", 85),
    ),
    *_own(
        *("soft", "SOFT++", TABLE_3),
        softpp_tiny=("SOFT++-Tiny", 13),
        softpp_small=("SOFT++-Small", 27),
        softpp_medium=("SOFT++-Medium", 48),
        softpp_large=("SOFT++-Large", 85),
    ),
    *_released("SOFT, released", "SOFT", "soft"),
    *_released("SOFT++, released", "SOFT++", "softpp"),
]
"""Table 3 of SOFT and, for its Tiny network with other attentions, Table 2."""

INLINE_ROWS = [
    *_rows("inline", "DeiT", BASELINES, ("DeiT-T", 5.7, 1.2, 72.2), ("DeiT-S", 22.1, 4.6, 79.8)),
    *_rows("inline", "DeiT", BASELINES, ("DeiT-B", 86.6, 17.6, 81.8)),
    *_rows("inline", "PVT", BASELINES, ("PVT-T", 13.2, 1.9, 75.1), ("PVT-S", 24.5, 3.8, 79.8)),
    *_rows("inline", "PVT", BASELINES, ("PVT-M", 44.2, 6.7, 81.2), ("PVT-L", 61.4, 9.8, 81.7)),
    *_rows("inline", "Swin", BASELINES, ("Swin-T", 29, 4.5, 81.3), ("Swin-S", 50, 8.7, 83.0)),
    *_rows("inline", "Swin", BASELINES, ("Swin-B", 88, 15.4, 83.5)),
    *_rows("inline", "Swin", BASELINES, ("Swin-B, 384", 88, 47.0, 84.5), image_size=384),
    *_rows("inline", "CSwin", INLINE_FIGURE, ("CSwin-T", 23, 4.3, 82.7), ("CSwin-S", 35, 6.9, 83.6)),
    *_rows("inline", "CSwin", INLINE_FIGURE, ("CSwin-B", 78, 15.0, 84.2)),
    *_rows("inline", "CSwin", INLINE_FIGURE, ("CSwin-B, 384", 78, 47.0, 85.4), image_size=384),
    *_rows("inline", "PVTv2", INLINE_FIGURE, ("PVTv2-B2", 25, 4.0, 82.0), ("PVTv2-B3", 45, 7.9, 83.2)),
    *_rows("inline", "PVTv2", INLINE_FIGURE, ("PVTv2-B5", 82, 11.8, 83.8)),
    *_rows("inline", "ConvNeXt", INLINE_FIGURE, ("ConvNeXt-T", 29, 4.5, 82.1), ("ConvNeXt-S", 50, 8.7, 83.1)),
    *_rows("inline", "ConvNeXt", INLINE_FIGURE, ("ConvNeXt-B", 89, 15.4, 83.8)),
    *_rows("inline", "ConvNeXt", INLINE_FIGURE, ("ConvNeXt-B, 384", 89, 45.0, 85.1), image_size=384),
    # Focal-S is printed as Focal-T
    *_rows("inline", "Focal", INLINE_FIGURE, ("Focal-T", 29, 4.9, 82.2), ("Focal-S", 51, 9.4, 83.6)),
    *_rows("inline", "Focal", INLINE_FIGURE, ("Focal-B", 90, 16.4, 84.0)),
    *_rows("inline", "MViTv2", INLINE_FIGURE, ("MViTv2-T", 24, 4.7, 82.3), ("MViTv2-S", 35, 7.0, 83.6)),
    *_rows("inline", "MViTv2", INLINE_FIGURE, ("MViTv2-B, 384", 52, 36.7, 85.2), image_size=384),
    *_rows("inline", "DiNAT", INLINE_FIGURE, ("DiNAT-T", 28, 4.3, 82.7)),
    *_rows("inline", "NAT", INLINE_FIGURE, ("NAT-B", 90, 13.7, 84.3)),
    *_rows("inline", "CaiT", INLINE_FIGURE, ("CaiT-S36, 384", 68, 48.0, 85.0), image_size=384),
    *_own(
        *("inline", "InLine-DeiT", INLINE_RELEASE),
        inline_deit_tiny=("InLine-DeiT-T", 6.5),
        inline_deit_small=("InLine-DeiT-S, 288", 16.7),
        inline_deit_base=("InLine-DeiT-B, 448", 23.8),
    ),
    *_own(
        *("inline", "InLine-PVT", INLINE_RELEASE),
        inline_pvt_tiny=("InLine-PVT-T", 12.0),
        inline_pvt_small=("InLine-PVT-S", 21.6),
        inline_pvt_medium=("InLine-PVT-M", 37.6),
        inline_pvt_large=("InLine-PVT-L", 50.2),
    ),
    *_own(
        *("inline", "InLine-Swin", INLINE_RELEASE),
        inline_swin_tiny=("InLine-Swin-T", 30),
        inline_swin_small=("InLine-Swin-S", 50),
        inline_swin_base=("InLine-Swin-B", 88),
    ),
    # the parameters in the README of the release are wrong
    *_own(
        *("inline", "InLine-CSwin", INLINE_FIGURE),
        inline_cswin_tiny=("InLine-CSwin-T", 21),
        inline_cswin_small=("InLine-CSwin-S", 33),
        inline_cswin_base=("InLine-CSwin-B", 73),
        inline_cswin_base_384=("InLine-CSwin-B, 384", 73),
    ),
]
"""The figure of InLine's release, and the softmax models whose attention it replaces."""

PUBLISHED: tuple[Published, ...] = (*SOFT_ROWS, *INLINE_ROWS)
