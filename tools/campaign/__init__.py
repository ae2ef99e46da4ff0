"""An adversarial campaign against softline; `python -m tools.campaign --help` describes it."""
