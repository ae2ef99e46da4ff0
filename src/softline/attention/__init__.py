"""Attention modules: projections around one operator of `softline.ops`, by name.

`create_attention` builds one, `ATTENTIONS` lists them, `Attention` is what they all do. The context managers of
`softline.attention.hooks` record or replace the attention of a model while it runs.
"""

from softline.attention.angular import angular
from softline.attention.efficient import efficient
from softline.attention.enhanced import enhanced
from softline.attention.focused import focused
from softline.attention.gaussian import gaussian
from softline.attention.hooks import (
    AttentionCall,
    find_attentions,
    record_attention,
    replace_attended,
    replace_weights,
    uncapped_landmarks,
    without_attention,
)
from softline.attention.hydra import hydra
from softline.attention.inline import inline
from softline.attention.linear import linear
from softline.attention.linformer import linformer
from softline.attention.multihead import MultiHeadAttention
from softline.attention.nystrom import nystrom
from softline.attention.performer import performer
from softline.attention.reformer import reformer
from softline.attention.registry import ATTENTIONS, Attention, create_attention
from softline.attention.soft import soft, softpp
from softline.attention.softmax import softmax

__all__ = [
    "ATTENTIONS",
    "Attention",
    "AttentionCall",
    "MultiHeadAttention",
    "angular",
    "create_attention",
    "efficient",
    "enhanced",
    "find_attentions",
    "focused",
    "gaussian",
    "hydra",
    "inline",
    "linear",
    "linformer",
    "nystrom",
    "performer",
    "record_attention",
    "reformer",
    "replace_attended",
    "replace_weights",
    "soft",
    "softmax",
    "softpp",
    "uncapped_landmarks",
    "without_attention",
]
