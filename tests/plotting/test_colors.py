from softline.attention import ATTENTIONS
from softline.plotting.colors import COLORS, LABELS, comparison_colors, label_of


def test_every_attention_has_a_label():
    assert set(ATTENTIONS) <= set(LABELS)
    assert label_of("inline") == "InLine"
    assert label_of("seed 3") == "seed 3"


def test_attentions_keep_their_colours_and_share_them_with_no_other():
    colors = comparison_colors(["ratio 1", "inline", *ATTENTIONS])
    assert colors["inline"] == COLORS["inline"]
    assert len(set(colors.values())) == len(colors)
