"""`akv bench snapshot`: what it says of figures, and that it runs wherever torch does."""

import json

import pytest
import torch

from akv.cli.bench.snapshot import run
from akv.cli.bench.snapshot.figures import Run, SnapshotFigures, Way, missed, ratio, way
from akv.cli.main import UNUSABLE, main

DEVICES = ["cpu", *([pytest.param("cuda", marks=pytest.mark.cuda)] if torch.cuda.is_available() else [])]


class Bench:
    """The command, run in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys

    def __call__(self, *options: str) -> tuple[int, str, str]:
        self._monkeypatch.setattr("sys.argv", ["akv", "bench", "snapshot", *options])
        with pytest.raises(SystemExit) as ended:
            main()
        said = self._capsys.readouterr()
        return int(ended.value.code or 0), said.out, said.err


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Bench:
    return Bench(monkeypatch, capsys)


@pytest.mark.parametrize("device", DEVICES)
def test_S3_it_measures_three_ways_to_copy_the_same_pages(device: str, bench: Bench) -> None:
    shape = ("--pages", "5", "--buffers", "3", "--buffer-kib", "1", "--runs", "2")
    status, out, err = bench(*shape, "--device", device, "--json")
    figures = json.loads(out)
    assert tuple(figures) == SnapshotFigures.__struct_fields__, err
    assert (figures["pages"], figures["buffers"], figures["buffer_bytes"], figures["runs"]) == (5, 3, 1024, 2)
    ways = [figures[name] for name in ("snapshot", "bulk", "copies")]
    assert min(each["host_ms"] for each in ways) > 0
    if device == "cpu":
        assert [each["stream_ms"] for each in ways] == [None] * 3
        assert (figures["bulk_over_snapshot"], figures["copies_over_snapshot"], figures["missed"]) == (None, None, [])
    else:
        assert min(each["stream_ms"] for each in ways) > 0
    assert status == (1 if figures["missed"] else 0)


def test_of_a_cpu_it_says_that_there_is_no_stream_time(bench: Bench) -> None:
    status, out, _ = bench("--pages", "2", "--buffers", "2", "--buffer-kib", "1", "--runs", "1", "--device", "cpu")
    assert status == 0
    assert "no stream time" in " ".join(out.split())


def test_asked_for_a_device_that_is_not_there_it_says_so(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    status, out, err = bench("--device", "cuda")
    assert (status, out) == (UNUSABLE, "")
    assert "no CUDA device" in err


@pytest.mark.parametrize(
    ("bulk", "copies", "host_ms", "says"),
    [
        (10.0, 30.0, 2.0, []),
        (9.9, 30.0, 1.0, ["one bulk copy holds the stream 9.9 times"]),
        (10.0, 29.0, 1.0, ["a copy per buffer holds the stream 29.0 times"]),
        (50.0, 50.0, 2.01, ["takes 2.01 ms of the host"]),
        (None, None, 100.0, []),
    ],
)
def test_what_is_missed(bulk: float | None, copies: float | None, host_ms: float, says: list[str]) -> None:
    sentences = missed(bulk, copies, host_ms)
    assert len(sentences) == len(says)
    assert all(part in sentence for part, sentence in zip(says, sentences, strict=True))


def test_what_is_missed_is_the_status(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "missed", lambda *figures: ("too slow",))
    status, out, _ = bench("--pages", "2", "--buffers", "1", "--buffer-kib", "1", "--runs", "1")
    assert status == 1
    assert "too slow" in out


def test_ratios_are_of_single_runs_and_times_are_medians() -> None:
    slow, fast = [Run(30.0, 3.0), Run(10.0, 5.0), Run(90.0, 4.0)], [Run(1.0, 1.0), Run(2.0, 1.0), Run(3.0, 2.0)]
    assert ratio(slow, fast) == 30.0
    assert ratio([Run(None, 1.0)], [Run(None, 1.0)]) is None
    assert way(slow) == Way(stream_ms=30.0, host_ms=4.0)
    assert way([Run(None, 1.0)]) == Way(stream_ms=None, host_ms=1.0)
