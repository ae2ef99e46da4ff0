import pytest
import torch

from softline.analysis.newton import landmark_matrix, soft_layers
from softline.analysis.spectrum import Norms, Spectrum, growing_sizes, plot_spectrum, spectrum
from tests.analysis.conftest import make_subject


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
    subject = make_subject("soft", attention_options={"max_landmarks": None})
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
    found = spectrum(make_subject(), pictures[:1], sizes=[32, 48])
    assert [norm.landmarks for norm in found.norms] == [8 * 8, 12 * 12]
    assert len(found.eigenvalues[0].mean) == 7 * 7


def test_images_grow_by_whole_cells():
    assert growing_sizes(make_subject()) == [32, 40, 48, 64, 96]
    tiny = make_subject(name="softpp_tiny")
    assert growing_sizes(tiny) == [224, 288, 320, 448, 672]


def test_exponents_leave_out_singular_matrices():
    norms = [Norms(m, m, m if m < 100 else m - 1, float(m**2), float(m), 1.0, float(m)) for m in (10, 20, 40, 100)]
    norms[-1] = Norms(100, 100, 99.0, 1.0, 1.0, 1.0, 100.0)
    found = Spectrum([], norms, "stage 1, block 1")
    assert found.exponent("inverse") == pytest.approx(2)
    assert found.exponent("normalized") == pytest.approx(1)
    assert found.exponent("attention_normalized") == pytest.approx(1)
    assert Spectrum([], norms[:1], "").exponent("inverse") is None


def test_a_layer_that_is_not_there_is_refused(pictures):
    with pytest.raises(ValueError, match="layer must be below 5, the SOFT layers of softpp; got 9"):
        spectrum(make_subject(), pictures, sizes=[32], layer=9)


def test_the_figure_has_three_panels(pictures):
    figure = plot_spectrum({"one": spectrum(make_subject(), pictures[:1], sizes=[32, 48])})
    titles = [axis.get_title(loc="left") for axis in figure.axes]
    assert titles[0] == "one: eigenvalues of A"
    assert [title.partition(": ")[2] for title in titles[1:]] == ["norm of the inverse", "norm of the attention"]
