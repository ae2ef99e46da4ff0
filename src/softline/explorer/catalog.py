"""The models that visitors choose from: checkpoints of the command line, and fresh ones."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from softline.attention import ATTENTIONS
from softline.checks import check_option
from softline.errors import UserError

BEST = "best.pt"
FRESH = (
    "softpp_micro",
    "inline_micro",
    "softpp_tiny",
    "soft_tiny",
    "inline_deit_tiny",
    "inline_pvt_tiny",
    "inline_swin_tiny",
    "inline_cswin_tiny",
)
OWN = "its own"


@dataclass(frozen=True)
class Choice:
    """One line of the list of models."""

    label: str
    """What the visitor sees and the browser sends back."""
    text: str
    """For `softline.analysis.subjects.open_subject`."""
    trained: bool

    @property
    def attentions(self) -> tuple[str, ...]:
        """Its own, and for fresh models those that can take its place."""
        return (OWN,) if self.trained else (OWN, *ATTENTIONS)

    def with_attention(self, attention: str) -> str:
        """The text of the model with an attention of `attentions`."""
        check_option(f"the attention of {self.label}", attention, self.attentions)
        return self.text if attention == OWN else f"{self.text}:attention={attention}"


def find_choices(paths: Sequence[str]) -> dict[str, Choice]:
    """Checkpoints first, then fresh models, by label.

    paths: checkpoint files, directories that timm saved, or directories below which every best.pt is taken.
    """
    found = [file for path in paths for file in find_checkpoints(Path(path))]
    choices = [Choice(_label(file), str(file), trained=True) for file in dict.fromkeys(found)]
    choices += [Choice(f"{name} (untrained)", name, trained=False) for name in FRESH]
    return {choice.label: choice for choice in choices}


def find_checkpoints(path: Path) -> list[Path]:
    if path.is_file() or (path / "config.json").is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"no such checkpoint or directory: {path}")
    found = sorted(path.rglob(BEST))
    if not found:
        raise UserError(f"{path} has no {BEST} in it or below: name a directory of `softline train` or a checkpoint")
    return found


def _label(file: Path) -> str:
    """The directory of a run says more than the name that all its checkpoints share."""
    return str(file.parent) if file.name == BEST and file.parent.name else str(file)
