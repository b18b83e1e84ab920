"""Encoders and the networks made of them: acting equals learning, exact codes, initial weights, words."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from builders import collect, parts_of
from encoder_kinds import config_of
from gymnasium import spaces as gym_spaces
from numpy.testing import assert_allclose, assert_array_equal
from torch import nn
from torch.testing import assert_close
from worlds import observed

from dppo.config import PPO, Network
from dppo.envs.spaces import describe_spaces
from dppo.errors import ConfigError
from dppo.ppo.exchange.inputs import no_statistics, normalized_part, reader_of
from dppo.ppo.exchange.records import PolicySnapshot
from dppo.ppo.exchange.scales import Moments, ObsScale, Statistics
from dppo.ppo.learning.batch import make_batch
from dppo.ppo.networks.built_in import BuiltInSpec
from dppo.ppo.networks.choice import choose_network, learning_network
from dppo.ppo.networks.encoders import Embedding, Flatten, OneHot
from dppo.ppo.networks.images import Image, grid_cnn, impala_cnn, nature_cnn
from dppo.spaces.spaces import Categories, Spaces, is_image


def test_one_hot_codes_have_a_column_for_each_category() -> None:
    encoder = OneHot(Categories((3, 2), (-1, 5)))
    first = torch.tensor([-1.0, 1.0, 0.0])
    second = torch.tensor([5.0, 6.0, 9.0])  # the last one is no category, and has no column
    codes = encoder(torch.stack([first, second], dim=1))
    first_code = codes[:, :3]
    second_code = codes[:, 3:]
    assert first_code.tolist() == [[1, 0, 0], [0, 0, 1], [0, 1, 0]]
    assert second_code.tolist() == [[1, 0], [0, 1], [0, 0]]

    scalar = OneHot(Categories((2,), (0,)))
    codes = scalar(torch.tensor([1.0, 0.0]))
    assert codes.tolist() == [[0, 1], [1, 0]]


def test_each_category_has_an_embedding_of_its_own() -> None:
    encoder = Embedding(Categories((3, 2), (-1, 5)))
    table = encoder.table.weight
    pairs = list(product((-1, 0, 1), (5, 6)))
    codes = encoder(torch.tensor(pairs).float())

    for (first, second), code in zip(pairs, codes, strict=True):
        first_code = table[first + 1]
        second_code = table[3 + second - 5]
        assert torch.equal(code, torch.cat([first_code, second_code]))


STACK = "stack, channels last"
AXES = {
    "channels last": ((84, 80, 4), (4, 84, 80)),
    "channels first": ((3, 64, 60), (3, 64, 60)),
    STACK: ((4, 40, 44, 3), (12, 40, 44)),
    "stack, channels first": ((2, 3, 40, 44), (6, 40, 44)),
}


@pytest.mark.parametrize("name", AXES)
def test_axes_of_images_are_recognized(name: str) -> None:
    shape, expected = AXES[name]
    image = Image(shape)
    count = 2 * math.prod(shape)
    pixels = torch.arange(count).reshape(2, *shape)
    recorded = image(pixels)

    assert recorded.shape == (2, *expected)
    assert (image.channels, image.height, image.width) == expected
    in_order = recorded.flatten().sort().values
    assert torch.equal(in_order, pixels.flatten())
    if name == STACK:
        second_frame_third = pixels[1, 2]
        channel = recorded[1, 2 * 3 + 1]
        assert torch.equal(channel, second_frame_third[..., 1])


def convolutions_of(network: nn.Module) -> list[nn.Conv2d]:
    return [layer for layer in network.modules() if isinstance(layer, nn.Conv2d)]


LEAVE_A_REST = {
    "of the paper": (84, 84, 4),
    "smallest": (36, 36, 1),
    "in the second axis": (37, 50, 3),
    "in both axes": (43, 40, 2),
    "of channels first": (4, 64, 61),
}


@pytest.mark.proves("nature_cnn")
@pytest.mark.parametrize("shape", LEAVE_A_REST.values(), ids=LEAVE_A_REST)
def test_the_nature_cnn_is_that_of_the_paper(shape: tuple[int, ...]) -> None:
    """Compared with the same layers over pixels divided by 255; sizes that leave a rest at each stride."""
    cnn = nature_cnn(shape, 16)
    pixels = torch.randint(0, 256, (3, *shape)).float()

    hidden = cnn.image(pixels) / 255
    layers = convolutions_of(cnn.layers)
    assert len(layers) == 3
    for layer, stride in zip(layers, (4, 2, 1), strict=True):
        convolved = nn.functional.conv2d(hidden, layer.weight, layer.bias, stride)
        hidden = convolved.relu()
    expected = cnn.last(hidden.flatten(1))

    features = cnn(pixels)
    assert_close(features, expected, rtol=1e-4, atol=1e-5)


SIZES = {
    "small": (7, 7, 3),
    "wide": (19, 25, 3),
    "large": (64, 64, 3),
    "a pixel": (1, 1, 1),
    "channels first": (3, 5, 6),
    "stack": (2, 9, 8, 1),
}


@pytest.mark.parametrize(("make", "convolutions"), [(impala_cnn, 15), (grid_cnn, 3)])
@pytest.mark.parametrize("shape", SIZES.values(), ids=SIZES)
def test_other_cnns_take_images_of_any_size(
    make: Any, convolutions: int, shape: tuple[int, ...]
) -> None:
    cnn = make(shape, 16)
    pixels = torch.randint(0, 256, (2, *shape))
    acted_on = pixels.float()
    learned_from = pixels.to(torch.uint8)

    features = cnn(acted_on)
    assert features.shape == (2, 16)
    assert_close(features, cnn(learned_from))
    assert len(convolutions_of(cnn)) == convolutions


@pytest.mark.proves("grid_cnn")
def test_the_grid_cnn_reads_the_bits_of_each_byte() -> None:
    """The convolutions see eight inputs, each 0 or 1, from which every byte follows."""
    cnn = grid_cnn((7, 8, 3), 16)
    recorded: list[torch.Tensor] = []

    def record(layers: nn.Module, inputs: tuple[torch.Tensor]) -> None:
        recorded.append(inputs[0])

    cnn.layers.register_forward_pre_hook(record)
    image = torch.randint(0, 256, (5, 7, 8, 3))
    cnn(image.float())
    bits = recorded[0].view(5, 3, 8, 7, 8)
    assert set(bits.unique().tolist()) == {0, 1}

    places = 2.0 ** torch.arange(8)
    numbers = bits * places[:, None, None]
    channels_first = image.permute(0, 3, 1, 2)
    assert torch.equal(numbers.sum(2).long(), channels_first)


def test_a_flattened_image_is_divided_by_255() -> None:
    image = Flatten((2, 1, 1), 255.0)
    pixels = torch.tensor([0.0, 255.0])
    flattened = image(pixels.view(1, 2, 1, 1))
    assert flattened.tolist() == [[0, 1]]

    scalar = Flatten(())
    numbers = torch.tensor([3.0, 4.0])
    assert scalar(numbers).tolist() == [[3], [4]]


def test_images_stay_bytes_in_segment_and_batch() -> None:
    samplers, trainer = parts_of(config_of("impala"), 1)
    policy = PolicySnapshot(0, trainer.weights())
    _, segments = collect(samplers, policy)
    ppo = PPO(gamma=0.9, gae_lambda=0.9)
    images = make_batch(segments, None, None, ppo).obs
    assert isinstance(images, torch.Tensor)
    assert images.dtype == torch.uint8


def described_whole(**arguments: Any) -> Spaces:
    """Return an observation of two arms, a camera and categories."""
    return described(observed.WHOLE, drop_obs=observed.TEXTS, **arguments)


def robot(spaces: Spaces, hands: Any, elbows: Any, gear: int) -> np.ndarray:
    """Return two observations with these numbers, and zeros elsewhere."""
    rows = np.zeros(2, spaces.obs)
    rows["robot"]["arm"]["0"] = hands
    rows["robot"]["arm"]["1"] = elbows
    rows["gear"] = gear
    return rows


def read(rows: np.ndarray, scale: ObsScale | None) -> dict[str, Any]:
    """Return the inputs of a network, by leaf."""
    reader = reader_of(rows.dtype, "float32")
    reader.load(scale)
    inputs = reader.read(rows)
    assert isinstance(inputs, dict)
    return inputs


def test_only_floats_of_several_leaves_are_normalized() -> None:
    spaces = described_whole()
    width = 2 + 1 + 2
    for count in (3, 0):  # of a segment in which every step has failed, too
        part = normalized_part(np.zeros(count, spaces.obs))
        assert part.shape == (count, width)

    hands = [[1, 20], [3, 60]]
    elbows = [700, 800]
    rows = robot(spaces, hands, elbows, gear=3)
    statistics = Statistics(Moments.of(normalized_part(rows)))
    inputs = read(rows, statistics.obs_scale())
    standardized = np.array([-1, 1])
    by_column = np.stack([standardized, standardized], axis=1)
    assert_allclose(inputs["robot.arm.0"], by_column, rtol=1e-6)
    assert_allclose(inputs["robot.arm.1"], standardized, rtol=1e-6)
    assert_array_equal(inputs["gear"], rows["gear"], strict=True)


def test_norm_obs_keys_leaves_the_other_floats_as_they_are() -> None:
    spaces = described_whole(norm_obs_keys=("robot/arm/1",))
    assert spaces.normalized == ("robot.arm.1",)

    hands = [[1, 2], [50, 60]]
    elbows = [70, 80]
    rows = robot(spaces, hands, elbows, gear=100)
    all_floats = normalized_part(rows)
    assert_array_equal(all_floats, [[1, 2, 70, 0, 0], [50, 60, 80, 0, 0]])

    chosen = normalized_part(rows, spaces.normalized)
    assert_array_equal(chosen, [[70], [80]])

    statistics = no_statistics(spaces, obs=True, returns=False)
    merged = statistics.merged([Statistics(Moments.of(chosen))])
    inputs = read(rows, merged.obs_scale())
    assert_array_equal(inputs["robot.arm.0"], hands)  # not even clipped
    assert_allclose(inputs["robot.arm.1"], [-1, 1], rtol=1e-6)


@pytest.mark.parametrize(
    ("key", "words"),
    [("arm", "not a leaf .* Its leaves are "), ("camera", r"no floating-point numbers \(uint8\)")],
)
def test_names_that_cannot_be_normalized_are_refused(key: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"norm_obs_keys={key}: .*{words}"):
        described_whole(norm_obs_keys=(key,))


def described(space: Any, **arguments: Any) -> Spaces:
    class Shaped:
        observation_space = space
        action_space = gym_spaces.Box(-1, 1, (2,))

    return describe_spaces(Shaped(), **arguments)  # type: ignore[arg-type]


def image_space(*shape: int) -> gym_spaces.Box:
    return gym_spaces.Box(0, 255, shape, np.uint8)


VECTORS = (
    gym_spaces.Box(-1, 1, (3,)),
    gym_spaces.Box(-1, 1, (2, 3)),
    gym_spaces.MultiBinary(4),
    image_space(128),
    gym_spaces.Box(-1, 1, ()),
)


def test_a_vector_keeps_the_handwritten_mlp() -> None:
    for space in VECTORS:
        spec = choose_network(Network(), described(space)).spec
        assert isinstance(spec, BuiltInSpec)
        assert spec.is_mlp


def convolution_size(kernel: int, inputs: int, outputs: int) -> int:
    return kernel * kernel * inputs * outputs + outputs


def test_an_image_gets_a_cnn_that_fits_its_size() -> None:
    large = described(image_space(84, 84, 4))
    nature = choose_network(Network(), large)
    convolutions = (
        convolution_size(8, 4, 32),
        convolution_size(4, 32, 64),
        convolution_size(3, 64, 64),
    )
    features = 7 * 7 * 64 * 512 + 512
    means = 512 * 2 + 2
    value = 512 + 1
    log_stds = 2
    expected = sum(convolutions) + features + means + value + log_stds
    assert nature.spec.num_parameters == expected
    assert str(nature) == (
        f"Network: a Nature CNN, shared by policy and value, {expected:,} parameters, because the "
        f"observation is an image of 84 x 84 x 4 bytes."
    )

    small = described(image_space(20, 20, 3))
    grid = choose_network(Network(), small)
    assert grid.layers == "a grid CNN, shared by policy and value"


def test_an_image_that_is_the_only_leaf_of_a_dict_has_no_hidden_layers_either() -> None:
    spaces = described(gym_spaces.Dict(image=image_space(40, 40, 3)))
    choice = choose_network(Network(), spaces)
    assert "units" not in choice.layers
    network = Network(hidden_sizes=(7, 9))
    words = r"^hidden_sizes=\(7, 9\) has no effect: a single image goes from its encoder"
    with pytest.raises(ConfigError, match=words):
        choose_network(network, spaces)


def test_every_choice_can_be_overridden() -> None:
    arm = gym_spaces.Box(-1, 1, (3,))
    spaces = described(gym_spaces.Dict(camera=image_space(40, 40, 3), arm=arm))

    def size(**changes: Any) -> int:
        network = Network(**changes)
        return choose_network(network, spaces).spec.num_parameters

    default = size()
    separate = size(trunk="separate")
    layer_norm = size(layer_norm=True)
    sizes = {
        default,
        separate,
        layer_norm,
        size(image_encoder="impala"),
        size(image_encoder="grid"),
        size(image_encoder="flatten"),
        size(image_features=600),
        size(hidden_sizes=(64, 64, 64)),
    }
    assert len(sizes) == 8
    assert layer_norm - default == 2 * 64 * 2
    assert separate > 1.9 * default


def test_the_built_in_class_is_one_that_anybody_can_name() -> None:
    """No privilege: a user who gives the same class and arguments gets the same network."""
    spaces = described(image_space(40, 40, 3))
    assert is_image(spaces.obs)

    layers = {"image_encoder": "nature", "image_features": 512}
    named = Network(model="dppo.ppo.networks.encoders:EncoderNetwork", model_kwargs=layers)

    def weights(network: Network) -> torch.Tensor:
        spec = choose_network(network, spaces).spec
        assert isinstance(spec, BuiltInSpec) == (network.model is None)
        return learning_network(spec, 3).parameters.weights.detach()

    assert torch.equal(weights(named), weights(Network()))
