"""`akv bench vllm` where there is no vLLM, and what it says of figures."""

from dataclasses import dataclass

import pytest

from akv.cli.bench.vllm.figures import ConnectorFigures, Times, missed
from akv.cli.main import UNUSABLE, main


def times(median: float) -> Times:
    return Times(median=median, least=median, most=median, all=(median,))


def figures(
    connector: str, *, cold: float = 100.0, at_once: float = 50.0, beyond_local: float = 10.0, beyond_none: float = 0.0
) -> ConnectorFigures:
    return ConnectorFigures(
        connector=connector,
        cold=times(cold),
        local_hit=times(10.0),
        pool_hit=times(20.0),
        at_once=times(at_once),
        pool_beyond_local=beyond_local,
        cold_beyond_none=beyond_none,
    )


NONE = figures("none")
THEIRS = figures("mooncake_store", at_once=50.0, beyond_local=10.0, beyond_none=12.0)


@dataclass
class Case:
    ours: ConnectorFigures
    says: list[str]


@pytest.mark.parametrize(
    "case",
    [
        Case(figures("akv", beyond_local=5.0, at_once=50.0, beyond_none=6.0), []),
        Case(figures("akv", beyond_local=5.1), ["a hit from the pool takes 5.1 ms beyond a local one, more than 5.0"]),
        Case(figures("akv", beyond_local=5.0, at_once=50.1), ["requests at once from the pool take 50.1 ms"]),
        Case(
            figures("akv", beyond_local=5.0, beyond_none=6.1), ["saving adds 6.1 ms to a cold request of 100.0, more than 6.0"]
        ),
    ],
    ids=["as it must be", "pool hit", "at once", "cold"],
)
def test_the_benchmark_in_vllm_names_what_does_not_hold(case: Case) -> None:
    said = missed(NONE, THEIRS, case.ours, pages_elsewhere=False)
    assert len(said) == len(case.says)
    assert all(sentence.startswith(start) for sentence, start in zip(said, case.says, strict=True))


@pytest.mark.parametrize(("beyond_local", "count"), [(2.5, 0), (2.6, 1)])
def test_R1_pages_of_another_process_may_cost_a_quarter(beyond_local: float, count: int) -> None:
    ours = figures("akv", beyond_local=beyond_local)
    assert len(missed(NONE, THEIRS, ours, pages_elsewhere=True)) == count


def test_without_their_figures_saving_may_add_a_tenth() -> None:
    assert missed(NONE, None, figures("akv", beyond_none=10.0), pages_elsewhere=False) == ()
    assert missed(NONE, None, figures("akv", beyond_none=10.1), pages_elsewhere=False) == (
        "saving adds 10.1 ms to a cold request of 100.0, more than 10.0",
    )


def test_nothing_is_missed_where_akv_was_not_measured() -> None:
    assert missed(NONE, THEIRS, None, pages_elsewhere=True) == ()


def test_where_no_vllm_is_installed_the_benchmark_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["akv", "bench", "vllm"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == UNUSABLE
    assert "pip install vllm" in capsys.readouterr().err
