"""Malformed command lines, made from softline's own parsers.

Each has a valid beginning, some options with odd values, and at least one part that is certainly invalid, so that no
case starts long work. The command must end with exit code 2 and a message, and leave no file or directory behind.
"""

import argparse
import functools
from pathlib import Path
from random import Random

from softline.cli import COMMANDS, _parsers
from tools.campaign.files import FRESH_EVERY
from tools.campaign.interface import Outcome, Verdict, case_random
from tools.campaign.running import case_directory, judge, left_files, run

# an argument of a process has no null characters; the last one stands for a byte that is no UTF-8
ODD_TEXTS = (
    "",
    " ",
    "-",
    "--",
    "=",
    "x" * 3000,
    "a\x1b[31mb\x07",
    "\u202e\U0001f600é",
    "a\nb",
    "%s",
    "{0}",
    "~",
    "\udcff",
)
ODD_NUMBERS = ("-1", "0", "1e400", "nan", "-inf", "9" * 40, "1.5", "0x10", "\u0661", "1_000", "2147483648")
ODD_LISTS = (",", "1,,2", "1,-1", "a,b", "softmax,softmax", "softmax,nothing", "0.5,0.5,0.5", "1;2")
# places in the directory of the case
PATHS = (
    "IN/missing", "IN/missing/deeper.png", "IN/folder", "IN/folder/missing.svg", "IN/file.txt", "IN/file.txt/below",
    "IN/file.bmp", "IN/empty.pt", "/dev/null", "/proc/self/mem", ".", "..", "/",
)  # fmt: skip
POSITIONALS = ("quickstart", "softpp_tiny", "softpp_micro", "inline_micro", "attentions", "embedded", "nothing", "cost")
HELP = ("-h", "--help")


@functools.cache
def command_parsers() -> dict[tuple[str, ...], argparse.ArgumentParser]:
    """Return the parser of every command and sub-command by its words."""
    found: dict[tuple[str, ...], argparse.ArgumentParser] = {}
    for name in COMMANDS:
        _, parser = _parsers(name)
        assert parser is not None
        inner = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        if inner:
            found |= {(name, word): below for word, below in inner[0].choices.items()}
        else:
            found[name,] = parser
    return found


def odd_argument(random: Random) -> str:
    kinds = (ODD_TEXTS, ODD_NUMBERS, ODD_NUMBERS, ODD_LISTS, PATHS, PATHS, POSITIONALS)
    return random.choice(random.choice(kinds))


def _options(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """Return the options but help, which ends a command before it reads the rest, and a traceback that is asked for."""
    left_out = {*HELP, "--traceback"}
    return [action for action in parser._actions if action.option_strings and action.option_strings[0] not in left_out]


def _takes_value(action: argparse.Action) -> bool:
    return action.nargs != 0


def odd_options(parser: argparse.ArgumentParser, random: Random) -> list[str]:
    """Return a few options with odd values, some of them twice, abbreviated or joined to their value."""
    words = []
    for action in random.choices(_options(parser), k=random.randrange(4)):
        name = random.choice(action.option_strings)
        if random.random() < 0.1:
            name = name[:-1]
        value = [odd_argument(random)] if _takes_value(action) else []
        words += [f"{name}={value[0]}"] if value and random.random() < 0.4 else [name, *value]
    return words


def positionals(parser: argparse.ArgumentParser, random: Random) -> list[str]:
    """Return positional arguments, nearly always as many as the command needs."""
    needed = [action for action in parser._actions if not action.option_strings and action.dest != "help"]
    words = [random.choice([random.choice(POSITIONALS), odd_argument(random)]) for _ in needed]
    return words[:-1] if random.random() < 0.05 else words


def invalid_part(parser: argparse.ArgumentParser, random: Random) -> tuple[list[str], bool]:
    """Return words that no command accepts, and whether they must stand at the end."""
    options = [action for action in _options(parser) if _takes_value(action)]
    numbers = [action for action in options if action.type in (int, float)]
    chosen = [action for action in options if action.choices]
    parts: list[tuple[list[str], bool]] = [
        (["--no-such-option"], True),
        (["--no-such-option=3"], False),
        (["--no.such.option", "3"], False),
        (["--\x1b[31mno\x07", "3"], False),
    ]
    if options:
        parts.append(([random.choice(options).option_strings[0]], True))
    for action in [*numbers, *chosen]:
        wrong = random.choice(["nonsense", "1,x", "1.5.2", "--", "", "é"])
        parts.append(([f"{action.option_strings[0]}={wrong}"], False))
    return random.choice(parts)


def malformed(random: Random) -> list[str]:
    """Return a malformed command line."""
    parsers = command_parsers()
    kind = random.random()
    if kind < 0.03:
        return [odd_argument(random) for _ in range(random.randrange(3))] + ["--no-such-option"]
    words, parser = random.choice(list(parsers.items()))
    invalid, last = invalid_part(parser, random)
    rest = [positionals(parser, random), odd_options(parser, random)]
    random.shuffle(rest)
    if not last:
        rest.insert(random.randrange(3), invalid)
        invalid = []
    return [*words, *(word for part in rest for word in part), *invalid]


class Commands:
    name = "commands"
    unit = "command lines"
    target = 500
    share = 1.0

    def prepare(self, work: Path) -> None:
        """There is nothing to prepare: every case makes its few files itself."""

    def run(self, seed: int, work: Path) -> Outcome:
        random = case_random(self.name, seed)
        with case_directory(work, self.name, seed) as directory:
            place = directory / "in"
            (place / "folder").mkdir(parents=True)
            for name, content in (("file.txt", "text\n"), ("empty.pt", ""), ("file.bmp", "BM")):
                (place / name).write_text(content)
            before = sorted(place.rglob("*"))
            if random.random() < 0.04:
                return self._help(random, directory)
            arguments = [word.replace("IN/", f"{place}/") for word in malformed(random)]
            finished = run(arguments, directory, fresh=random.random() < 1 / FRESH_EVERY, time_limit=60)
            verdict = judge(finished, codes=[2])
            left = left_files(directory) + [str(path) for path in sorted(place.rglob("*")) if path not in before]
        what = f"softline {' '.join(map(repr, arguments))}"
        if verdict is Verdict.TRACEBACK and finished.code == 0:
            return Outcome(Verdict.WRONG, f"{what}: accepted", finished.detail())
        if verdict is Verdict.SURVIVED and left:
            return Outcome(Verdict.WRONG, f"{what}: left behind {', '.join(left)}", finished.detail())
        return Outcome(verdict, what, finished.detail())

    def _help(self, random: Random, directory: Path) -> Outcome:
        """Ask for help, which must be given whatever stands beside it."""
        words = random.choice(list(command_parsers()))
        arguments = [*words, random.choice(HELP)]
        finished = run(arguments, directory)
        verdict = judge(finished, codes=[0])
        if verdict is Verdict.SURVIVED and "usage: softline" not in finished.output:
            verdict = Verdict.WRONG
        return Outcome(verdict, f"softline {' '.join(arguments)}", finished.detail())


KIND = Commands()
