"""The pages of the documentation, and the code that they show."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [
    *(ROOT / f"{name}.md" for name in ("README", "CONTRIBUTING", "CHANGELOG", "SECURITY")),
    *sorted((ROOT / "docs").glob("*.md")),
]
FENCE = re.compile(r"^```(\w*)$(.*?)^```$", re.MULTILINE | re.DOTALL)
PROMPT = "$ "


@dataclass
class Line:
    """One line of a shell block: the programs of its pipe, and the variables set before the last one."""

    text: str
    variables: dict[str, str] = field(default_factory=dict)
    programs: list[list[str]] = field(default_factory=list)

    @property
    def command(self) -> list[str]:
        """The words after `nsa` of the last program, however it is called; empty if it is another program."""
        words = self.programs[-1]
        if words[0] == "torchrun" or words[:2] == ["python", "-m"]:
            words = words[words.index("-m") + 1 :]
        return words[1:] if words[0] == "nsa" else []


def fenced(text: str, language: str) -> list[str]:
    """The blocks of a page in one language."""
    return [block for found, block in FENCE.findall(text) if found == language]


def snippets(text: str) -> list[str]:
    """Code between backticks, in sentences and tables."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def shell_lines(text: str) -> list[Line]:
    """The lines of indented blocks, and those of transcripts after their prompt, that call a program."""
    indented = re.findall(r"^ {4}(\S.*)$", FENCE.sub("", text), re.MULTILINE)
    typed = [
        line.removeprefix(PROMPT) for block in fenced(text, "") for line in block.splitlines() if PROMPT in line[:2]
    ]
    return [line for line in map(parse_line, [*indented, *typed]) if line is not None]


def parse_line(text: str) -> Line | None:
    """The line, if it begins with a program that these pages use."""
    match = re.match(r"((?:[A-Z_\d]+=\S+ )*)((?:nsa(?= [a-z])|torchrun|python|cat|make|pytest) .+)", text)
    if match is None:
        return None
    variables = dict(item.split("=", 1) for item in match[1].split())
    words = shlex.split(match[2], comments=True)
    programs: list[list[str]] = [[]]
    for word in words:
        if word == "|":
            programs.append([])
        elif word != "...":
            programs[-1].append(word)
    return Line(text, variables, programs)
