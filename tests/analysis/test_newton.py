import pytest
import torch

from softline import ops
from softline.analysis.newton import landmark_matrix, layer_residual, newton_convergence, plot_newton, soft_layers
from softline.analysis.spectrum import degrees
from tests.analysis.conftest import make_pictures, make_subject


def test_residuals_follow_the_closed_form_of_the_iteration():
    A = ops.soft_kernel(torch.randn(3, 2, 9, 4, dtype=torch.float64))
    residuals = ops.newton_residuals(A, iterations=12)
    values = torch.linalg.eigvalsh(A)
    norm = A.abs().sum(-2).amax(-1, keepdim=True)
    for step in (0, 1, 5, 12):
        # A A_k A - A has the eigenvalues -l (1 - alpha l^2)^(2^k), alpha = 2 / ||A||_1^2
        left = values * (1 - 2 * values.square() / norm.square()) ** (2**step)
        torch.testing.assert_close(residuals[step], left.abs().amax(-1) / values.amax(-1))


def test_residuals_of_float32_are_measured_beyond_its_rounding():
    A = ops.soft_kernel(torch.randn(4, 1, 5, 16))
    residuals = ops.newton_residuals(A, iterations=25)
    assert residuals.dtype == torch.float64
    assert residuals[-1].max() < 1e-5
    assert (residuals[-1] > 0).any()


def test_convergence_is_summarised_for_each_stage(pictures):
    subject = make_subject()
    with torch.no_grad():
        # landmarks apart from each other, as those of trained models are
        subject.model.stages[0].blocks[0].attn.qkv.weight.mul_(50)
    stages = newton_convergence(subject, pictures, iterations=20)
    heads = [stage.blocks[0].attn.num_heads for stage in subject.model.stages]
    depths = [len(stage.blocks) for stage in subject.model.stages]
    assert [one.matrices for one in stages] == [2 * h * d for h, d in zip(heads, depths, strict=True)]
    assert [one.layers for one in stages] == depths
    for one in stages:
        assert len(one.mean) == 21
        assert all(low <= mean <= high for low, mean, high in zip(one.lowest, one.mean, one.highest, strict=True))
    assert stages[0].mean[20] < 1e-2 * stages[0].mean[0]


def test_the_matrix_is_what_the_layer_inverts(pictures):
    subject = make_subject("soft", attention_options={"ridge": 0.01})
    (given, *_), _ = subject.look(subject.prepare(pictures[0].image)[None], soft_layers(subject))
    A = landmark_matrix(given)
    torch.testing.assert_close(A.diagonal(dim1=-2, dim2=-1), torch.full(A.shape[:-1], 1.01))
    _, inverse, _ = given.layer.attention.factors(given.x, given.grid_size)
    expected = ops.newton_inverse(A)
    torch.testing.assert_close(inverse, expected.inverse, rtol=1e-3, atol=1e-3)
    assert layer_residual(given) == pytest.approx(float(expected.residual.mean()), rel=1e-4)


@torch.no_grad()
@pytest.mark.parametrize("attention", ["soft", "softpp"])
def test_residuals_have_the_start_of_the_layer(attention, pictures):
    ridge = {"ridge": 0.01} if attention == "soft" else {}
    subject = make_subject(attention, attention_options={"start": "release", **ridge})
    # 7 x 7 cells: each landmark stands for one, and SOFT++'s D has no other factor
    stages = newton_convergence(subject, pictures[:1], iterations=20, size=28)
    (given,), _ = subject.look(subject.prepare(pictures[0].image, 28)[None], soft_layers(subject)[:1])
    A = landmark_matrix(given).double()
    inverse = given.layer.attention.factors(given.x, given.grid_size)[1].double()
    if attention == "softpp":
        root = degrees(given).sqrt()
        inverse = root * inverse * root.mT
    left = torch.linalg.matrix_norm(A @ inverse @ A - A, ord=2) / torch.linalg.matrix_norm(A, ord=2)
    assert stages[0].mean[20] == pytest.approx(float(left.mean()), rel=1e-2)


def test_attentions_without_an_inverse_are_refused_by_name():
    with pytest.raises(ValueError, match="inline inverts no matrix: it has inline attention, not soft or softpp"):
        soft_layers(make_subject("inline"))


def test_a_layer_without_newton_has_no_residual(pictures):
    for subject in (make_subject("softmax"), make_subject("softpp", attention_options={"inverse": "pinv"})):
        (given, *_), _ = subject.look(subject.prepare(pictures[0].image)[None])
        assert layer_residual(given) is None


def test_an_iterate_that_overflows_has_an_infinite_residual():
    # beyond the edge of convergence every step squares the error
    A = torch.diag_embed(torch.tensor([[1.0, 1e-6], [1.0, 0.5]]))[:, None]
    many = ops.newton_residuals(A, iterations=60)
    assert many[:40].isfinite().all()
    broken = torch.eye(3).expand(2, 1, 3, 3).clone()
    broken[0] = torch.inf
    assert ops.newton_residuals(broken, iterations=1)[0].tolist()[1][0] == 0


def test_padded_windows_do_not_count_as_landmarks():
    options = {"window_size": 7, "stage_types": "IIII", "attention_options": {"ratio": 1}}
    subject = make_subject("softpp", "inline_swin_tiny", **options)
    layers = soft_layers(subject)[:1]
    picture = make_pictures(1, (64, 64))[0]
    (given,), _ = subject.look(subject.prepare(picture.image, 64)[None], layers)
    A = landmark_matrix(given)
    mask = layers[0].attention.operands(given.x, given.grid_size, given.key_mask)["landmark_mask"]
    assert not mask.all()
    # a masked landmark is a unit row
    hidden = A[(~mask)[:, None].expand(A.shape[:-1])]
    torch.testing.assert_close(hidden.sum(-1), torch.ones(len(hidden)))


def test_blocks_of_a_flat_network_are_called_so(pictures):
    subject = make_subject("softpp", "inline_deit_tiny", img_size=64, depth=2)
    stages = newton_convergence(subject, pictures[:1], iterations=2, size=64)
    assert [one.name for one in stages] == ["block 1", "block 2"]


def test_the_figure_has_a_panel_for_each_model(pictures):
    stages = newton_convergence(make_subject(), pictures[:1], iterations=3)
    for linear, scale in ((False, "log"), (True, "linear")):
        figure = plot_newton({"one": stages, "other": stages}, linear=linear)
        assert [axis.get_title(loc="left") for axis in figure.axes] == ["one", "other"]
        assert {axis.get_yscale() for axis in figure.axes} == {scale}
