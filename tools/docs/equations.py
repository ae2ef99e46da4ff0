"""Convert equations to MathML, which browsers render without a script.

pymdownx.arithmatex marks the LaTeX between dollar signs, and this module converts it when the site is built.
"""

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

INLINE = re.compile(r'<span class="arithmatex">\\\((?P<latex>.*?)\\\)</span>', flags=re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\\\[(?P<latex>.*?)\\\]</div>', flags=re.DOTALL)
# the converter passes unknown commands and unbalanced braces through
LEFT_OVER = re.compile(r"<m\w+[^>]*>(\\\w*|[{}]?\\)[^<]*</m\w+>")

# bars of norms, which have to be marked as opening and closing
NORM = re.compile(r"\\([lr])(vert|Vert)(?![A-Za-z])")


def _stretched(match: re.Match[str]) -> str:
    return rf"\{'left' if match[1] == 'l' else 'right'}{match[0]}"


def set_equations(content: str, page: str) -> str:
    """Return the HTML of the page with every marked formula as MathML."""
    content = INLINE.sub(lambda match: mathml(match["latex"], page, "inline"), content)
    content = DISPLAY.sub(lambda match: f'<div class="equation">{mathml(match["latex"], page, "block")}</div>', content)
    if 'class="arithmatex"' in content:
        raise PluginError(f"{page}: a formula was marked in a way that tools/docs/equations.py does not know")
    return content


def mathml(latex: str, page: str, display: str) -> str:
    latex = html.unescape(latex).strip()
    try:
        result: str = convert(NORM.sub(_stretched, latex), display=display)
    # the converter raises many types of exceptions, some of them Python's own
    except Exception as error:
        raise PluginError(f"{page}: cannot convert the formula {latex!r}: {type(error).__name__} {error}") from error
    unknown = LEFT_OVER.search(result)
    if unknown is not None:
        raise PluginError(f"{page}: cannot convert {unknown[1]!r} in the formula {latex!r}")
    return result
