"""The documentation's settings: `make docs` builds it, runs its notebooks, and turns every warning into an error."""

import os
import tomllib
from pathlib import Path

from sphinx.util.nodes import make_refnode

HERE = Path(__file__).parent
PROJECT = tomllib.loads((HERE.parent / "pyproject.toml").read_text())["project"]

project, author, release = PROJECT["name"], "The rlfx authors", PROJECT["version"]
copyright = f"2026, {author}. Apache-2.0"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "README.md"]

# -- pages

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3
templates_path: list[str] = []
html_theme = "sphinx_book_theme"
html_title = f"rlfx {release}"
html_static_path = ["_static"]
html_css_files = ["rlfx.css"]
html_theme_options = {
    "show_toc_level": 2,
    "show_navbar_depth": 1,
    "home_page_in_toc": True,
    "navigation_with_keys": False,
    "navbar_persistent": [],
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True

# -- notebooks: executed where they have changed, and a cell that raises fails the build

nb_execution_mode = os.environ.get("RLFX_DOCS_EXECUTE", "cache")
nb_execution_cache_path = str(HERE / "_build" / "notebooks")
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 600
nb_merge_streams = True
nb_output_stderr = "remove"  # progress bars and XLA's messages
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Two devices, for the pages about several of them; `make docs` keeps whatever has been set.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
os.environ.setdefault("MPLBACKEND", "module://matplotlib_inline.backend_inline")

# -- the reference

maximum_signature_line_length = 100
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
python_use_unqualified_type_names = True
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_ivar = True
napoleon_preprocess_types = False

nitpicky = True
# Names of other packages are not linked: the build needs no network.
nitpick_ignore_regex = [
    (r"py:.*", r"(?!rlfx).*"),
    (
        r"py:.*",
        r"rlfx\.(recurrence|_|ahead|transforms\.blocks|profile\.overhead|place\.(graph|problem|simulate|critical|compose|replay)|envs\.spaces).*",
    ),
]


def resolve(app, env, node, contnode):
    """``:class:`Shared``` of any module is the one public object of that name."""
    if node.get("refdomain") != "py":
        return None
    domain = env.get_domain("py")
    target = node["reftarget"].rsplit(".", 1)[-1]
    found = {
        entry.docname + entry.node_id: entry
        for name, entry in domain.objects.items()
        if name.rsplit(".", 1)[-1] == target
    }
    if len(found) != 1:
        return None
    (entry,) = found.values()
    return make_refnode(app.builder, node["refdoc"], entry.docname, entry.node_id, contnode)


def setup(app):
    app.connect("missing-reference", resolve)
