import pytest
import torch

from softline.analysis.newton import landmark_matrix, soft_layers
from softline.analysis.spectrum import Norms, Spectrum, growing_sizes, landmark_sizes, plot_spectrum, spectrum
from tests.analysis.conftest import make_subject

# landmark cells of one token in every stage
EACH_TOKEN = (1, 1, 1, 1)


def test_eigenvalues_are_those_of_the_landmark_kernel(pictures):
    subject = make_subject()
    found = spectrum(subject, pictures[:1], sizes=[32])
    (given, *_), _ = subject.look(subject.prepare(pictures[0].image)[None], soft_layers(subject))
    values = torch.linalg.eigvalsh(landmark_matrix(given, exact=True))[0].flip(-1)
    assert found.eigenvalues[0].mean == pytest.approx(values.mean(0).tolist())
    assert found.eigenvalues[0].highest == pytest.approx(values.amax(0).tolist())
    # the trace of A is m
    assert sum(found.eigenvalues[0].mean) == pytest.approx(values.shape[-1])


@torch.no_grad()
def test_norms_are_those_of_the_matrices_themselves(pictures):
    subject = make_subject("soft", ratios=EACH_TOKEN, attention_options={"max_landmarks": None})
    (norms,) = spectrum(subject, pictures[:1], sizes=[40]).norms
    layer = soft_layers(subject)[0]
    (given,), _ = subject.look(subject.prepare(pictures[0].image, 40)[None], [layer])
    A = landmark_matrix(given, exact=True)
    inverse = torch.linalg.pinv(A, hermitian=True)
    D = torch.diag_embed(A.sum(-1).rsqrt())
    largest = lambda matrix: float(torch.linalg.matrix_norm(matrix, ord=2).mean())  # noqa: E731
    assert norms.landmarks == A.shape[-1] == 100
    assert norms.rank == 100
    assert norms.inverse == pytest.approx(largest(inverse), rel=1e-6)
    assert norms.normalized == pytest.approx(largest(D @ inverse @ D), rel=1e-6)
    weights = layer.attention.weights(given.x, given.grid_size)
    assert norms.attention == pytest.approx(largest(weights), rel=1e-3)


@torch.no_grad()
def test_the_normalised_attention_is_that_of_softpp(pictures):
    subject = make_subject("softpp", attention_options={"max_landmarks": None})
    (norms,) = spectrum(subject, pictures[:1], sizes=[40]).norms
    layer = soft_layers(subject)[0]
    (given,), _ = subject.look(subject.prepare(pictures[0].image, 40)[None], [layer])
    weights = layer.attention.weights(given.x, given.grid_size)
    assert norms.attention_normalized == pytest.approx(float(torch.linalg.matrix_norm(weights, ord=2).mean()), rel=1e-3)


def test_landmarks_grow_with_the_image_although_the_layer_has_a_cap(pictures):
    found = spectrum(make_subject(ratios=EACH_TOKEN), pictures[:1], sizes=[32, 48])
    assert [norm.landmarks for norm in found.norms] == [8 * 8, 12 * 12]
    assert len(found.eigenvalues[0].mean) == 7 * 7


def test_images_grow_by_whole_cells():
    assert growing_sizes(make_subject()) == [32, 40, 48, 64, 96]
    tiny = make_subject(name="softpp_tiny")
    assert growing_sizes(tiny) == [224, 288, 320, 448, 672]


def test_landmarks_decide_the_size_of_the_image(pictures):
    subject = make_subject(ratios=EACH_TOKEN)
    assert landmark_sizes(subject, [200, 64, 1024]) == {64: (32, 32), 200: (40, 80), 1024: (128, 128)}
    assert landmark_sizes(make_subject(name="softpp_tiny"), [800]) == {800: (25 * 32, 32 * 32)}
    # the numbers of landmarks in the paper's Fig. 6
    assert list(landmark_sizes(subject, range(100, 900, 100))) == list(range(100, 900, 100))
    found = spectrum(subject, pictures[:1], landmarks=[72, 50])
    assert [(norm.landmarks, norm.image_size) for norm in found.norms] == [(50, (20, 40)), (72, (32, 36))]
    # the eigenvalues are those of the largest kernel
    (values,) = found.eigenvalues
    assert values.layer == found.layer
    assert len(values.mean) == 72
    assert sum(values.mean) == pytest.approx(72)


def test_landmarks_that_cannot_be_had_are_refused_with_those_that_can(pictures):
    subject = make_subject()
    with pytest.raises(ValueError, match=r"columns <= 2 \* rows, got 97; the nearest are 96 and 98"):
        landmark_sizes(subject, [97])
    with pytest.raises(ValueError, match="landmarks must be at least 1, got 0"):
        landmark_sizes(subject, [0])
    with pytest.raises(ValueError, match="give landmarks, or sizes, but not both"):
        spectrum(subject, pictures, sizes=[32], landmarks=[64])
    windows = {"window_size": 7, "stage_types": "IIII", "attention_options": {"ratio": 1}}
    swin = make_subject("softpp", "inline_swin_tiny", **windows)
    with pytest.raises(
        ValueError, match="landmarks must grow with the image: stage 1, block 1 of softpp has 49 of them"
    ):
        spectrum(swin, pictures[:1], landmarks=[72])


@torch.no_grad()
def test_samples_are_the_norms_of_every_image_and_head(pictures):
    subject = make_subject()
    layer = len(soft_layers(subject)) - 3
    (norms,) = spectrum(subject, pictures, sizes=[64], layer=layer).norms
    heads = soft_layers(subject)[layer].attention.num_heads
    for name in ("inverse", "normalized", "attention", "attention_normalized"):
        assert len(norms.samples[name]) == len(pictures) * heads
        assert sum(norms.samples[name]) / len(norms.samples[name]) == pytest.approx(getattr(norms, name))
    alone = [spectrum(subject, [picture], sizes=[64], layer=layer).norms[0] for picture in pictures]
    assert norms.samples["inverse"] == pytest.approx([value for one in alone for value in one.samples["inverse"]])


def test_exponents_leave_out_singular_matrices():
    norms = [Norms(m, m, m, float(m**2), float(m), 1.0, float(m), {}) for m in (10, 20, 40)]
    norms.append(Norms(100, 100, 99.0, 1.0, 1.0, 1.0, 100.0, {}))
    found = Spectrum([], norms, "stage 1, block 1")
    assert found.exponent("inverse") == pytest.approx(2)
    assert found.exponent("normalized") == pytest.approx(1)
    assert found.exponent("attention_normalized") == pytest.approx(1)
    assert Spectrum([], norms[:1], "").exponent("inverse") is None


def test_a_layer_that_is_not_there_is_refused(pictures):
    with pytest.raises(ValueError, match="layer must be below 5, the SOFT layers of softpp; got 9"):
        spectrum(make_subject(), pictures, sizes=[32], layer=9)


def test_the_figure_has_three_panels(pictures):
    found = {"one": spectrum(make_subject(), pictures, sizes=[32, 48])}
    figure = plot_spectrum(found)
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[0] == "one: eigenvalues of A"
    assert [title.partition(": ")[2] for title in titles[1:]] == ["norm of the inverse", "norm of the attention"]
    crosses = [line for line in plot_spectrum(found, samples=True).axes[1].lines if line.get_marker() == "+"]
    # two norms at two sizes, each of two images and one head
    assert [len(line.get_xdata()) for line in crosses] == [2] * 4
    assert {axis.get_yscale() for axis in plot_spectrum(found, linear=True).axes} == {"linear"}
