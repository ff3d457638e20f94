"""What a report is about."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Subject:
    """A model and what was made of it, as a page names them in its head.

    Attributes
    ----------
    model : str
        "ResNet (resnet18), 11,689,512 parameters".
    config : str
        "int8: weights int8 symmetric per channel ..."; "" where there is none.
    """

    model: str
    config: str = ""


def about(subject: Subject | None, *further: tuple[str, str]) -> list[tuple[str, str]]:
    """Names and texts of the lines in the head of a page; those that are empty are left out."""
    known = [] if subject is None else [("model", subject.model), ("config", subject.config)]
    return [(name, text) for name, text in (*known, *further) if text]
