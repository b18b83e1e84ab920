"""Videos that a browser plays, MP4 files of H.264 in yuv420p, from the images that an environment renders."""

import math
import os
import zlib
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from dppo.errors import ConfigError, DppoError, counted
from dppo.log import logger
from dppo.records.files.disk import writing
from dppo.user_code import in_a_line, require_package

MAX_TILES = 9  # episodes side by side
MAX_WIDTH = 1280  # pixels of a video
MIN_SIDE = 256  # pixels of the longer side, up to which images are enlarged
MARGIN = 8  # pixels between tiles
FASTEST = 1  # level of compression
GRAY = 64
DEFAULT_FPS = 30.0
MAX_FPS = 1000
MAX_CHARACTERS = 100  # length of the description of a rendered object in a message


class Video:
    """Keeps the images of some episodes, compressed, then writes them side by side."""

    @staticmethod
    def check(path: Path, *, render: bool = False) -> None:
        """Raise ConfigError if no video can be written to `path`, or a window is asked for, too."""
        folder = path.absolute().parent
        problem = ""
        if render:
            problem = "an environment is shown in a window or in a video. Leave one of them out."
        elif path.suffix != ".mp4" or path.is_dir():
            problem = "is not the name of a video. Use one such as out.mp4."
        elif not os.access(folder, os.W_OK):
            problem = f"{folder} is not a folder that can be written to. Use another one."
        if problem:
            raise ConfigError(f"video={path}: {problem}")
        require_package(f"video={path}:", "av")

    def __init__(self, path: Path, env: Any, episodes: int = 1, repeat: int = 1) -> None:
        """Prepare a video of `episodes` episodes of `env`, in which an image stands for `repeat` frames of `env`."""
        self._fps = DEFAULT_FPS / repeat
        metadata = getattr(env, "metadata", None) or {}
        fps: Any = metadata.get("render_fps")
        is_number = isinstance(fps, int | float | np.integer | np.floating)
        if is_number and 0 < fps <= MAX_FPS:
            self._fps = float(fps) / repeat
        self._path = path.absolute()  # the environment may change the current folder
        self.env = env
        """The environment whose images are added."""
        num_tiles = min(episodes, MAX_TILES)
        self._images: list[list[bytes]] = [[] for _ in range(num_tiles)]
        self._columns = math.ceil(math.sqrt(num_tiles))
        self._margin = MARGIN if num_tiles > 1 else 0
        self._tile: tuple[int, int] | None = None  # height and width

    def add(self, episode: int = 0) -> None:
        """Add the image that the environment shows now; raise ConfigError if it is none."""
        if episode >= len(self._images):
            return
        image = image_of(self.env)
        if self._tile is None:
            self._tile = _tile_size(image, MAX_WIDTH // self._columns)
        height, width = self._tile
        tile = _fitted(image, height, width)
        self._images[episode].append(zlib.compress(tile.tobytes(), FASTEST))

    def write(self) -> None:
        """Write the file, which appears when it is complete, and log it. Raises DppoError."""
        if not any(self._images):
            return
        temporary = self._path.with_name(f".{self._path.stem}-{os.getpid()}.mp4")
        try:
            with writing(self._path, DppoError):  # errors of PyAV are those of a disk, too
                facts = self._encode(temporary)
                os.replace(temporary, self._path)
        finally:
            temporary.unlink(missing_ok=True)
        num_episodes = sum(map(bool, self._images))
        logger.info("%s: %s, %s", self._path, counted(num_episodes, "episode"), facts)

    def _encode(self, path: Path) -> str:
        import av

        frames = max(map(len, self._images))
        rate = Fraction(self._fps).limit_denominator(1000)
        options = {"movflags": "faststart"}
        with av.open(str(path), "w", format="mp4", options=options) as container:
            stream: Any = container.add_stream("libx264", rate=rate)
            stream.pix_fmt = "yuv420p"
            stream.options = {"crf": "20", "preset": "veryfast"}
            stream.height, stream.width = self._picture(0).shape[:2]
            for picture in map(self._picture, range(frames)):
                frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
                container.mux(stream.encode(frame))
            container.mux(stream.encode())
        return f"{counted(frames, 'image')} of {stream.width} x {stream.height}, {self._fps:g} per second"

    def _picture(self, number: int) -> np.ndarray:
        """Return the images of a time side by side; the last of an episode that is over, at half its brightness."""
        assert self._tile is not None
        height, width = self._tile
        rows = math.ceil(len(self._images) / self._columns)
        shape = (rows * (height + self._margin), self._columns * (width + self._margin), 3)
        picture = np.full(shape, GRAY, np.uint8)
        for tile, images in enumerate(self._images):
            if images:
                compressed = images[min(number, len(images) - 1)]
                data = zlib.decompress(compressed)
                image = np.frombuffer(data, np.uint8).reshape(height, width, 3)
                if number >= len(images):
                    image = image // 2
                row, column = divmod(tile, self._columns)
                top = row * (height + self._margin) + self._margin // 2
                left = column * (width + self._margin) + self._margin // 2
                picture[top : top + height, left : left + width] = image
        return picture


def image_of(env: Any) -> np.ndarray:
    """Return what `env` renders as an image [height, width, 3]; raise ConfigError if it is none."""
    try:
        rendered = env.render()
    except Exception as error:  # raised by the environment
        raise ConfigError(
            f"video: render() of the environment raised {in_a_line(error)}."
        ) from None
    try:
        image = np.asarray(rendered)
    except (TypeError, ValueError):  # parts that do not fit together
        image = np.empty(0)
    is_image = image.dtype == np.uint8 and image.ndim == 3 and image.size > 0
    if not is_image or image.shape[2] not in (3, 4):
        mode = f"whose render_mode is {getattr(env, 'render_mode', None)!r}"
        raise ConfigError(
            f"video: render() of the environment, {mode}, returned {_describe(rendered, image)}, not an image "
            f"uint8[height, width, 3]. Return one if its render_mode is rgb_array."
        )
    return image[..., :3]


def _describe(rendered: Any, image: np.ndarray) -> str:
    """Describe what `render()` returned, and its array `image`."""
    if isinstance(rendered, tuple | list):
        return f"a {type(rendered).__name__} of {len(rendered)}"
    if image.ndim:
        return f"an array {image.dtype}{list(image.shape)}"
    text = repr(rendered)
    if len(text) <= MAX_CHARACTERS:
        return text
    return f"{text[:MAX_CHARACTERS]}..."


def _tile_size(image: np.ndarray, max_side: int) -> tuple[int, int]:
    """Return height and width of tiles for images like `image`: even, as yuv420p needs, and up to `max_side`."""
    longer = max(image.shape[:2])
    enlarged_by = max(1, MIN_SIDE // longer)
    scale = min(enlarged_by, max_side / longer)
    height, width = (max(1, round(scale * side)) for side in image.shape[:2])
    return height + height % 2, width + width % 2


def _fitted(image: np.ndarray, height: int, width: int) -> np.ndarray:
    """Return an image, reduced or enlarged by a whole number, in the middle of one of this size."""
    import av

    scale = min(height / image.shape[0], width / image.shape[1])
    method = "AREA"  # means
    if scale >= 1:
        scale = int(scale)
        method = "POINT"  # sharp pixels
    image_height, image_width = (max(1, round(scale * side)) for side in image.shape[:2])
    frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
    scaled = frame.reformat(image_width, image_height, interpolation=method)
    top = (height - image_height) // 2
    left = (width - image_width) // 2
    fitted = np.full((height, width, 3), GRAY, np.uint8)
    fitted[top : top + image_height, left : left + image_width] = scaled.to_ndarray()
    return fitted
