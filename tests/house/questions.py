"""The newcomer's test: the questions of questions.toml, and the files that answer them today.

python -m tests.house.questions            the tree of file names and the questions, for who is asked
python -m tests.house.questions --answers  the questions with their right answers
"""

from __future__ import annotations

import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

from tests.house.defined import PACKAGES, ROOT, in_product

LIST = Path(__file__).with_name("questions.toml")


@dataclass(frozen=True)
class Question:
    """``answers``: names; right is every file in which one of them is defined, the first is the best. ``room``: of
    the house that it is about."""

    room: str
    text: str
    answers: tuple[str, ...]

    def files(self) -> tuple[str, ...]:
        """Raises LookupError unless each answer is defined exactly once."""
        found = []
        for name in self.answers:
            places = in_product(name)
            if len(places) != 1:
                raise LookupError(f"{self.text} {name} is defined {len(places)} times, not once")
            found.append(places[0].file)
        return tuple(dict.fromkeys(found))


def questions() -> list[Question]:
    return [
        Question(one["room"], one["text"], tuple(one["answers"])) for one in tomllib.loads(LIST.read_text())["question"]
    ]


def main(answers: bool) -> None:
    if not answers:
        print(
            "\n".join(
                str(path.relative_to(ROOT))
                for package in PACKAGES
                for path in sorted((ROOT / package).rglob("*.py"))
                if path.name != "__init__.py"
            )
        )
    for number, question in enumerate(questions(), 1):
        print(f"\n{number}. {question.text}" + (f"\n   {', '.join(question.files())}" if answers else ""))


if __name__ == "__main__":
    main("--answers" in sys.argv)
