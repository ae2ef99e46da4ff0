import torch

from softline.measure.environment import commit_of, environment


def test_the_environment_names_the_gpu_that_was_measured(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the GPU {device}")
    assert environment("cuda:1")["gpu"] == "the GPU cuda:1"
    assert "gpu" not in environment()


def test_a_directory_outside_a_checkout_has_no_commit(tmp_path):
    assert commit_of(tmp_path) is None
