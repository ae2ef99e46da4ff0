"""An adversarial campaign against softline: damaged files, malformed texts and command lines, kills, and more.

    python -m tools.campaign                             an hour with everything
    python -m tools.campaign --minutes 5 --kinds files   five minutes with damaged files
    python -m tools.campaign --cases 20                  20 cases of each kind
    python -m tools.campaign --table                     what has been tried so far
    python -m tools.campaign --repeat files:1234         one case again, with all its output

Every case is a function of its kind and its seed. Finished cases are kept in WORK/ledger.jsonl: a campaign that was
stopped goes on where it was, and `--minutes` counts from there. The exit code is 1 if a case failed.
"""

import argparse
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from softline.cli.table import duration
from tools.campaign import running
from tools.campaign.interface import Kind, Verdict
from tools.campaign.kinds import NAMES, load_kinds
from tools.campaign.ledger import Entry, Ledger, counts, failures, table
from tools.campaign.schedule import Campaign, attempt

WORK = running.ROOT / "build" / "campaign"


class Progress:
    """The state of a campaign on one line: rewritten in a terminal, every minute a new one elsewhere."""

    def __init__(self, campaign: Campaign) -> None:
        self.campaign = campaign
        self.start = time.monotonic()
        self.printed = 0.0

    def __call__(self, entry: Entry | None) -> None:
        now = time.monotonic()
        terminal = sys.stderr.isatty()
        if entry is not None and entry.verdict is not Verdict.SURVIVED:
            self._say(f"{entry.verdict}: {repeat_command(entry)}  {entry.what}\n")
        elif now - self.printed < (1 if terminal else 60):
            return
        self.printed = now
        rows = counts(self.campaign.ledger, self.campaign.kinds.values())
        tried = "  ".join(f"{row['kind']} {row['tried']}/{row['target']}" for row in rows)
        line = f"{duration(now - self.start)}  {tried}  failed {len(failures(self.campaign.ledger.entries))}"
        self._say(line + ("" if terminal else "\n"))

    @staticmethod
    def _say(text: str) -> None:
        sys.stderr.write(f"\r\033[K{text}" if sys.stderr.isatty() else text)
        sys.stderr.flush()


def repeat_command(entry: Entry) -> str:
    return f"python -m tools.campaign --repeat {entry.kind}:{entry.seed}"


def repeat(case: str, work: Path) -> int:
    """Run one case again and print all of it; its directory stays."""
    name, _, seed = case.partition(":")
    kind = load_kinds([name])[name]
    running.keep_cases = True
    kind.prepare(work)
    outcome = attempt(kind, int(seed), work)
    sys.stdout.write(f"{outcome.verdict}: {outcome.what}\n{outcome.detail}\n")
    return int(outcome.verdict is not Verdict.SURVIVED)


def print_table(ledger: Ledger, kinds: Mapping[str, Kind]) -> None:
    sys.stdout.write(table(counts(ledger, kinds.values())) + "\n")
    failed = failures(ledger.entries)
    for entry in failed:
        sys.stdout.write(f"\n{entry.verdict}: {entry.what}\n    {repeat_command(entry)}\n")
    if not failed:
        sys.stdout.write("no failures\n")


def write_json(path: Path, ledger: Ledger, kinds: Mapping[str, Kind]) -> None:
    from softline import files
    from softline.measure.environment import environment

    failed = [
        {"verdict": entry.verdict, "what": entry.what, "repeat": repeat_command(entry)}
        for entry in failures(ledger.entries)
    ]
    files.write_json(path, {"environment": environment(), "rows": counts(ledger, kinds.values()), "failures": failed})


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tools.campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60, help="time budget (default: 60)")
    parser.add_argument("--cases", type=int, metavar="N", help="run N cases of each kind instead of a time budget")
    parser.add_argument("--seed", type=int, default=0, help="of the first case, in millions (default: 0)")
    parser.add_argument("--kinds", default=",".join(NAMES), metavar="NAME,...", help=f"default: {','.join(NAMES)}")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: 2)")
    parser.add_argument("--work", type=Path, default=WORK, metavar="DIR", help="default: build/campaign")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the table with machine and versions")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    parser.add_argument("--repeat", metavar="KIND:SEED", help="run one case again and print its output")
    options = parser.parse_args(arguments)
    options.kinds = options.kinds.split(",")
    unknown = set(options.kinds) - set(NAMES)
    if unknown:
        parser.error(f"unknown kinds: {', '.join(sorted(unknown))}; there are {', '.join(NAMES)}")
    if options.repeat and (
        options.repeat.partition(":")[0] not in NAMES or not options.repeat.split(":")[-1].isdigit()
    ):
        parser.error(f"--repeat needs KIND:SEED, got {options.repeat!r}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    work = options.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    if options.repeat:
        return repeat(options.repeat, work)
    kinds = load_kinds(options.kinds)
    ledger = Ledger(work / "ledger.jsonl")
    if not options.table:
        campaign = Campaign(kinds, ledger, work, options.seed, options.cases, options.minutes * 60)
        try:
            campaign.run(options.jobs, load_kinds, Progress(campaign))
        except KeyboardInterrupt:
            sys.stderr.write("\nstopped; the same command goes on from here\n")
    print_table(ledger, kinds)
    if options.json:
        write_json(options.json, ledger, kinds)
    return int(bool(failures(ledger.entries)))


if __name__ == "__main__":
    sys.exit(main())
