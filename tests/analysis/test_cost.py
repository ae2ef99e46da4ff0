import pytest

from softline import ATTENTIONS
from softline.analysis.cost import cost_exponents, layer_costs, plot_layer_costs


def test_costs_tell_linear_attentions_from_quadratic_ones():
    costs = layer_costs(["gaussian", "softmax", "softpp", "inline"], [32, 64])
    exponents = cost_exponents(costs)
    assert exponents["softmax"]["macs"] > 1.8
    assert exponents["gaussian"]["peak_bytes"] > 1.8
    for name in ("softpp", "inline"):
        assert exponents[name]["macs"] < 1.05
        assert exponents[name]["peak_bytes"] < 1.05


@pytest.mark.parametrize("name", ATTENTIONS)
def test_every_attention_has_a_cost(name):
    (one,) = layer_costs([name], [6])
    assert one.tokens == 36
    # the projections alone
    assert one.macs >= 36 * 64 * 64 * 3
    assert one.peak_bytes > 0
    assert cost_exponents([one])[name] == {"macs": None, "peak_bytes": None}


def test_unknown_attentions_are_refused():
    with pytest.raises(ValueError, match=r"attention must be one of .*; got 'softmx'; did you mean 'softmax'"):
        layer_costs(["softmx"], [4])


def test_the_figure_names_the_exponents():
    figure = plot_layer_costs(layer_costs(["inline"], [8, 16]))
    assert [axis.get_title(loc="left") for axis in figure.axes] == ["multiply-adds [millions]", "peak memory [MiB]"]
    (label,) = figure.axes[0].get_legend_handles_labels()[1]
    assert label == "InLine: $N^{0.99}$"
