"""The page about a linearised model: its numbers, and the sentences that are computed from them."""

import functools
import re

import pytest
import torch

from softline.analysis.heatmap import HeatMap
from softline.linearizing.work import Linearized
from softline.report.figures import CostPoint, draw_cost
from softline.report.linearization import render_linearization
from softline.report.linearization_findings import cost_pairs, impossible, likeness, sort_layers, speed
from softline.report.linearization_maps import MapExample
from tests.report.test_page import Page, text_of

LAYERS = [f"blocks.{index}.attn" for index in range(12)]
BEFORE = {layer: 2.0 + 0.1 * index for index, layer in enumerate(LAYERS)}
AFTER = {layer: 0.3 + 0.01 * index for index, layer in enumerate(LAYERS)}


def scores(size, top1, agreement, divergence):
    return {"size": size, "top1": top1, "agreement": agreement, "divergence": divergence}


def step(name, *measured, errors=None):
    checkpoint = None if name in ("original", "replaced") else f"out/{name}.pt"
    return {"name": name, "checkpoint": checkpoint, "scores": list(measured), "errors": errors or {}}


STEPS = {
    "original": step("original", scores(96, 0.812, 1.0, 0.0), scores(192, 0.823, 1.0, 0.0)),
    "replaced": step("replaced", scores(96, 0.101, 0.12, 3.2), scores(192, 0.1, 0.11, 3.3), errors=BEFORE),
    "transferred": step("transferred", scores(96, 0.7, 0.75, 0.5), scores(192, 0.69, 0.74, 0.6), errors=AFTER),
    "mixed": step("mixed", scores(96, 0.77, 0.86, 0.2), scores(192, 0.76, 0.85, 0.3), errors=AFTER),
    "finetuned": step("finetuned", scores(96, 0.787, 0.934, 0.031), scores(192, 0.79, 0.92, 0.042)),
}


def cost(case, size, milliseconds, mebibytes, speedup):
    measured = {"milliseconds": milliseconds, "spread": milliseconds / 10, "speedup": speedup, "macs": 10**6 * size}
    peak = {"peak_bytes": int(mebibytes * 2**20), "rounds": [milliseconds] * 3}
    return {"case": case, "mode": "infer", "size": size, "label": f"{size}x{size}", "tokens": size, **measured, **peak}


COST = [
    cost("original", 224, 10.0, 4.0, 1.0),
    cost("linearized", 224, 12.5, 4.1, 0.8),
    cost("original", 1024, 900.0, 640.0, 1.0),
    cost("linearized", 1024, 300.0, 64.0, 3.0),
]


def failed(case, size, reason):
    place = {"case": case, "mode": "infer", "size": size, "label": f"{size}x{size}", "tokens": size}
    return {**place, "rounds": [], "failure": reason}


def result(**changes):
    """A linearised model with 12 layers, all of them replaced, unless ``changes`` says otherwise."""
    recipe = {
        "model": {"name": "deit_tiny", "replace": {"options": {}}},
        "data": {"source": "flowers", "image_size": 96},
        "schedule": {"epochs": 2.0},
    }
    machine = {"cpu": "a & b", "cores": 2, "threads": 2, "softline": "0", "torch": "2", "python": "3"}
    content = {
        "source": "teacher.pt",
        "attention": "inline",
        "replaced": LAYERS,
        "kept": [],
        "effects": [],
        "steps": [STEPS[name] for name in ("original", "replaced", "transferred", "finetuned")],
        "cost": COST,
        "images": 12_800,
        "recipes": {"transfer": recipe, "finetune": {**recipe, "schedule": {"epochs": 1.0}}},
        "environment": machine,
    }
    return Linearized.from_dict({**content, **changes})


def mixed():
    """Layers 0 and 3 keep their attention, because replacing them changes the output most."""
    divergences = [0.9, 0.01, 0.02, 0.8, *[0.03] * 8]
    effects = [
        {"layer": layer, "agreement": 0.95 - value / 10, "divergence": value}
        for layer, value in zip(LAYERS, divergences, strict=True)
    ]
    kept = [LAYERS[0], LAYERS[3]]
    replaced = [layer for layer in LAYERS if layer not in kept]
    return result(effects=effects, kept=kept, replaced=replaced, steps=list(STEPS.values()))


