import dataclasses
import functools
import io
import re
from html.parser import HTMLParser

import pytest
import torch
from PIL import Image

from softline.analysis.heatmap import HeatMap
from softline.experiments.compare import Comparison, CurvePoint, Run, VariantResult
from softline.experiments.model_cost import ModelCost
from softline.measure.scaling import ScalingRow
from softline.report.examples import Example
from softline.report.figures import contrast_png, draw_panel, heat_map_svg
from softline.report.findings import switched_off
from softline.report.page import Report, render

VOID = {"meta", "br", "img", "hr", "link", "input"}


class Page(HTMLParser):
    """Balanced tags, ids that occur once, and what the page would load."""

    def __init__(self, text):
        super().__init__()
        self.open, self.ids, self.tags, self.loads, self.links = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.handle_startendtag(tag, attributes)
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        for name, value in attributes:
            if name == "id":
                self.ids.append(value)
            if tag == "a" and name == "href":
                self.links.append(value)
            elif name in ("src", "href", "xlink:href", "data", "srcset", "poster"):
                self.loads.append(value)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another element"


def row(name, *, score=0.861, seeds=1):
    cost = ModelCost(
        parameters=693_738, macs=5_800_000, peak_bytes=402_653, train_per_second=806, infer_per_second=2676
    )
    curve = (CurvePoint(1.0, 1.2, 0.7), CurvePoint(2.0, 0.9, score))
    runs = tuple(Run(seed, 186, score + 0.01 * seed, None, curve, "top1") for seed in range(seeds))
    return VariantResult(name, {}, cost, runs)


def comparison(*rows, title="A look", seeds=1):
    recipe = {
        "model": {"name": "softpp_micro"},
        "data": {"source": "embedded", "image_size": 28},
        "schedule": {"epochs": 2},
    }
    machine = {"cpu": "a & b", "cores": 2, "threads": 2, "softline": "0", "torch": "2", "python": "3"}
    rows = rows or tuple(row(name, seeds=seeds) for name in ("softmax", "softpp", "inline"))
    return Comparison(title, "", "top1", "images", tuple(range(seeds)), rows, recipe, machine)


def scaling(softpp=(4.0, 20.0)):
    times = {"softmax": (2.0, 400.0), "softpp": softpp, "inline": (1.0, 10.0)}
    return [
        ScalingRow(size, tokens, name, times[name][index], macs=tokens**2, peak_bytes=2**20)
        for index, (size, tokens) in enumerate([(224, 784), (896, 12_544)])
        for name in times
    ]


def example(label="Coat", low=-0.25):
    values = torch.linspace(low, 0.5, 49).reshape(7, 7)
    maps = {name: heat_map(values, (1, 2)) for name in ("softmax", "softpp", "inline")}
    return Example("test/0", torch.rand(1, 28, 28), label, maps, dict.fromkeys(maps, ("Coat", 0.75)))


def heat_map(values, query=(0, 0)):
    return HeatMap("model", "test/0", "stage 1, block 1, head 1", query, (7, 7), values)


@functools.cache
def usual_page():
    return page(reused=())


def page(**changes):
    if not changes:
        return usual_page()
    arguments = {
        "comparison": comparison(),
        "scaling": scaling(),
        "examples": [example()],
        "without_attention": {"softmax": 0.85},
    }
    return render(Report(**{**arguments, "command": "softline quickstart", "seconds": 99.4, **changes}))


def text_of(html):
    html = re.sub(r"<style>.*?</style>", "", html, flags=re.DOTALL)
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_the_page_is_valid_html():
    found = Page(page())
    assert found.open == []
    assert len(set(found.ids)) == len(found.ids)
    assert found.tags.count("svg") == 5 + 4, "two learning curves, three costs, one image and its three maps"


def test_references_inside_the_figures_find_their_target():
    html = page()
    ids = Page(html).ids
    used = re.findall(r"url\(#(.*?)\)", html) + re.findall(r'href="#(.*?)"', html)
    assert used
    assert set(used) <= set(ids)


def test_nothing_is_loaded_from_elsewhere():
    html = page()
    found = Page(html)
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in found.loads)
    assert not {"script", "link", "iframe", "img"} & set(found.tags)
    assert not re.search(r"@import|url\((?!#)", html)
    # the papers are links, which nothing follows by itself
    assert len(re.findall("https?://", html)) == len(found.links)


