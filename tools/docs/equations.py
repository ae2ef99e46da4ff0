"""Equations as MathML, which browsers set without a script.

pymdownx.arithmatex marks what stands between dollars; here the marked LaTeX becomes MathML when the site is built.
"""

import html
import re

from latex2mathml.converter import convert
from mkdocs.exceptions import PluginError

INLINE = re.compile(r'<span class="arithmatex">\\\((?P<latex>.*?)\\\)</span>', flags=re.DOTALL)
DISPLAY = re.compile(r'<div class="arithmatex">\\\[(?P<latex>.*?)\\\]</div>', flags=re.DOTALL)
# an unknown command or an unbalanced brace is passed through as it stands
LEFT_OVER = re.compile(r"<m\w+[^>]*>(\\\w*|[{}]?\\)[^<]*</m\w+>")

# bars of norms, which have to know that they open and close
NORM = re.compile(r"\\([lr])(vert|Vert)(?![A-Za-z])")


def _stretched(match: re.Match[str]) -> str:
    return rf"\{'left' if match[1] == 'l' else 'right'}{match[0]}"


def set_equations(content: str, page: str) -> str:
    """The page's HTML with every marked formula as MathML."""
    content = INLINE.sub(lambda match: mathml(match["latex"], page, "inline"), content)
    content = DISPLAY.sub(lambda match: f'<div class="equation">{mathml(match["latex"], page, "block")}</div>', content)
    if 'class="arithmatex"' in content:
        raise PluginError(f"{page}: a formula was marked in a way that tools/docs/equations.py does not know")
    return content


def mathml(latex: str, page: str, display: str) -> str:
    latex = html.unescape(latex).strip()
    try:
        result: str = convert(NORM.sub(_stretched, latex), display=display)
    # the converter has an exception for each mistake, some of them of Python's own
    except Exception as error:
        raise PluginError(f"{page}: cannot convert the formula {latex!r}: {type(error).__name__} {error}") from error
    unknown = LEFT_OVER.search(result)
    if unknown is not None:
        raise PluginError(f"{page}: cannot convert {unknown[1]!r} in the formula {latex!r}")
    return result
