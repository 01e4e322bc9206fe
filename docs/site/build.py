"""Hooks of mkdocs: the README as the home page, sources that pages link to, signatures."""

import inspect
import re
import textwrap
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent.parent
LINK = re.compile(r"\]\((?P<up>\.\./)?(?P<path>[\w./-]+?\.(?:py|toml|json|md))(?P<anchor>#[\w-]+)?\)")
SIGNATURE = re.compile(r"<!-- signature: (\w+) -->")
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".md": "markdown"}


def on_files(files: Files, config: Any) -> Files:
    """Add the pages that are made here."""
    home = (ROOT / "README.md").read_text(encoding="utf-8").replace("](docs/", "](")
    files.append(File.generated(config, "index.md", content=home))
    for path in sorted({path for file in files.documentation_pages() for path in linked(file)}):
        text = (ROOT / path).read_text(encoding="utf-8")
        page = f"# {path}\n\n````{LANGUAGES[Path(path).suffix]}\n{text}````\n"
        files.append(File.generated(config, f"source/{path}.md", content=page))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turn links to files of the repository into links to their pages, and write the signatures of optimizers."""

    def turned(found: re.Match[str]) -> str:
        path = target(found, page.file.src_uri)
        return f"](source/{path}.md)" if path else found[0]

    return SIGNATURE.sub(lambda found: signature(found[1]), LINK.sub(turned, markdown))


def signature(name: str) -> str:
    """A constructor's arguments, which are made when the class is defined and stand in no source."""
    import flashopt_compile

    arguments = inspect.signature(getattr(flashopt_compile, name)).parameters.values()
    lines = textwrap.wrap(", ".join(map(str, arguments)), 72)
    return "\n".join(["```python", f"{name}(", *(f"    {line}" for line in lines), ")", "```"])


def linked(file: File) -> list[str]:
    """The files of the repository that a page links to."""
    found = (target(each, file.src_uri) for each in LINK.finditer(file.content_string))
    return [path for path in found if path]


def target(link: re.Match[str], page: str) -> str | None:
    """A link's file if it lies outside of docs: `../` leads there from all pages but the home page."""
    outside = link["up"] or (page == "index.md" and (ROOT / link["path"]).is_file())
    return link["path"] if outside and not page.startswith("source/") else None
