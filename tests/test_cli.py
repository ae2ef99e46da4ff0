"""What all commands share: parsing, errors, exit codes."""

import errno
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from softline import __version__, cli
from softline.cli import COMMANDS, main, parse
from softline.cli.messages import EXTRAS
from softline.errors import UserError
from softline.files import make_directory, write_text

ROOT = Path(__file__).parents[1]


@pytest.fixture
def failing(monkeypatch, capsys):
    """Run a command that raises an error; return its exit code and what it writes to standard error."""

    def run(error, *arguments):
        def fail(options):
            raise error

        monkeypatch.setattr("softline.cli.models.run", fail)
        code = main(arguments or ["models"])
        return code, capsys.readouterr().err

    return run


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["--version"])
    assert stop.value.code == 0
    assert capsys.readouterr().out.strip() == f"softline {__version__}"


def test_every_command_has_a_file_and_a_line_of_help(capsys):
    shared = {"__init__", "__main__", "arguments", "messages", "outputs", "processes"}
    shared |= {"progress", "signals", "startup", "table", "task_options", "terminal"}
    # parts of a command's file
    shared |= {"analyze_arguments", "bench_check", "bench_tables"}
    files = {path.stem for path in Path(cli.__file__).parent.glob("*.py")} - shared
    assert set(COMMANDS) == files
    with pytest.raises(SystemExit):
        main(["--help"])
    printed = capsys.readouterr().out
    assert all(re.search(rf"^    {name}\b", printed, re.MULTILINE) for name in COMMANDS)


def test_help_imports_nothing_large():
    """For every command and sub-command, as their help pages list them, in one process."""
    code = """
import contextlib, io, re, sys
from softline.cli import main

def help_of(*command):
    page = io.StringIO()
    with contextlib.redirect_stdout(page), contextlib.suppress(SystemExit):
        main([*command, "--help"])
    assert "usage: softline" in page.getvalue()
    large = {"torch", "timm", "numpy", "matplotlib", "PIL", "tqdm", "yaml"} & set(sys.modules)
    assert not large, (command, large)
    listed = re.search(r"^  (?:COMMAND|WHAT)$\\n((?:    .*\\n)+)", page.getvalue(), re.MULTILINE)
    names = re.findall(r"^    (\\w+)", listed[1], re.MULTILINE) if listed else []
    return 1 + sum(help_of(*command, name) for name in names)

print(help_of())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    # the program itself, its commands, seven kinds of bench and seven of analyze
    assert int(done.stdout) == 1 + len(COMMANDS) + 7 + 7


@pytest.mark.parametrize(
    ("arguments", "overrides"),
    [
        (["train", "quickstart", "--optimizer.lr", "-1", "--resume"], ["--optimizer.lr", "-1"]),
        (["train", "--optimizer.lr=1e-3", "quickstart"], ["--optimizer.lr=1e-3"]),
        (["train", "--optimizer.lr", "1e-3", "quickstart", "--output", "x"], ["--optimizer.lr", "1e-3"]),
        (["train", "quickstart", "--optimizer.lr", "--output", "x"], ["--optimizer.lr"]),
        (["--traceback", "train", "quickstart"], []),
    ],
)
def test_keys_of_recipes_may_stand_anywhere(arguments, overrides):
    options = parse(arguments)
    assert (options.command, options.recipe, options.overrides) == ("train", "quickstart", overrides)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["trains"], "invalid choice: 'trains'"),
        (["models", "--size", "3"], "softline models: error: unrecognized arguments: --size"),
        (["train", "quickstart", "twice"], "softline train: error: unrecognized arguments: twice"),
        (["compare", "--seeds", "0,one"], "expected whole numbers separated by commas, got '0,one'"),
    ],
)
def test_arguments_that_cannot_be_parsed_end_in_a_message(arguments, message, capsys):
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err


def test_mistakes_of_users_end_in_one_line(failing):
    assert failing(UserError("batch_size must be at least 1, got 0")) == (
        2,
        "softline models: error: batch_size must be at least 1, got 0\n",
    )


@pytest.mark.parametrize("arguments", [["models", "--traceback"], ["--traceback", "models"]])
def test_the_traceback_is_shown_on_request_with_its_cause(failing, arguments):
    error = UserError("x is wrong")
    error.__cause__ = RuntimeError("what lies below")
    code, printed = failing(error, *arguments)
    assert code == 2
    assert printed.startswith("RuntimeError: what lies below")
    assert "Traceback" in printed
    assert printed.endswith("softline models: error: x is wrong\n")


def test_faults_of_softline_keep_their_traceback(failing):
    for error in (ValueError("a fault"), OSError("no file is named"), ConnectionRefusedError(errno.ECONNREFUSED, "no")):
        with pytest.raises(type(error)):
            failing(error)


def raised_by(function, *arguments):
    try:
        function(*arguments)
    except OSError as error:
        return error
    raise AssertionError("nothing was raised")


def test_what_the_system_says_about_a_file_is_one_line(failing, tmp_path):
    (tmp_path / "file").write_text("")
    inside = tmp_path / "file" / "inside"
    messages = {
        raised_by(open, tmp_path / "none"): f"No such file or directory: {tmp_path}/none",
        raised_by(os.rename, tmp_path / "none", inside): f"{tmp_path}/none -> {inside}",
        raised_by(make_directory, inside): f"could not create the directory {inside}: Not a directory",
        raised_by(write_text, inside, ""): f"could not write {inside}: Not a directory",
        OSError(errno.ENOSPC, "No space left on device"): "No space left on device",
    }
    for error, message in messages.items():
        code, printed = failing(error)
        assert code == 2
        assert printed.startswith("softline models: error: ")
        assert printed.endswith(f"{message}\n")
        assert printed.count("\n") == 1


def test_missing_optional_packages_are_named_with_their_extra(failing):
    error = ModuleNotFoundError("No module named 'matplotlib'", name="matplotlib.pyplot")
    assert failing(error)[1] == "softline models: error: this needs matplotlib: pip install 'softline[train]'\n"
    with pytest.raises(ModuleNotFoundError):
        failing(ModuleNotFoundError("No module named 'torch'", name="torch"))


def test_every_package_of_an_extra_is_known():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    required = {
        re.split("[<>=]", package)[0].replace("-", "_"): extra
        for extra in ("train", "data", "dense", "explore", "export")
        for package in extras[extra]
        if not package.startswith("softline")
    }
    assert required == EXTRAS


def test_ctrl_c_has_its_exit_code(failing):
    assert failing(KeyboardInterrupt()) == (130, "\ninterrupted\n")


def test_a_reader_that_closes_the_pipe_is_no_error():
    code = """
import sys
from softline.cli import main, models

def print_much(options):
    while True:
        print("line")

models.run = print_much
sys.exit(main(["models"]))
"""
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "line\n"
        process.stdout.close()
        assert (process.wait(), process.stderr.read()) == (0, "")
