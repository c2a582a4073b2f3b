"""`akv doctor`: who lends, what the dead left, and whether there is room."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from akv.cli.doctor import segments
from akv.cli.doctor.command import add_doctor
from akv.cli.doctor.segments import _REMEDIES
from akv.errors import SettingsError
from akv.plan.segments import Room
from akv.pool.owners import this_process
from akv.pool.register import EntryFault, open_register, publish, register_directory
from akv.settings import StoreSettings
from akv.values.segments import SegmentEntry

Run = Callable[..., Any]
PAGE = 4096


@pytest.fixture
def directory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The register of this test alone."""
    with TemporaryDirectory(prefix="akv-test-", dir="/dev/shm") as shm:
        for name in [name for name in os.environ if name.startswith("AKV_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("AKV_STORE__SHARED_MEMORY_DIR", shm)
        made = register_directory(StoreSettings(shared_memory_dir=shm))
        open_register(made)
        yield made


@pytest.fixture
def run() -> Run:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.callback()(lambda: None)
    add_doctor(app)
    return lambda *options, **environ: CliRunner().invoke(app, ["doctor", *options], env=environ)


def lend(directory: Path, segment_id: str, **fields: Any) -> SegmentEntry:
    """A claim, whose segment exists."""
    owner, path = this_process(), directory / f"{segment_id}.segment"
    path.write_bytes(bytes(2 * PAGE))
    entry = SegmentEntry(
        segment_id=segment_id,
        owner_pid=owner.pid,
        owner_started=owner.started,
        pid_namespace=owner.pid_namespace,
        boot_id=owner.boot_id,
        uid=os.geteuid(),
        endpoint="",
        base=0,
        size=2 * PAGE,
        path=str(path),
    )
    entry = msgspec.structs.replace(entry, **fields)
    publish(directory, entry)
    return entry


def test_where_nothing_is_wrong_it_says_so_and_exits_with_0(run: Run, directory: Path) -> None:
    lend(directory, "a1")
    done = run()
    assert done.exit_code == 0, done.output
    assert f"register       {directory}\n" in done.output
    assert f"starting       0.0 MiB by process {os.getpid()}" in done.output
    assert "GiB of " in done.output
    assert "trouble" not in done.output


def test_O3_segments_of_the_dead_are_listed_and_removed(run: Run, directory: Path) -> None:
    lend(directory, "a1")
    lend(directory, "a2", boot_id="another")
    (directory / "a3.segment").write_bytes(bytes(PAGE))
    looked = run("--keep")
    assert looked.exit_code == 1
    assert "stale          0.0 MiB by process" in looked.output
    assert "run akv doctor without --keep" in looked.output
    assert len(list(directory.iterdir())) == 5
    done = run()
    assert done.exit_code == 0, done.output
    assert f"a2.segment), its owner is dead\nremoved        {directory / 'a3.segment'}, nobody's\n" in done.output
    assert sorted(path.name for path in directory.iterdir()) == ["a1.json", "a1.segment"]
    assert "removed" not in run().output


def test_X5_entries_that_are_refused_are_named_with_the_reason_and_what_to_do(run: Run, directory: Path) -> None:
    lend(directory, "a1", version=7)
    (directory / "b2.json").symlink_to(directory / "a1.json")
    done = run()
    assert done.exit_code == 1
    assert f"trouble        {directory / 'a1.json'} is not used (version): another version of akv wrote it" in done.output
    assert f"{directory / 'b2.json'} is not used (link): " in done.output
    assert (directory / "a1.json").exists()


def test_every_fault_of_an_entry_has_a_remedy() -> None:
    assert set(_REMEDIES) == {fault.value for fault in EntryFault}


def test_too_little_room_is_trouble_unless_somebody_lends_already(
    run: Run, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "rooms", lambda kind, directory: [Room("it", 10 * PAGE, 20 * PAGE)])
    done = run()
    assert done.exit_code == 1
    assert (
        f"a segment of {2**30} bytes (store.segment_bytes) does not fit: {10 * PAGE} of {20 * PAGE} bytes of it" in done.output
    )
    assert run(AKV_STORE__SEGMENT_MEMORY="private").exit_code == 0
    assert run(AKV_STORE__SEGMENT_BYTES="0").exit_code == 0


def test_as_json_it_says_the_same(run: Run, directory: Path) -> None:
    lend(directory, "a1", boot_id="another")
    done = run("--json", "--keep")
    assert done.exit_code == 1
    told = json.loads(done.output)
    assert told["register"] == str(directory)
    assert [entry["segment_id"] for entry in told["stale"]] == ["a1"]
    assert told["shared_memory"]["total_bytes"] >= told["shared_memory"]["free_bytes"] > 0
    assert (told["removed"], len(told["troubles"])) == (False, 1)
    freed = json.loads(run("--json").output)
    assert (freed["freed_bytes"], freed["removed"], freed["troubles"]) == (2 * PAGE, True, [])


def test_settings_are_read_as_a_server_reads_them_but_no_model_is_needed(run: Run, directory: Path, tmp_path: Path) -> None:
    path = tmp_path / "akv.toml"
    path.write_text('[store]\nsegment_bytes = "2GiB"\nmaster_address = "a:1"\n')
    told = json.loads(run("--json", str(path)).output)
    assert (told["segment_bytes"], told["register"]) == (2**31, str(directory))
    path.write_text('[store]\nsegment_byte = "2GiB"\n')
    refused = run(str(path)).exception
    assert isinstance(refused, SettingsError)
    assert "store.segment_bytes" in str(refused)
    path.write_text('[store]\nsegment_file_bytes = "16MiB"\n')
    assert isinstance(run(str(path)).exception, SettingsError)


def test_it_needs_no_store_client(directory: Path) -> None:
    script = "import sys; sys.modules['mooncake'] = None\nfrom akv.cli.main import main\nsys.argv = ['akv', 'doctor']\nmain()"
    assert subprocess.run([sys.executable, "-c", script], check=False, capture_output=True).returncode == 0
