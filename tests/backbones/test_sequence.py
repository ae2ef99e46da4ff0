"""The encoder of sequences, for every registered attention."""

import pytest
import torch
from torch import nn

from softline.attention import ATTENTIONS
from softline.backbones.sequence import SequenceClassifier, SequenceEncoder

POSITIONS = 128
every_attention = pytest.mark.parametrize("attention", sorted(ATTENTIONS))


def encoder(attention: str, *, vocabulary: int = 20, positions: int = POSITIONS, **options) -> SequenceEncoder:
    torch.manual_seed(0)
    return SequenceEncoder(vocabulary, positions, attention=attention, **options)


def sequence(length: int, batch: int = 1) -> torch.Tensor:
    return torch.randint(1, 20, (batch, length), generator=torch.Generator().manual_seed(length))


def padded(tokens: torch.Tensor, length: int) -> torch.Tensor:
    return nn.functional.pad(tokens, (0, length - tokens.shape[1]))


def features_and_gradients(model: nn.Module, tokens: torch.Tensor):
    model.zero_grad()
    features = model(tokens)
    (features * torch.linspace(-1, 1, features.numel()).view_as(features)).sum().backward()
    return features.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_close(found: torch.Tensor, expected: torch.Tensor, parts: float = 1e-4) -> None:
    """To rounding: sums over other lengths are added in another order."""
    assert (found - expected).abs().max() <= parts * expected.abs().max() + 1e-12


@every_attention
def test_a_sequence_alone_is_the_sequence_padded_to_four_times_its_length(attention):
    """At 301 tokens SOFT has its 64 landmarks, and Linformer projects."""
    for length in (1, 3, 5, 301):
        model = encoder(attention, positions=4 * length).double().eval()
        alone, gradients = features_and_gradients(model, sequence(length))
        longer, longer_gradients = features_and_gradients(model, padded(sequence(length), 4 * length))
        assert alone.abs().max() > 0
        assert_close(longer, alone, 1e-10)
        assert gradients.keys() == longer_gradients.keys()
        for name, gradient in gradients.items():
            assert_close(longer_gradients[name], gradient, 1e-8)


@pytest.mark.parametrize("attention", ["soft", "softpp", "nystrom"])
def test_padding_changes_nothing_without_a_cap(attention):
    model = encoder(attention, attention_options={"max_landmarks": None}).double().eval()
    with torch.no_grad():
        assert_close(model(padded(sequence(41), 120)), model(sequence(41)), 1e-10)


@every_attention
def test_sequences_of_other_lengths_in_a_batch_change_nothing(attention):
    model = encoder(attention).eval()
    with torch.no_grad():
        both = model(torch.cat([padded(sequence(20), 50), sequence(50)]))
        assert_close(both[:1], model(sequence(20)))
        assert_close(both[1:], model(sequence(50)))


@every_attention
def test_a_sequence_without_tokens_is_zero(attention):
    model = encoder(attention).eval()
    assert not model(torch.zeros(1, 9, dtype=torch.long)).any()


@every_attention
def test_every_parameter_learns(attention):
    model = encoder(attention)
    _, gradients = features_and_gradients(model, sequence(40, batch=2))
    assert [name for name, _ in model.named_parameters() if name not in gradients] == []


# vocabulary, positions, classes, sequences of a sample, parameters with softmax
TASKS = {
    "listops": (32, 2048, 10, 1, 209_802),
    "text": (512, 4096, 2, 1, 370_562),
    "retrieval": (512, 4096, 2, 2, 395_138),
    "image": (512, 1024, 10, 1, 174_986),
    "pathfinder": (512, 1024, 2, 1, 173_954),
}


def parameters(task: str, attention: str) -> int:
    vocabulary, positions, classes, parts, _ = TASKS[task]
    network = encoder(attention, vocabulary=vocabulary, positions=positions)
    return sum(p.numel() for p in SequenceClassifier(network, classes, parts=parts).parameters())


@pytest.mark.parametrize("task", TASKS)
def test_parameters_are_those_of_the_release(task):
    softmax = TASKS[task][-1]
    assert parameters(task, "softmax") == softmax
    # two layers without a projection of keys
    key_projections = 2 * (64 * 64 + 64)
    assert parameters(task, "soft") == parameters(task, "softpp") == softmax - key_projections


def test_landmarks_are_the_papers_windows_without_a_cap():
    capped, paper = encoder("soft"), encoder("soft", attention_options={"max_landmarks": None})
    q = torch.randn(1, 2, 103, 32)
    for model, count in ((capped, 26), (paper, 25)):
        landmarks, _ = model.blocks[0].attn.core.landmarks(q, (1, 103))
        assert landmarks.shape[2] == count
    windows = q[:, :, :100].unflatten(2, (25, 4)).mean(3)
    torch.testing.assert_close(paper.blocks[0].attn.core.landmarks(q, (1, 103))[0], windows)
    q = torch.randn(1, 2, 2000, 32)
    assert capped.blocks[0].attn.core.landmarks(q, (1, 2000))[0].shape[2] == 64


@every_attention
def test_attention_runs_in_float32_under_autocast(attention):
    model = encoder(attention).eval()
    seen = []
    model.blocks[0].attn.qkv.register_forward_hook(lambda module, given, result: seen.append(result.dtype))
    with torch.autocast("cpu", torch.bfloat16):
        features = model(sequence(24))
    assert seen == [torch.float32]
    assert features.dtype == torch.float32


def test_the_two_sequences_of_a_sample_are_compared():
    torch.manual_seed(0)
    model = SequenceClassifier(encoder("softpp"), 2, parts=2).eval()
    tokens = torch.stack([sequence(12), sequence(17)[:, :12]], 1)
    given = []
    model.head.register_forward_hook(lambda module, inputs, result: given.append(inputs[0]))
    model(tokens)
    x, y = model.encoder(tokens[:, 0]), model.encoder(tokens[:, 1])
    torch.testing.assert_close(given[0], torch.cat([x, y, x * y, x - y], 1), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: encoder("soft")(sequence(129)), "at most 128 tokens"),
        (lambda: encoder("soft", positions=2)(sequence(3)), r"at most 2 tokens \(positions\), got 3"),
        (lambda: SequenceClassifier(encoder("soft"), 2)(sequence(8)), r"tokens must be \[B, 1, N\], got \(1, 8\)"),
        (lambda: SequenceClassifier(encoder("soft"), 2, parts=3), "1 sequence, or 2 to compare, got 3"),
        (lambda: encoder("soft", dropout=1.0), r"dropout must be at least 0 and below 1, got 1\.0"),
        (lambda: encoder("soft", positions=0), "positions must be at least 1, got 0"),
        (lambda: encoder("softest"), "softest"),
    ],
)
def test_mistakes_name_the_rule_and_the_value(build, message):
    with pytest.raises(ValueError, match=message):
        build()
