from softline.measure.turns import Timing, take_turns


def test_functions_take_turns_and_warm_ups_do_not_count():
    order = []
    runs = {name: lambda name=name: order.append(name) for name in "ab"}
    timings = take_turns(runs, 2, warm_ups=3)
    assert order == ["a", "b"] * 5
    assert all(len(timing.seconds) == 2 for timing in timings.values())


def test_short_functions_are_repeated_within_a_turn():
    calls = []
    timings = take_turns({"short": lambda: calls.append(1)}, 2, least_seconds=1e-3)
    assert len(calls) > 3
    assert timings["short"].median < 1e-3


def test_median_and_spread_of_rounds():
    timing = Timing((1.0, 2.0, 3.0, 4.0, 100.0))
    assert (timing.median, timing.spread) == (3, 1)
    assert Timing((5.0,)).spread == 0


def test_ratios_are_those_within_rounds():
    # the machine was ten times slower in the second round, for both
    assert Timing((1.0, 10.0, 1.0)).ratio_to(Timing((4.0, 40.0, 4.0))) == 4
