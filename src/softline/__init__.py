"""softline: vision transformers whose attention costs O(N) — SOFT, SOFT++, InLine and their rivals."""

# importing the backbones registers them with timm
from softline import backbones
from softline.attention import ATTENTIONS, create_attention

__all__ = ["ATTENTIONS", "__version__", "backbones", "create_attention"]

__version__ = "0.1.0"
