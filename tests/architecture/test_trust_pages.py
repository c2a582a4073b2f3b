"""What nobody can enforce is said where people choose (X1, X3)."""

from pathlib import Path

import pytest

DOCS = Path(__file__).parents[2] / "docs"


def text(page: str) -> str:
    return " ".join((DOCS / page).read_text(encoding="utf-8").split())


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("how-to/share.md", "Any client of a pool can list, read and write every key"),
        ("how-to/share.md", "Tenants that distrust each other need pools of their own"),
        ("how-to/share.md", "finds pages that a client without the secret wrote"),
        ("reference/settings.md", "Separates deployments that share a pool; it hides nothing from anybody."),
        ("reference/settings.md", "also those that another client of the pool wrote"),
    ],
)
def test_X1_who_chooses_a_namespace_reads_that_it_hides_nothing(page: str, said: str) -> None:
    assert said in text(page)


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("how-to/share.md", "Use a random secret for each tenant, no name"),
        ("how-to/share.md", "by the time that an answer takes"),
        ("reference/settings.md", "Salts are random secrets of each tenant, and no names."),
    ],
)
def test_X3_who_chooses_salts_reads_what_they_are_and_what_time_tells(page: str, said: str) -> None:
    assert said in text(page)