def example(label="Coat", low=-0.25):
    old, new = torch.linspace(0.01, 0.5, 49).reshape(7, 7), torch.linspace(low, 0.4, 49).reshape(7, 7)
    pair = tuple(HeatMap(name, "val/0", "", (3, 3), (7, 7), values) for name, values in (("a", old), ("b", new)))
    maps = dict.fromkeys((LAYERS[0], LAYERS[6], LAYERS[11]), pair)
    return MapExample("val/0.jpg", torch.rand(3, 28, 28), label, maps, (("Coat", 0.75), ("Bag", 0.5)))


def render(linearized, maps=()):
    return render_linearization(linearized, maps, command="softline linearize teacher.pt", seconds=99.4)


@functools.cache
def usual_page():
    return render(result(), [example()])


@functools.cache
def mixed_page():
    return render(mixed())


def rows_of(html, title):
    """The texts of the cells of the table in a section."""
    section = html[html.index(f"<h2>{title}</h2>") :]
    body = section[section.index("<tbody>") : section.index("</tbody>")]
    return [
        [re.sub(r"<[^>]*>", " ", cell).strip() for cell in re.findall(r"<td.*?>(.*?)</td>", row)]
        for row in re.findall(r"<tr>(.*?)</tr>", body)
    ]


# the page


@pytest.mark.parametrize("page", [usual_page, mixed_page])
def test_the_page_is_valid_html(page):
    found = Page(page())
    assert found.open == []
    assert len(set(found.ids)) == len(found.ids)
    used = re.findall(r"url\(#(.*?)\)", page()) + re.findall(r'href="#(.*?)"', page())
    assert set(used) <= set(found.ids)


def test_nothing_is_loaded_from_elsewhere():
    html = usual_page()
    found = Page(html)
    assert all(value.startswith(("data:image/png;base64,", "#")) for value in found.loads)
    assert not {"script", "link", "iframe", "img"} & set(found.tags)
    assert not re.search(r"@import|url\((?!#)", html)
    # the paper is a link, which nothing follows by itself
    assert len(re.findall("https?://", html)) == len(found.links) == 1
    assert html.index("https://") > html.index("<footer>")


def test_sections_come_in_order():
    titles = re.findall("<h2>(.*?)</h2>", mixed_page())
    assert titles == [
        "Step by step",
        "Layer by layer",
        "Which layers are hardest to replace",
        "What it costs as images grow",
        "Where they look",
    ]


def test_the_cards_show_both_accuracies_and_the_agreement():
    cards = re.findall(r'<span class="name">(.*?)</span><b>(.*?)</b>', usual_page())
    assert cards == [("Original", "81.2 %"), ("Linearised", "78.7 %"), ("Agreement", "93.4 %")]


def test_the_facts_of_the_run_are_there():
    text = text_of(usual_page())
    for fact in (
        "softline linearize teacher.pt",
        "deit_tiny from teacher.pt",
        "12 replaced",
        "transfer for 2 epochs and fine-tuning for 1 epoch; 12,800 images",
        "flowers , 96 x 96 pixels",
        "a &amp; b, 2 cores",
        "torch 2",
        "out/finetuned.pt",
        "99 seconds",
    ):
        assert fact in text
    assert "in all of its 12 layers" in text
    assert "softmax kept in blocks.0.attn and blocks.3.attn" in text_of(mixed_page())
    assert "in 10 of its 12 layers" in text_of(mixed_page())


def test_every_step_has_its_scores_at_every_size():
    found = {cells[0].split()[0]: cells[1:] for cells in rows_of(mixed_page(), "Step by step")}
    assert list(found) == ["original", "replaced", "transferred", "mixed", "fine-tuned"]
    assert found["original"] == ["81.2 %", "100.0 %", "0.000", "82.3 %", "100.0 %", "0.000"]
    assert found["fine-tuned"] == ["78.7 %", "93.4 %", "0.031", "79.0 %", "92.0 %", "0.042"]


def test_the_distance_from_the_original_is_computed():
    text = text_of(mixed_page())
    assert "is 2.5 points less accurate than the original (78.7 % instead of 81.2 % top-1)" in text
    assert "gives 93.4 % of the validation images the class that the original gives them" in text
    assert "75.0 % after transfer, 86.0 % with 2 layers as before and 93.4 % after fine-tuning" in text


