"""The Chinese pages say what the English ones say: as many sections and points, the same code and links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAIRS = [("README.md", "README.zh-CN.md"), ("docs/index.md", "docs/index.zh-CN.md")]
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Outline:
    """What has to be the same in two languages."""

    headings: list[str]
    code: list[str]
    points: list[int]
    links: set[str]


def outline(path: Path) -> Outline:
    text = path.read_text(encoding="utf-8")
    fences = _FENCE.findall(text)
    prose = _FENCE.sub("", text)
    headings = re.findall(r"^(#+) ", prose, re.MULTILINE)
    sections = re.split(r"^#+ ", prose, flags=re.MULTILINE)
    points = [len(re.findall(r"^- ", section, re.MULTILINE)) for section in sections]
    links = {link.partition("#")[0] for link in re.findall(r"\]\(([^)]+)\)", prose)}
    code = [body for language, body in fences if language]  # a plan of folders is not repeated
    return Outline(
        headings, code, points, {link for link in links if not re.match(r"(README|index)\b", link)}
    )


@pytest.mark.parametrize(("english", "chinese"), PAIRS)
def test_a_translation_is_in_step(english: str, chinese: str) -> None:
    """Whoever changes one page changes the other: where this fails, the last sections differ."""
    assert outline(ROOT / chinese) == outline(ROOT / english)


def test_what_is_out_of_step_is_seen(tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    whole = outline(ROOT / "README.md")
    page = tmp_path / "page.md"
    for changed in (
        text.replace("## How fast", "### How fast"),
        text.replace("$ make test", "$ make tests"),
        text.replace("- One process", "One process"),
        text.replace("(docs/benchmarks.md)", "(docs/models.md)"),
    ):
        assert changed != text
        page.write_text(changed, encoding="utf-8")
        assert outline(page) != whole
