"""The one exception type for mistakes of whoever calls softline."""


class UserError(ValueError):
    """Something that the caller can mend; the text names the rule and the offending value.

    The command line prints the text alone. Any other exception keeps its traceback: it is a fault of softline.
    """
