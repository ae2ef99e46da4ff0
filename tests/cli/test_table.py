from softline.cli.table import Table, duration, format_table, metrics_text, number


def test_names_are_on_the_left_and_numbers_on_the_right():
    assert format_table(["model", "params M"], [["softpp_tiny", "13.1"], ["x", "7"]]) == (
        "model        params M\nsoftpp_tiny      13.1\nx                   7"
    )


def test_lines_of_a_table_can_be_printed_before_all_are_known():
    table = Table(["", "ms", "of peak"], widths=[6, 9], left=1)
    assert [table.head, table.line(["inline", "1.25", "3%"]), table.line(["soft"])] == [
        "               ms  of peak",
        "inline       1.25       3%",
        "soft",
    ]


def test_numbers_that_were_not_measured_are_dashes():
    assert (number(None, ".2f"), number(3 * 2**20, ".1f", unit=2**20), number(2, ".1f", "x")) == ("-", "3.0", "2.0x")


def test_losses_follow_the_other_metrics_which_are_in_percent():
    assert metrics_text({"loss": 0.5, "top1": 0.25, "AP_small": -1.0}) == "top1 25.00 %  AP_small none  loss 0.5000"


def test_durations():
    assert [duration(seconds) for seconds in (0.4, 65, 3600)] == ["0:00", "1:05", "1:00:00"]
