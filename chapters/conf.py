"""Sphinx's settings for the book as a website: `make book`. All of it works offline."""

from pathlib import Path

from minibatcher.tomlfile import read_toml

ROOT = Path(__file__).resolve().parents[1]  # Sphinx's source folder
_project = read_toml(ROOT / "pyproject.toml")["project"]

project = _project["name"]
html_title = "How an LLM server batches requests"
language = "en"
extensions = ["myst_nb", "minibatcher.labkit.website"]
root_doc = "chapters/index"
include_patterns = ["chapters/**", "labs/**", "CONTRIBUTING.md"]
exclude_patterns = [
    "**/_*",
    "**/.*",
    *(path.with_suffix(".md").relative_to(ROOT).as_posix() for path in ROOT.glob("chapters/*.ipynb")),
]
book_repository = _project["urls"]["Repository"]

nb_execution_mode = "off"
nb_mime_priority_overrides = [("html", "application/vnd.jupyter.widget-view+json", None)]  # needs a kernel
nb_ipywidgets_js = {}
myst_heading_anchors = 4
myst_heading_slug_func = "minibatcher.labkit.website.heading_anchor"
myst_enable_extensions = ["dollarmath"]

html_theme = "sphinx_book_theme"
html_math_renderer = "mathml"
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_css_files = ["book.css"]
html_js_files = [("book.js", {"defer": "defer"})]
html_use_index = False
html_show_sphinx = False
html_copyright = ""
html_context = {"default_mode": "auto"}
html_theme_options = {
    "logo": {"text": html_title},
    "repository_url": book_repository,
    "repository_branch": "main",
    "path_to_docs": "",
    "use_repository_button": True,
    "use_source_button": True,
    "launch_buttons": {"colab_url": "https://colab.research.google.com"},
    "show_navbar_depth": 1,
    "show_toc_level": 2,
    "navbar_start": [],
    "navbar_center": [],
    "navbar_end": [],
    "navbar_persistent": [],
    "footer_content_items": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