def test_every_section_is_there():
    text = text_of(page())
    for part in ("Side by side", "How they learn", "What one layer costs as images grow", "Where they look"):
        assert part in text
    for fact in ("softline quickstart", "99 seconds", "a &amp; b, 2 cores", "torch 2", "seed 0"):
        assert fact in text


def test_the_table_has_the_numbers_of_the_comparison():
    html = page(comparison=comparison(row("softmax", score=0.8234), row("softpp"), row("inline")))
    first = re.search(r"<tbody><tr>(.*?)</tr>", html)[1]
    cells = [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td>(.*?)</td>", first)]
    assert cells == ["softmax", "82.3 %", "85.0 %", "693,738", "5.80 M", "0.38 MiB", "806", "2,676"]


def test_several_seeds_have_a_spread():
    text = text_of(page(comparison=comparison(seeds=3)))
    assert "87.1 % ± 1.0" in text
    assert "± is the standard deviation" in text


def test_a_diverged_run_is_named():
    diverged = VariantResult("softpp", {}, row("softpp").cost, (Run(0, 3, None, "the loss is nan", (), "top1"),))
    text = text_of(page(comparison=comparison(row("softmax"), diverged)))
    assert "1 run diverged" in text


def test_names_are_escaped():
    html = page(comparison=comparison(title="<script>alert(1)</script>"), examples=[example(label='"><b>x')])
    assert "<script" not in html
    assert "<b>x" not in html
    assert Page(html).open == []


def test_what_is_said_about_speed_is_computed():
    text = text_of(page())
    assert "SOFT++ was faster than softmax from 896 x 896 pixels (12,544 tokens) on" in text
    assert "it took 20 ms instead of 400 ms (20 times as fast)" in text
    assert "InLine was faster than softmax from 224 x 224 pixels (784 tokens) on" in text
    assert "SOFT++ was faster than softmax at none of these sizes." in text_of(page(scaling=scaling((3.0, 500.0))))


def test_negative_weights_are_named_where_they_occur():
    assert "Negative weights" in text_of(page())
    assert "Negative weights" not in text_of(page(examples=[example(low=0.1)]))


def test_faint_weights_are_named():
    even = heat_map(torch.full((7, 7), 1e-8))
    text = text_of(page(examples=[dataclasses.replace(example(), maps={"softmax": even, "softpp": even})]))
    assert "The weights of SOFT++ add up to at most 5e-07 in these rows" in text
    assert "passes on next to nothing" not in text_of(page())


@pytest.mark.parametrize(("off", "said"), [(0.85, "not which attention is better"), (0.5, "depends on it")])
def test_what_the_attention_adds_is_said(off, said):
    text = switched_off([row("softmax", score=0.86)], {"softmax": off})
    assert f"softmax +{100 * (0.86 - off):.1f}" in text
    assert said in text


def test_what_was_reused_is_said():
    assert "SOFT++ had been trained" in text_of(page(reused=["softpp"]))
    assert "had been trained" not in text_of(page())


def test_every_attention_has_one_colour_in_all_sections():
    renamed = {"softmax": "softmax", "softpp": "reformer", "inline": "linear"}
    rows = [dataclasses.replace(one, attention=renamed[one.attention]) for one in scaling()]
    html = page(comparison=comparison(*map(row, renamed.values())), scaling=rows)
    colors = set(re.findall(r"--hue: (#[0-9a-f]{6})", html))
    assert len(colors) == 2
    assert set(re.findall(r"stroke: (#[0-9a-f]{6}); stroke-width: 2;", html)) == colors
    assert "stroke: var(--softmax)" in html


def test_pictures_have_a_description_with_their_numbers():
    html = page()
    assert len(re.findall(r'<svg [^>]*role="img" aria-label="[^"]{20,}"', html)) == html.count("<svg ")
    assert "softmax: 2 at 224², 400 at 896²" in html


def test_curves_follow_the_pages_colours():
    svg = draw_panel("x", "title", [], {}, xlabel="epoch")
    assert "currentColor" in svg
    assert "#010203" not in svg


def test_the_frame_is_around_the_query():
    assert 'x="8" y="4" width="4" height="4"' in heat_map_svg(example(), None, "")


def test_colours_tell_more_from_less():
    pixels = Image.open(io.BytesIO(contrast_png(torch.tensor([[-1.0, 0.0, 1.0]]))))
    cool, even, warm = (pixels.getpixel((x, 0)) for x in range(3))
    assert cool[2] > cool[0]
    assert warm[0] > warm[2]
    assert even[3] == 0
    assert cool[3] == warm[3] > 0
