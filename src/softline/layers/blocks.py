"""Transformer blocks ``(x [B, N, C], grid_size) -> [B, N, C]`` with any attention module."""

from timm.layers import DropPath, Mlp
from torch import Tensor, nn

from softline.layers.grid import GridSize
from softline.layers.tokenwise import TanhGELU, for_each_token, runs_in_parts
from softline.ops.chunks import add_to


class PreNormBlock(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)), with stochastic depth.

    pass_context: also pass x before the norm to the attention, which predicts its local kernels from it.
    """

    def __init__(
        self,
        dim: int,
        attention: nn.Module,
        *,
        mlp_ratio: float = 4.0,
        drop_path: float = 0.0,
        norm_eps: float = 1e-6,
        pass_context: bool = False,
    ) -> None:
        super().__init__()
        self.pass_context = pass_context
        self.norm1 = nn.LayerNorm(dim, eps=norm_eps)
        self.attn = attention
        self.norm2 = nn.LayerNorm(dim, eps=norm_eps)
        self.hidden_dim = int(dim * mlp_ratio)
        self.mlp = Mlp(dim, self.hidden_dim)
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, grid_size: GridSize) -> Tensor:
        context = {"context": x} if self.pass_context else {}
        attended = self.drop_path(self.attn(self.norm1(x), grid_size, **context))
        # nobody else has what the attention returns, unless there are hooks
        x = add_to(attended, x) if runs_in_parts(self) else x + attended
        return for_each_token(self, self._rest, x, width=self.hidden_dim, out=x)

    def _rest(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.mlp(self.norm2(x)))


class PostNormBlock(nn.Module):
    """SOFT's block: norm(x + attention(x)), then norm(x + mlp(x)), with ordinary dropout and a tanh GELU."""

    def __init__(self, dim: int, attention: nn.Module, *, mlp_ratio: float = 4.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.attn = attention
        self.norm1 = nn.LayerNorm(dim)
        self.hidden_dim = int(dim * mlp_ratio)
        self.mlp = Mlp(dim, self.hidden_dim, act_layer=TanhGELU)
        self.norm2 = nn.LayerNorm(dim)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor, grid_size: GridSize) -> Tensor:
        attended = self.attn(x, grid_size)
        # nobody else has what the attention returns
        return for_each_token(self, self._rest, x, attended, width=self.hidden_dim, out=attended)

    def _rest(self, x: Tensor, attended: Tensor) -> Tensor:
        x = self.norm1(x + self.dropout(attended))
        return self.norm2(x + self.dropout(self.mlp(x)))