@pytest.mark.parametrize(
    ("top1", "said"), [(0.832, "is 2.0 points more accurate than"), (0.812, "is as accurate as the original")]
)
def test_a_model_may_be_as_good_as_its_original(top1, said):
    last = step("finetuned", scores(96, top1, 0.9, 0.1), scores(192, 0.8, 0.9, 0.1))
    assert said in text_of(render(result(steps=[STEPS["original"], STEPS["replaced"], last])))


@pytest.mark.parametrize(("far", "said"), [(0.92, "keep the agreement"), (0.91, "The agreement falls on larger")])
def test_what_more_pixels_do_is_said(far, said):
    last = step("finetuned", scores(96, 0.8, 0.934, 0.1), scores(192, 0.8, far, 0.1))
    text = text_of(render(result(steps=[STEPS["original"], STEPS["replaced"], last])))
    assert said in text
    assert f"at 192 x 192 pixels it is {100 * far:.1f} % (\N{MINUS SIGN}{93.4 - 100 * far:.1f} points)" in text


def test_without_labels_only_the_agreement_is_shown():
    steps = [
        {**STEPS[name], "scores": [{**one, "top1": None} for one in STEPS[name]["scores"]]}
        for name in ("original", "replaced", "finetuned")
    ]
    html = render(result(steps=steps), [example(label=None)])
    text = text_of(html)
    assert re.findall(r'<span class="name">(.*?)</span>', html) == ["Agreement"]
    assert "top-1" not in text.lower()
    assert rows_of(html, "Step by step")[-1][1:] == ["93.4 %", "0.031", "92.0 %", "0.042"]
    assert "the linearised model gives 93.4 % of the validation images" in text
    assert not {"✓", "✗", "None"} & set(re.findall(r"[✓✗]|None", text))
    assert "0.jpg" in text


def test_a_size_that_cannot_be_used_says_why():
    failure = {"size": 192, "failure": "swin cannot take <b>them"}
    steps = [{**one, "scores": [one["scores"][0], failure]} for one in (STEPS["original"], STEPS["finetuned"])]
    html = render(result(steps=steps))
    text = text_of(html)
    assert rows_of(html, "Step by step")[1][1:] == ["78.7 %", "93.4 %", "0.031", "not possible"]
    assert "Images of 192 x 192 pixels could not be used: swin cannot take &lt;b&gt;them." in text
    assert "keep the agreement" not in text


def test_a_model_that_could_be_measured_at_no_size_has_a_page():
    failure = {"size": 96, "failure": "no"}
    html = render(result(steps=[{**STEPS[name], "scores": [failure]} for name in ("original", "finetuned")]))
    assert "could not be measured at any of these image sizes" in text_of(html)
    assert Page(html).open == []


def test_scores_are_those_of_the_training_size_if_it_was_measured():
    steps = [{**STEPS[name], "scores": STEPS[name]["scores"][::-1]} for name in ("original", "finetuned")]
    assert "<b>81.2 %</b>" in render(result(steps=steps))
    larger = [{**one, "scores": one["scores"][:1]} for one in steps]
    assert "<b>82.3 %</b>" in render(result(steps=larger))


# layers


def test_layers_are_in_the_order_of_the_network():
    assert sort_layers(reversed(LAYERS)) == LAYERS
    assert sort_layers(["stages.1.blocks.0", "stages.0.blocks.10"]) == ["stages.0.blocks.10", "stages.1.blocks.0"]


def test_every_layer_has_its_error_before_and_after_transfer():
    found = rows_of(usual_page(), "Layer by layer")
    assert found == [[layer, "InLine", f"{BEFORE[layer]:.3f}", f"{AFTER[layer]:.3f}"] for layer in LAYERS]
    text = text_of(usual_page())
    assert "Transfer brings the mean error from 2.55 to 0.35" in text
    assert "closest to what it replaces is blocks.0.attn (0.30), the one furthest from it blocks.11.attn (0.41)" in text
    assert "before transfer: 2 at 0, 2.1 at 1" in usual_page()


