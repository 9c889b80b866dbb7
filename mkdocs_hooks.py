"""What the documentation needs besides MkDocs: pictures are drawn (``make screenshots``), not kept with the
source, and a page is built with those that are there."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Final

_PICTURE: Final = re.compile(r"^!\[([^\]]*)\]\((pictures/[^)#]+)(#[\w-]+)?\)$", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Leaves out pictures that nobody has drawn; says so once for each that would be shown."""

    def shown(found: re.Match[str]) -> str:
        if (Path(config["docs_dir"]) / found[2]).is_file():
            return found[0]
        return "" if found[3] == "#only-dark" else f"*Picture: {found[1]} (`make screenshots`).*"

    return _PICTURE.sub(shown, markdown)
