import pytest

from softline.errors import UserError
from softline.plain import check_entries, check_plain, read_json, read_yaml

LAUGHS = "a0: &a0 [x, x]\n" + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 30))
MERGES = "a0: &a0 {x: 1, y: 2}\n" + "".join(
    f"a{i}: &a{i} {{<<: [{', '.join([f'*a{i - 1}'] * 9)}], k{i}: 1}}\n" for i in range(1, 30)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-3", 1e-3),
        ("-2E5", -2e5),
        ("1.5e3", 1500.0),
        (".5e1", 5.0),
        ("1.0e-3", 1e-3),
        ("3", 3),
        ("true", True),
        ("null", None),
        ("inline", "inline"),
        ("1e", "1e"),
        ("2024-01-31", "2024-01-31"),
        ("{a: [1e2, b]}", {"a": [100.0, "b"]}),
        ("{a: &a {b: 1}, c: {<<: *a, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_yaml_is_read_as_version_1_2(text, value):
    assert read_yaml(text, "x") == value
    assert type(read_yaml(text, "x")) is type(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("!!python/object/apply:os.getcwd []", "x is not YAML"),
        ("[a", "x is not YAML"),
        ("a: b: c", "x is not YAML"),
        ("a: \x1b[31m", "x is not YAML"),
        ("!!binary aGVsbG8=", "got a bytes"),
        ("!!set {a, b}", "got a set"),
        ("[[1, 2]: 3]", "x is not YAML"),
        ("a: 1\na: 2", "line 2: the key a is there twice"),
        ("[{a: 1, a: 2}]", "the key a is there twice"),
        ("&a [*a]", "an alias refers to what it is a part of"),
        ("&a {b: {c: *a}}", "an alias refers to what it is a part of"),
        ("&a {<<: *a}", "an alias refers to what it is a part of"),
        ("[" * 5000, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested more than 64 deep"),
        ("{a: " * 20_000, "nested too deeply"),
        ("9" * 5000, "a number has 5,000 digits"),
        ("1:" * 1000 + "1", "a number has 2,001 digits"),
        (f"0x{'f' * 40}", "whole number of 160 bits"),
        ("a" * (2**20 + 1), "1,048,577 characters"),
    ],
)
def test_yaml_that_cannot_be_meant_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        read_yaml(text, "x")


def test_aliases_of_long_texts_count_their_letters():
    with pytest.raises(UserError, match="aliases unfold to more than 16,777,216 characters"):
        read_yaml(f'[&a "{"x" * 100_000}", {", ".join(["*a"] * 200)}]', "x")
    with pytest.raises(UserError, match="more than 16,777,216 characters"):
        check_plain(["x" * 100_000] * 200, "x")


def test_a_long_text_of_digits_is_read_in_time():
    text = "1" * 500_000 + "x"
    assert read_yaml(text, "x") == text


def test_messages_are_about_the_first_mistake():
    with pytest.raises(UserError, match=r"^x, line 2: the key a is there twice$"):
        read_yaml("a: 1\na: 2", "x")


@pytest.mark.parametrize("text", [LAUGHS, MERGES], ids=["lists", "merges"])
def test_aliases_that_unfold_without_end_are_refused_at_once(text):
    """29 levels of 9 aliases each would be 9^29 values, which no test would see the end of."""
    with pytest.raises(UserError, match="aliases unfold to more than 16,777,216 characters"):
        read_yaml(text, "x")


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, b"\xff\xfe{", "{", "9" * 5000, "", '{"a": 1, "a": 2}']
)
def test_json_that_cannot_be_read_is_refused(text):
    with pytest.raises(UserError, match="x is n"):
        read_json(text, "x")


def test_lists_that_share_lists_count_as_often_as_they_are_walked():
    shared: list[object] = ["x", "x"]
    for _ in range(40):
        shared = [shared, shared]
    with pytest.raises(UserError, match="more than 1,000,000 values"):
        check_plain(shared, "x")
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(UserError, match="nested more than 64 deep"):
        check_plain({"a": loop}, "x")


def test_plain_values_are_numbers_texts_lists_and_dictionaries():
    check_plain({"a": [1, 2.5, None, True, ("b", {"c": -(2**63)})], 3: "d"}, "x")
    for value, kind in ((b"", "bytes"), ({1}, "set"), (object(), "object"), (1j, "complex")):
        with pytest.raises(UserError, match=f"x must hold .* got a {kind}"):
            check_plain([value], "x")


def test_other_types_are_found_within_the_same_bounds():
    """A checkpoint of a few bytes can share a list a thousand times at each of eight levels."""
    assert check_plain({"a": [b"x", 1, (b"y",)]}, "x", beside=(bytes,)) == [b"y", b"x"]
    shared: list[object] = [b"x"] * 1000
    for _ in range(7):
        shared = [shared] * 1000
    with pytest.raises(UserError, match="more than 1,000,000 values"):
        check_plain(shared, "x", beside=(bytes,))


def test_entries_are_checked_by_kind():
    kinds = {"a": int, "b": float | None, "c": list[str], "d": dict[str, float]}
    good = {"a": 1, "b": None, "c": ["x"], "d": {"y": 1}}
    check_entries(good, kinds, "x")
    check_entries({**good, "b": 2, "e": object()}, kinds, "x")
    for key, value, message in [
        ("a", True, "a in x must be int, got True"),
        ("a", "1", "a in x must be int, got '1'"),
        ("b", [], r"b in x must be float \| None, got \[\]"),
        ("c", ("x",), r"c in x must be list\[str\], got \('x',\)"),
        ("c", ["x", 1], r"c in x must be list\[str\], got \['x', 1\]"),
        ("d", {1: 1.0}, r"d in x must be dict\[str, float\], got \{1: 1.0\}"),
    ]:
        with pytest.raises(UserError, match=message):
            check_entries({**good, key: value}, kinds, "x")
    with pytest.raises(UserError, match="x has no d"):
        check_entries({key: good[key] for key in "abc"}, kinds, "x")
    with pytest.raises(UserError, match="x must be a dictionary, got 3"):
        check_entries(3, kinds, "x")