def test_without_transfer_the_errors_are_those_of_the_replacement():
    html = render(result(steps=[STEPS["original"], STEPS["replaced"], STEPS["finetuned"]]))
    assert rows_of(html, "Layer by layer")[0] == ["blocks.0.attn", "InLine", "2.000"]
    assert "after transfer" not in html
    assert "Before any training the relative error of a layer is 2.55 on average" in text_of(html)


def test_layers_that_were_left_out_have_no_error():
    errors = {layer: value for layer, value in BEFORE.items() if layer != LAYERS[1]}
    steps = [STEPS["original"], {**STEPS["replaced"], "errors": errors}, STEPS["finetuned"]]
    html = render(result(steps=steps, kept=[LAYERS[1]], replaced=list(errors)))
    assert rows_of(html, "Layer by layer")[1] == ["blocks.1.attn", "softmax, kept", "\N{EN DASH}"]
    assert "2 at 0, 2.2 at 2" in html, "the figure counts all layers"


def test_kept_layers_are_marked_where_each_is_replaced_alone():
    found = rows_of(mixed_page(), "Which layers are hardest to replace")
    assert found[0] == ["blocks.0.attn", "softmax, kept", "86.0 %", "0.900"]
    assert found[1] == ["blocks.1.attn", "InLine", "94.9 %", "0.010"]
    assert "softmax, kept: 0.9 at 0, 0.8 at 3" in mixed_page()
    text = text_of(mixed_page())
    assert "most in blocks.0.attn (divergence 0.900) and least in blocks.1.attn (divergence 0.010)" in text
    assert "therefore kept in blocks.0.attn and blocks.3.attn" in text


def test_without_effects_their_section_is_left_out():
    assert "hardest to replace" not in usual_page()


# cost


def test_time_and_memory_are_in_figures_and_table():
    html = usual_page()
    small, large = rows_of(html, "What it costs as images grow")
    assert small == ["224 x 224", "10 ms ± 10 %", "12.5 ms ± 10 %", "0.80", "4.0 MiB", "4.1 MiB", "1.02"]
    assert large == ["1024 x 1024", "900 ms ± 10 %", "300 ms ± 10 %", "3.00", "640.0 MiB", "64.0 MiB", "0.10"]
    assert "original: 10 at 224², 900 at 1024²; linearised: 12.5 at 224², 300 at 1024²" in html
    assert "original: 4 at 224², 640 at 1024²; linearised: 4.1 at 224², 64 at 1024²" in html
    text = text_of(html)
    assert "one image, 2 threads" in text
    assert "medians of 3 rounds" in text


def test_a_logarithmic_axis_within_one_power_of_ten_has_numbers():
    points = [CostPoint("a", size, size, value * 2**20) for size, value in ((224, 1.2), (448, 3.6))]
    labels = re.findall(r"<text[^>]*>([\d.]+)</text>", draw_cost("memory", points, {"a": "#000000"}))
    assert {"2", "3"} <= set(labels)


def speeds(*gains):
    rows = []
    for size, gain in zip((224, 512, 1024), gains, strict=False):
        rows += [cost("original", size, 100.0, 30.0, 1.0), cost("linearized", size, 100 / gain, 10.0, gain)]
    return speed(cost_pairs(result(cost=rows)))


def test_what_is_said_about_speed_is_computed():
    assert speeds(2.0, 3.0, 4.0) == (
        "The linearised model is faster at all of these sizes: at 1024 x 1024 pixels it takes 25 ms instead of 100 ms "
        "(4.00 times as fast), with 33% of the memory."
    )
    assert "faster at 224 x 224 pixels, where it takes 50 ms" in speeds(2.0)
    from_512 = speeds(0.5, 2.0, 4.0)
    assert "faster from 512 x 512 pixels on: at 1024 x 1024 pixels it takes 25 ms" in from_512
    assert "less to gain: at 224 x 224 pixels it takes 200 ms instead of 100 ms (2.00 times as long)" in from_512
    assert "less to gain: at 512 x 512 pixels it takes 125 ms" in speeds(2.0, 0.8, 4.0)


@pytest.mark.parametrize("gains", [(0.8,), (2.0, 0.8), (0.5, 0.9, 1.02)])
def test_a_model_that_is_slower_is_called_no_faster(gains):
    assert speeds(*gains).startswith("The linearised model is no faster than the original at these sizes: at ")


