"""Encoders and the networks made of them: acting equals learning, exact codes, initial weights, words."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from builders import collect, parts_of
from encoder_kinds import config_of
from gymnasium import spaces as gym_spaces
from torch import nn
from worlds import observed

from dppo.config import PPO, Network
from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError
from dppo.ppo.exchange.inputs import no_statistics, normalized_part, reader_of
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import Moments, Statistics
from dppo.ppo.learning.batch import make_batch
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.choice import choose_network, learning_network
from dppo.ppo.networks.encoders import Embedding, Flatten, OneHot
from dppo.ppo.networks.images import Image, grid_cnn, impala_cnn, nature_cnn
from dppo.spaces.spaces import Categories, Spaces, is_image


def test_one_hot_codes_have_a_column_for_each_category() -> None:
    encoder = OneHot(Categories((3, 2), (-1, 5)))
    leaf = torch.tensor([[-1.0, 5.0], [1.0, 6.0], [0.0, 9.0]])
    assert encoder(leaf).tolist() == [[1, 0, 0, 1, 0], [0, 0, 1, 0, 1], [0, 1, 0, 0, 0]]
    assert OneHot(Categories((2,), (0,)))(torch.tensor([1.0, 0.0])).tolist() == [[0, 1], [1, 0]]


def test_each_category_has_an_embedding_of_its_own() -> None:
    encoder = Embedding(Categories((3, 2), (-1, 5)))
    leaf = torch.tensor([[a, b] for a in (-1.0, 0.0, 1.0) for b in (5.0, 6.0)])
    table = encoder.table.weight
    for (a, b), code in zip(leaf.tolist(), encoder(leaf), strict=True):
        assert torch.equal(code, torch.cat([table[int(a) + 1], table[3 + int(b) - 5]]))


AXES = {
    (84, 80, 4): (4, 84, 80),
    (3, 64, 60): (3, 64, 60),
    (4, 40, 44, 3): (12, 40, 44),
    (2, 3, 40, 44): (6, 40, 44),
}


@pytest.mark.parametrize(("shape", "expected"), AXES.items(), ids=str)
def test_axes_of_images_are_recognized(shape: tuple[int, ...], expected: tuple[int, ...]) -> None:
    image = Image(shape)
    pixels = torch.arange(2 * int(np.prod(shape))).reshape(2, *shape)
    recorded = image(pixels)
    assert recorded.shape == (2, *expected) == (2, image.channels, image.height, image.width)
    assert sorted(recorded.flatten().tolist()) == pixels.flatten().tolist()
    if shape == (4, 40, 44, 3):
        assert torch.equal(recorded[1, 3 * 2 + 1], pixels[1, 2, :, :, 1])


@pytest.mark.proves("nature_cnn")
@pytest.mark.parametrize(
    "shape", [(84, 84, 4), (36, 36, 1), (37, 50, 3), (43, 40, 2), (4, 64, 61)], ids=str
)
def test_the_nature_cnn_is_that_of_the_paper(shape: tuple[int, ...]) -> None:
    """Compared with the same layers over pixels divided by 255; sizes that leave a rest at each stride."""
    cnn = nature_cnn(shape, 16)
    pixels = torch.randint(0, 256, (3, *shape)).float()
    x = cnn.image(pixels) / 255
    convolutions = [layer for layer in cnn.layers if isinstance(layer, nn.Conv2d)]
    for layer, stride in zip(convolutions, (4, 2, 1), strict=True):
        x = torch.nn.functional.conv2d(x, layer.weight, layer.bias, stride).relu()
    torch.testing.assert_close(cnn(pixels), cnn.last(x.flatten(1)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("make", "convolutions"), [(impala_cnn, 15), (grid_cnn, 3)])
@pytest.mark.parametrize(
    "shape", [(7, 7, 3), (19, 25, 3), (64, 64, 3), (1, 1, 1), (3, 5, 6), (2, 9, 8, 1)], ids=str
)
def test_other_cnns_take_images_of_any_size(
    make: Any, convolutions: int, shape: tuple[int, ...]
) -> None:
    cnn = make(shape, 16)
    image = torch.randint(0, 256, (2, *shape))
    assert cnn(image.float()).shape == (2, 16)
    # acting gets floats, learning bytes
    torch.testing.assert_close(cnn(image.float()), cnn(image.to(torch.uint8)))
    assert len([part for part in cnn.modules() if isinstance(part, nn.Conv2d)]) == convolutions


@pytest.mark.proves("grid_cnn")
def test_the_grid_cnn_reads_the_bits_of_each_byte() -> None:
    """The convolutions see eight inputs, each 0 or 1, from which every byte follows."""
    cnn = grid_cnn((7, 8, 3), 16)
    recorded = []
    cnn.layers.register_forward_pre_hook(lambda _, inputs: recorded.append(inputs[0]))
    image = torch.randint(0, 256, (5, 7, 8, 3))
    cnn(image.float())
    bits = recorded[0].view(5, 3, 8, 7, 8)
    assert set(bits.unique().tolist()) == {0, 1}
    assert torch.equal(
        (bits * 2.0 ** torch.arange(8)[:, None, None]).sum(2).long(), image.permute(0, 3, 1, 2)
    )


def test_a_flattened_image_is_divided_by_255() -> None:
    assert Flatten((2, 1, 1), 255.0)(torch.tensor([[[[0.0]], [[255.0]]]])).tolist() == [[0, 1]]
    assert Flatten(())(torch.tensor([3.0, 4.0])).tolist() == [[3], [4]]


def test_images_stay_bytes_in_segment_and_batch() -> None:
    samplers, trainer = parts_of(config_of("impala"), 1)
    _, segments = collect(samplers, PolicySnapshot(0, trainer.weights()))
    images = make_batch(segments, None, None, PPO(gamma=0.9, gae_lambda=0.9)).obs
    assert isinstance(images, torch.Tensor)
    assert images.dtype == torch.uint8


def test_only_floats_of_several_leaves_are_normalized() -> None:
    spaces = described(observed.WHOLE, drop_obs=observed.TEXTS)
    for count in (3, 0):  # of a segment in which every step has failed, too
        assert normalized_part(np.zeros(count, spaces.obs)).shape == (count, 2 + 1 + 2)
    rows = np.zeros(2, spaces.obs)
    rows["robot"]["arm"]["0"] = [[1, 20], [3, 60]]
    rows["robot"]["arm"]["1"] = [700, 800]
    rows["gear"] = 3
    reader = reader_of(rows.dtype, "float32")
    reader.load(Statistics(Moments.of(normalized_part(rows))).obs_scale())
    inputs = reader.read(rows)
    assert isinstance(inputs, dict)
    np.testing.assert_allclose(inputs["robot.arm.0"], [[-1, -1], [1, 1]], rtol=1e-6)
    np.testing.assert_allclose(inputs["robot.arm.1"], [-1, 1], rtol=1e-6)
    np.testing.assert_array_equal(inputs["gear"], rows["gear"], strict=True)


def test_norm_obs_keys_leaves_the_other_floats_as_they_are() -> None:
    spaces = described(observed.WHOLE, drop_obs=observed.TEXTS, norm_obs_keys=("robot/arm/1",))
    assert spaces.normalized == ("robot.arm.1",)
    rows = np.zeros(2, spaces.obs)
    rows["robot"]["arm"]["0"] = [[1, 2], [50, 60]]
    rows["robot"]["arm"]["1"] = [70, 80]
    rows["gear"] = 100
    np.testing.assert_array_equal(normalized_part(rows), [[1, 2, 70, 0, 0], [50, 60, 80, 0, 0]])
    normalized = normalized_part(rows, spaces.normalized)
    np.testing.assert_array_equal(normalized, [[70], [80]])
    statistics = no_statistics(spaces, obs=True, returns=False)
    scale = statistics.merged([Statistics(Moments.of(normalized))]).obs_scale()
    reader = reader_of(rows.dtype, "float32")
    reader.load(scale)
    inputs = reader.read(rows)
    assert isinstance(inputs, dict)
    np.testing.assert_array_equal(inputs["robot.arm.0"], [[1, 2], [50, 60]])  # not even clipped
    np.testing.assert_allclose(inputs["robot.arm.1"], [-1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "words"),
    [("arm", "not a leaf .* Its leaves are "), ("camera", r"no floating-point numbers \(uint8\)")],
)
def test_names_that_cannot_be_normalized_are_refused(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"norm_obs_keys={key}: .*{words}"):
        described(observed.WHOLE, drop_obs=observed.TEXTS, norm_obs_keys=(key,))


def described(space: Any, **arguments: Any) -> Spaces:
    class Shaped:
        observation_space = space
        action_space = gym_spaces.Box(-1, 1, (2,))

    return describe_spaces(Shaped(), **arguments)  # type: ignore[arg-type]


def test_a_vector_keeps_the_handwritten_mlp() -> None:
    for space in (gym_spaces.Box(-1, 1, (3,)), gym_spaces.Box(-1, 1, (2, 3)), gym_spaces.MultiBinary(4),
                  gym_spaces.Box(0, 255, (128,), np.uint8), gym_spaces.Box(-1, 1, ())):  # fmt: skip
        spec = choose_network(Network(), described(space)).spec
        assert isinstance(spec, BuiltInSpec)
        assert spec.is_mlp


def test_an_image_gets_a_cnn_that_fits_its_size() -> None:
    nature, grid = (
        choose_network(Network(), described(gym_spaces.Box(0, 255, shape, np.uint8)))
        for shape in ((84, 84, 4), (20, 20, 3))
    )
    convolutions = 8 * 8 * 4 * 32 + 32 + 4 * 4 * 32 * 64 + 64 + 3 * 3 * 64 * 64 + 64
    outputs = 512 * 2 + 2 + 512 + 1 + 2  # mean of two actions, value, log_std
    assert nature.spec.num_parameters == convolutions + 7 * 7 * 64 * 512 + 512 + outputs
    assert str(nature) == (
        f"Network: a Nature CNN, shared by policy and value, {nature.spec.num_parameters:,} parameters, because the "
        f"observation is an image of 84 x 84 x 4 bytes."
    )
    assert grid.layers == "a grid CNN, shared by policy and value"


def test_an_image_that_is_the_only_leaf_of_a_dict_has_no_hidden_layers_either() -> None:
    image = gym_spaces.Box(0, 255, (40, 40, 3), np.uint8)
    spaces = described(gym_spaces.Dict(image=image))
    assert "units" not in choose_network(Network(), spaces).layers
    with pytest.raises(
        ConfigError,
        match=r"^hidden_sizes=\(7, 9\) has no effect: a single image goes from its encoder",
    ):
        choose_network(Network(hidden_sizes=(7, 9)), spaces)


def test_every_choice_can_be_overridden() -> None:
    spaces = described(
        gym_spaces.Dict(
            camera=gym_spaces.Box(0, 255, (40, 40, 3), np.uint8), arm=gym_spaces.Box(-1, 1, (3,))
        )
    )

    def size(**changes: Any) -> int:
        return choose_network(Network(**changes), spaces).spec.num_parameters

    default = size()
    separate = size(trunk="separate")
    layer_norm = size(layer_norm=True)
    sizes = [size(image_encoder=encoder) for encoder in ("impala", "grid", "flatten")]
    sizes += [size(image_features=600), size(hidden_sizes=(64, 64, 64))]
    assert len({default, separate, layer_norm, *sizes}) == 8
    assert layer_norm - default == 2 * 64 * 2
    assert separate > 1.9 * default


def test_the_built_in_class_is_one_that_anybody_can_name() -> None:
    """No privilege: a user who gives the same class and arguments gets the same network."""
    spaces = described(gym_spaces.Box(0, 255, (40, 40, 3), np.uint8))
    spec = choose_network(Network(), spaces).spec
    assert isinstance(spec, BuiltInSpec)
    layers = {"image_encoder": "nature", "image_features": 512}
    network = Network(model="dppo.ppo.networks.encoders:EncoderNetwork", model_kwargs=layers)
    weights = [
        learning_network(candidate, 3).parameters.weights.detach()
        for candidate in (choose_network(network, spaces).spec, spec)
    ]
    assert torch.equal(*weights)
    assert is_image(spaces.obs)
