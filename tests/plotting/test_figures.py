from softline.plotting.figures import new_axes, save_figure


def test_a_figure_is_written_in_two_formats_and_the_same_numbers_give_the_same_files(tmp_path):
    contents = []
    for _ in range(2):
        figure, axes = new_axes(1, 1)
        axes[0][0].plot([1, 2], [3, 4])
        paths = save_figure(figure, tmp_path, "line")
        contents.append([path.read_bytes() for path in paths])
    assert sorted(tmp_path.iterdir()) == [tmp_path / "line.png", tmp_path / "line.svg"]
    assert contents[0] == contents[1]
    assert contents[0][0].startswith(b"\x89PNG")
    assert b"<svg" in contents[0][1]