def test_alike_memory_is_called_about_the_same():
    pairs = cost_pairs(result(cost=COST[:2]))
    assert speed(pairs).endswith("(1.25 times as long), with about the same memory.")


def test_without_cost_its_section_is_left_out():
    assert "What it costs" not in render(result(cost=[]))


def test_a_model_that_does_not_fit_in_memory_is_named():
    rows = [*COST[:2], failed("original", 2048, "needs <8 GiB."), cost("linearized", 2048, 900.0, 99.0, None)]
    html = render(result(cost=rows))
    assert rows_of(html, "What it costs as images grow")[1][:4] == [
        "2048 x 2048",
        "failed",
        "900 ms ± 10 %",
        "\N{EN DASH}",
    ]
    assert "The original could not be measured at 2048 x 2048 pixels: needs &lt;8 GiB." in text_of(html)
    assert impossible(cost_pairs(result())) == ""


def test_a_page_without_any_measured_cost_has_no_figure_of_it():
    html = render(result(cost=[failed(case, 224, "no") for case in ("original", "linearized")]))
    assert "time [ms]" not in html
    assert Page(html).open == []


def test_unknown_memory_is_left_out():
    rows = [{**row, "peak_bytes": None} for row in COST]
    html = render(result(cost=rows))
    assert "peak memory" not in html
    assert "time [ms]" in html
    assert "instead of 900 ms (3.00 times as fast)." in text_of(html)


# names


def test_names_are_escaped():
    evil = "<script>alert(1)</script>"
    named = result(
        source=evil,
        replaced=[evil],
        kept=['"><b>x'],
        effects=[{"layer": evil, "agreement": 0.5, "divergence": 0.1}],
        steps=[STEPS["original"], {**STEPS["replaced"], "errors": {evil: 2.0}}, STEPS["finetuned"]],
    )
    shown = MapExample(evil, torch.rand(3, 8, 8), evil, dict([*example().maps.items()][:1]), ((evil, 0.5), (evil, 0.5)))
    html = render_linearization(named, [shown], command=f"softline {evil}", seconds=1)
    assert "<script" not in html
    assert "<b>x" not in html
    assert Page(html).open == []


def test_the_options_of_the_attention_are_named():
    recipe = result().recipes["finetune"]
    recipe = {**recipe, "model": {"name": "vit", "replace": {"options": {"sampling": "pool"}}}}
    html = render(result(attention="softpp", recipes={"finetune": recipe}))
    assert "SOFT++ (sampling=pool)" in text_of(html)
    assert "2207.03341" in html
    assert "var(--softpp)" in html


def test_an_attention_without_a_paper_of_ours_has_a_colour_and_no_link():
    html = render(result(attention="reformer"))
    assert Page(html).links == []
    assert "deit_tiny with Reformer attention" in html


# maps


def test_maps_of_both_models_are_side_by_side():
    html = usual_page()
    section = html[html.index("Where they look") :]
    assert section.count('<svg class="map"') == 1 + 3 * 2
    assert section.count("data:image/png") == 1 + 3 * 2, "the image itself is there once"
    assert 'x="12" y="12" width="4" height="4"' in section
    text = text_of(section)
    for said in ("blocks.6.attn", "the one in the middle of the image", "original: ✓ Coat, 75 %", "linearised: ✗ Bag"):
        assert said in text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Negative weights, which softmax cannot have, occur here in InLine." in text
    assert "windows are left out" not in text


def test_layers_in_windows_are_said_to_be_left_out():
    shown = result(replaced=["layers.0.blocks.0.attn", *LAYERS])
    assert "Layers that attend inside windows are left out" in text_of(render(shown, [example()]))


def test_without_maps_the_page_says_why():
    text = text_of(render(result()))
    assert "Attention maps are left out" in text
    assert "framed square" not in text


def test_likeness_is_the_correlation_of_both_maps():
    assert "is 1.00 in blocks.0.attn" in likeness([example()])
    old, _ = example().maps[LAYERS[0]]
    even = HeatMap("b", "val/0", "", (3, 3), (7, 7), torch.full((7, 7), 1 / 49))
    shown = MapExample("a", torch.rand(3, 28, 28), None, {LAYERS[0]: (old, even)}, (("a", 1.0), ("a", 1.0)))
    assert likeness([shown]) == "", "an even map has no correlation"
