"""What the benchmarks of shared cores set up: control groups with a quota, and a busy neighbour."""

from __future__ import annotations

import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest

from bench import neighbour, quota


def test_a_group_of_version_2_has_the_quota_and_goes(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu memory\n")
    with quota.group("ours", 150, tmp_path) as made:
        assert made.place == tmp_path / "ours"
        assert (made.place / "cpu.max").read_text() == "150000 100000"
        (made.place / "cpu.stat").write_text("usage_usec 5\nthrottled_usec 2500000\n")
        assert made.throttled() == 2.5
        for file in made.place.iterdir():  # those of a real group are not in the way
            file.unlink()
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert not (tmp_path / "ours").exists()


def test_a_group_of_version_1_has_the_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cgroup.procs").touch()
    with quota.group("ours", 50, tmp_path) as made:
        assert made.place == tmp_path / "cpu" / "ours"
        assert (made.place / "cpu.cfs_quota_us").read_text() == "50000"
        assert (made.place / "cpu.cfs_period_us").read_text() == "100000"
        (made.place / "cpu.stat").write_text("nr_throttled 5\nthrottled_time 1500000000\n")
        assert made.throttled() == 1.5
        for file in made.place.iterdir():
            file.unlink()


def test_where_there_are_no_groups_that_is_said(tmp_path: Path) -> None:
    with pytest.raises(quota.NoGroups, match="has no CPU controller"), quota.group("ours", 50, tmp_path):
        pass
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "ours").write_text("in the way")
    with pytest.raises(quota.NoGroups, match="ours cannot be made: File exists"), quota.group("ours", 50, tmp_path):
        pass


def test_a_command_enters_the_group_before_it_begins(tmp_path: Path) -> None:
    made = quota.Group(tmp_path / "a 'place'")
    made.place.mkdir()
    words = shlex.split(made.enter("printf '%s' 'a b'"))
    process = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert process.communicate()[0] == b"a b"
    assert int((made.place / "cgroup.procs").read_text()) == process.pid


def test_a_quota_holds() -> None:
    """A real one, where this machine lets us: what a process gets in a second is no more than its share."""
    spin = "import time; end = time.monotonic() + 1\nwhile time.monotonic() < end: pass\nprint(time.process_time())"
    try:
        with quota.group(f"tailrace-test-{os.getpid()}", 30) as made:
            words = shlex.split(made.enter(shlex.join([sys.executable, "-S", "-c", spin])))
            took = float(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    except quota.NoGroups as error:
        pytest.skip(str(error))
    assert took < 0.6  # 0.3, what the start took, and a period more
    assert not made.place.exists()


def test_cpu_time_is_that_of_the_whole_tree() -> None:
    own = quota.cpu_seconds(os.getpid())
    assert own >= time.process_time() - 0.5  # more where other tests had children, which count
    spin = "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()"
    child = subprocess.Popen([sys.executable, "-S", "-c", spin], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    assert quota.cpu_seconds(child.pid) >= 0.3
    usage = quota.Usage(child.pid)
    assert 0 <= usage.seconds() < 0.3  # only what it uses from now on
    assert usage.others() >= 0
    assert quota.cpu_seconds(os.getpid()) >= own + 0.3
    child.communicate(b"\n")


def test_the_neighbour_is_stopped_at_first_and_gone_in_the_end() -> None:
    with neighbour.spinner() as busy:
        _, status = os.waitpid(busy.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
    assert busy.poll() is not None


def test_the_tables_say_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    full = quota.Run([100.0, 120.0, 110.0], [0.01] * 3, [0.02] * 3, [0.0] * 3, [0.0] * 3)
    half = quota.Run([50.0, 30.0, 44.0], [0.012] * 3, [0.09] * 3, [0.5] * 3, [0.3] * 3)
    quota.show({200: full, 100: half})
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split() == ["200%", "110.0", "1.00", "1.00", "10.00", "20.0", "0.00", "0.0"]
    assert second.split() == ["100%", "44.0", "0.40", "0.50", "12.00", "90.0", "0.50", "0.3"]
    neighbour.show(["ours", "theirs"], [([100.0, 100.0, 80.0], [50.0, 60.0, 44.0]), ([50.0] * 3, [10.0] * 3)])
    shown = capsys.readouterr().out
    assert "ours             100.0      50.0   0.55 (0.50 to 0.60)" in shown
    assert "beside it, ours / theirs: 5.00 (4.40 to 6.00)" in shown


@pytest.mark.parametrize("share", quota.QUOTAS)
def test_threads_are_sized_from_a_real_quota(share: int) -> None:
    ask = "from tailrace.backends.cpu.threads import usable_cores; print(usable_cores())"
    try:
        with quota.group(f"tailrace-test-{os.getpid()}", share) as made:
            words = shlex.split(made.enter(shlex.join([sys.executable, "-c", ask])))
            cores = int(subprocess.run(words, check=True, capture_output=True, text=True).stdout)
    except quota.NoGroups as error:
        pytest.skip(str(error))
    assert cores == min(len(os.sched_getaffinity(0)), math.ceil(share / 100))
