"""Hooks that mkdocs calls while it builds the site: generated pages, listings and equations."""

from typing import Any

import attention_pages
import equations
import listings
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every registered attention in the navigation."""
    assert config.nav is not None, "mkdocs.yml has a navigation"
    for section in config.nav:
        if section.get("Attentions") == "GENERATED":
            section["Attentions"] = ["attentions/index.md", *attention_pages.navigation()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    pages = {**attention_pages.pages(), "reference/ops.md": listings.operator_reference()}
    for path, content in pages.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, **options: Any) -> str:
    return listings.fill(markdown, page.file.src_uri)


def on_page_content(html: str, page: Page, **options: Any) -> str:
    return equations.set_equations(html, page.file.src_uri)
