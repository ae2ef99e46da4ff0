import torch

from softline import create_attention, ops


def test_landmarks_are_of_queries_and_of_keys():
    module, tokens = create_attention("nystrom", 32, 2).double(), torch.randn(2, 49, 32).double()
    q, k, _ = (p.unflatten(-1, (2, 16)).transpose(1, 2) for p in module.qkv(tokens).split(32, dim=-1))
    weights = module.weights(tokens, (7, 7))
    torch.testing.assert_close(weights, ops.nystrom_weights(q, k, q_landmarks=q, k_landmarks=k))
