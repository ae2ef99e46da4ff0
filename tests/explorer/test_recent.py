import pytest

from softline.explorer.recent import Recent


def test_what_was_not_used_for_longest_is_forgotten():
    made = []

    def get(key):
        return kept.get(key, lambda: made.append(key) or key)

    kept = Recent(2)
    for key in "abacab":
        get(key)
    assert made == ["a", "b", "c", "b"]
    assert len(kept) == 2


def test_values_are_weighed_and_the_last_one_stays_however_heavy():
    kept = Recent(10, weigh=len)
    kept.get("light", lambda: "x" * 4)
    kept.get("other", lambda: "x" * 6)
    assert len(kept) == 2
    assert kept.get("heavy", lambda: "x" * 100) == "x" * 100
    assert len(kept) == 1


def test_nothing_is_kept_of_what_cannot_be_made():
    kept = Recent(2)
    with pytest.raises(ZeroDivisionError):
        kept.get("a", lambda: 1 // 0)
    assert len(kept) == 0
