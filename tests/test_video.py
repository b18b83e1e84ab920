"""Videos of episodes, by `dppo eval --video` and `dppo replay --video`, are read back."""

from __future__ import annotations

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import tiny_run
from recorder import Notes
from worlds.drawn import COLORS, Drawn

import dppo
from dppo.__main__ import main
from dppo.errors import ConfigError, DppoError
from dppo.records.files.episodes import read_episodes
from dppo.tools.video import DEFAULT_FPS, Video

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("drawn") / "run"
    dppo.train(tiny_run(run, steps=32, iterations=1, env_id="worlds.drawn:Drawn"))
    return run


def decoded(path: Path) -> tuple[Any, list[np.ndarray]]:
    """Return the stream of a video and its images."""
    av = pytest.importorskip("av", reason="PyAV is not installed")
    with av.open(str(path)) as container:
        images = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
        return container.streams.video[0], images


def is_color(pixels: np.ndarray, color: np.ndarray) -> bool:
    return bool(np.abs(pixels.astype(int) - color).max() < 25)  # H.264 is not exact


def test_a_replay_is_written_as_a_video_for_browsers(
    run: Path, tmp_path: Path, capsys: Capture
) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    episode = max(read_episodes(run), key=lambda episode: episode.length)
    path = tmp_path / "out.mp4"
    words = f"replay {run} --episode {episode.number} --video {path} --trust"
    assert main(words.split()) == 0

    num_images = episode.length + 1
    size = f"{num_images} images of 252 x 180, 12 per second\n"
    assert f"{path}: 1 episode, {size}" in capsys.readouterr().out

    stream, images = decoded(path)
    codec = stream.codec_context
    assert codec.name == "h264"
    assert codec.pix_fmt == "yuv420p"
    assert float(stream.average_rate) == 12.0
    assert len(images) == num_images
    assert {image.shape for image in images} == {(180, 252, 3)}

    _, *after_steps = images
    for image, action in zip(after_steps, episode.actions(), strict=True):
        assert is_color(image[20:-20, 20:-20], COLORS[action])
    assert [file.name for file in tmp_path.iterdir()] == ["out.mp4"]


@pytest.mark.slow
def test_cartpole_is_filmed_with_what_the_extra_brings(tmp_path: Path) -> None:
    """With PyAV and pygame, which are in the extra `video`."""
    for package in ("av", "pygame"):
        pytest.importorskip(package, reason="needs the extra `video`")
    config = tiny_run(tmp_path / "run")
    evaluation = dppo.evaluate(dppo.train(config), episodes=2, video=tmp_path / "out.mp4")
    _, images = decoded(tmp_path / "out.mp4")
    assert len(images) == max(evaluation.lengths) + 1
    assert max(float(image.std()) for image in images) > 5  # a cart and a pole, no empty picture


def tile_of(image: np.ndarray, number: int) -> np.ndarray:
    """Return one of the nine tiles of an image, which are counted row by row."""
    height = image.shape[0] // 3
    width = image.shape[1] // 3
    row, column = divmod(number, 3)
    in_row = image[row * height : (row + 1) * height]
    return in_row[:, column * width : (column + 1) * width]


def middle_of(tile: np.ndarray) -> np.ndarray:
    height, width, _ = tile.shape
    y = height // 2
    x = width // 2
    return tile[y - 9 : y + 9, x - 9 : x + 9]


def test_episodes_of_an_evaluation_are_side_by_side(run: Path, tmp_path: Path) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")
    path = tmp_path / "out.mp4"
    env = Drawn(shown="grows", render_mode="rgb_array")
    evaluation = dppo.evaluate(run, env, 12, seed=3, video=path)
    without_video = dppo.evaluate(run, Drawn(), 12, seed=3)
    assert evaluation.lengths == without_video.lengths

    stream, images = decoded(path)
    shown = evaluation.lengths[:9]
    assert len(images) == max(shown) + 1

    height, width, _ = images[0].shape
    assert stream.height == height // 3 * 3
    assert stream.width == width // 3 * 3

    shortest = int(np.argmin(shown))
    length = shown[shortest]
    last = middle_of(tile_of(images[length], shortest))
    after_its_end = middle_of(tile_of(images[length + 1], shortest))
    assert any(is_color(last, color) for color in COLORS)
    assert any(is_color(after_its_end, color // 2) for color in COLORS)

    between_the_tiles = tile_of(images[0], shortest)[:3, :3]
    assert is_color(between_the_tiles, np.full(3, 64))


def test_a_video_that_cannot_be_written_does_not_take_the_result_with_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("av", reason="PyAV is not installed")

    def full(self: Video, path: Path) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Video, "_encode", full)
    env = Drawn(render_mode="rgb_array")
    words = r"out\.mp4: cannot be written: No space "
    with Notes() as notes, pytest.raises(DppoError, match=words):
        dppo.evaluate(run, env, 2, video=tmp_path / "out.mp4")
    assert notes.texts[-1].startswith("ended early: 2 of 2 episodes, mean return ")


@pytest.mark.parametrize(
    ("shown", "says"),
    [
        (np.zeros((4, 4)), r"returned an array float64\[4, 4\], not an image"),
        ([], r"returned a list of 0, not an image"),
    ],
)
def test_what_is_no_image_is_refused_after_the_reset(
    shown: Any, says: str, run: Path, tmp_path: Path
) -> None:
    env = Drawn(shown=shown, render_mode="rgb_array")
    with pytest.raises(ConfigError, match=says):
        Video(tmp_path / "out.mp4", env).add()
    assert list(tmp_path.iterdir()) == []


def test_a_video_is_in_the_folder_in_which_it_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The environment leaves that folder; and it may have a `metadata` of None."""
    pytest.importorskip("av", reason="PyAV is not installed")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path)
    env: Any = Drawn(render_mode="rgb_array")
    env.metadata = None
    video = Video(Path("out.mp4"), env)
    env.reset(seed=0)
    monkeypatch.chdir("elsewhere")
    video.add()
    video.write()
    stream, images = decoded(tmp_path / "out.mp4")
    assert len(images) == 1
    assert float(stream.average_rate) == DEFAULT_FPS
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize(
    ("metadata", "fps"),
    [
        *(
            ({"render_fps": fps}, 50.0)
            for fps in (50, 50.0, np.int64(50), np.float32(50), np.uint8(50))
        ),
        *(
            ({"render_fps": fps}, 30.0)
            for fps in (None, "50", 0, -1, np.nan, np.int64(10**6), 10**400)
        ),
        (None, 30.0),
    ],
)
def test_images_per_second_are_those_of_the_environment_also_as_numbers_of_numpy(
    metadata: Any, fps: float
) -> None:
    fps_of_video = Video(Path("out.mp4"), SimpleNamespace(metadata=metadata))._fps
    assert type(fps_of_video) is float
    assert fps_of_video == fps
    assert Video(Path("out.mp4"), SimpleNamespace(metadata=metadata), repeat=4)._fps == fps / 4


def test_a_missing_package_is_named_up_front(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dppo.user_code.find_spec", lambda name: None)
    assert main(["eval", str(run), "--video", "out.mp4"]) == 2
    assert "video=out.mp4: needs the package av. Install it: " in capsys.readouterr().err
