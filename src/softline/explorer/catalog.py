"""The models that visitors can choose: checkpoints named on the command line, and models with random weights."""

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
    """One entry of the list of models."""

    label: str
    """The text that the visitor sees and the browser sends back."""
    text: str
    """The model, as described for `softline.analysis.subjects.open_subject`."""
    trained: bool

    @property
    def attentions(self) -> tuple[str, ...]:
        """The model's own attention and, for fresh models, those that can replace it."""
        return (OWN,) if self.trained else (OWN, *ATTENTIONS)

    def with_attention(self, attention: str) -> str:
        """The description of the model with one of its `attentions`."""
        check_option(f"the attention of {self.label}", attention, self.attentions)
        return self.text if attention == OWN else f"{self.text}:attention={attention}"


def find_choices(paths: Sequence[str]) -> dict[str, Choice]:
    """List checkpoints and then fresh models, by label.

    paths: checkpoint files, directories saved by timm, or directories that are searched for every best.pt.
    """
    found = [file for path in paths for file in find_checkpoints(Path(path))]
    choices = [Choice(_label(file), str(file), trained=True) for file in dict.fromkeys(found)]
    choices += [Choice(f"{name} (untrained)", name, trained=False) for name in FRESH]
    return {choice.label: choice for choice in choices}


def find_checkpoints(path: Path) -> list[Path]:
    """The checkpoint at a path, or every best.pt below it."""
    if path.is_file() or (path / "config.json").is_file():
        return [path]
    if not path.is_dir():
        raise UserError(f"no such checkpoint or directory: {path}")
    found = sorted(file for file in path.rglob(BEST) if file.is_file())
    if not found:
        raise UserError(f"there is no {BEST} in {path} or below: name a directory of `softline train` or a checkpoint")
    return found


def _label(file: Path) -> str:
    """The directory of a run tells more than the file name, which all runs share."""
    return str(file.parent) if file.name == BEST and file.parent.name else str(file)
