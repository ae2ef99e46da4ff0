import torch

from softline.measure import count_macs, peak_bytes


def test_macs_of_a_product_are_counted():
    a, b = torch.randn(10, 20), torch.randn(20, 30)
    assert count_macs(lambda: a @ b) == 10 * 20 * 30


def test_peak_bytes_are_those_held_at_once():
    def run() -> torch.Tensor:
        first = torch.empty(1000, 250)  # 1 MB
        second = torch.empty(1000, 500)  # 2 MB, beside the first
        del first
        third = torch.empty(1000, 125)  # 0.5 MB, after the first is gone
        return second[0, 0] + third[0, 0]

    assert 3_000_000 <= peak_bytes(run) < 3_010_000
