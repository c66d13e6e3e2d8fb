"""The small trained denoiser: its file, its measures, and what DeepCache does to its images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from warmgraph_tools.denoiser import quality
from warmgraph_tools.denoiser.images import psnr, ssim
from warmgraph_tools.denoiser.pictures import SIZE
from warmgraph_tools.denoiser.quality import FILE, Task
from warmgraph_tools.inprocess import Host

TASK = Task(classes=(4,), seeds=(1,), steps=11)


def test_psnr_of_equal_images_is_infinite() -> None:
    image = torch.rand(2, SIZE, SIZE, 3)
    assert psnr(image, image).tolist() == [math.inf] * 2
    assert psnr(image, image + 0.1).tolist() == pytest.approx([20.0] * 2, abs=1e-4)


def test_ssim_equals_its_definition() -> None:
    """Window by window, from weighted means, variances and covariances."""
    generator = np.random.default_rng(0)
    x = generator.random((13, 12))
    y = 0.7 * x + 0.3 * generator.random((13, 12))
    side = np.exp(-0.5 * ((np.arange(11) - 5) / 1.5) ** 2)
    weight = np.outer(side, side) / side.sum() ** 2
    found = []
    for top in range(3):
        for left in range(2):
            a, b = (image[top : top + 11, left : left + 11] for image in (x, y))
            mean_a, mean_b = (weight * a).sum(), (weight * b).sum()
            variances = (weight * (a - mean_a) ** 2).sum() + (weight * (b - mean_b) ** 2).sum()
            covariance = (weight * (a - mean_a) * (b - mean_b)).sum()
            found.append(
                (2 * mean_a * mean_b + 0.01**2)
                * (2 * covariance + 0.03**2)
                / ((mean_a**2 + mean_b**2 + 0.01**2) * (variances + 0.03**2))
            )
    images = [torch.from_numpy(image)[None, :, :, None] for image in (x, y)]
    assert float(ssim(*images)) == pytest.approx(np.mean(found), rel=1e-9)
    assert float(ssim(images[0], images[0])) == pytest.approx(1.0)


@pytest.fixture(scope="module")
def model(host: Host) -> Any:
    """The shipped denoiser, loaded by the host."""
    if not FILE.is_file():
        pytest.skip(f"{FILE.name} is not there: dev/tools/denoiser/README.md says how to train it")
    from warmgraph_tools.denoiser import arch  # noqa: F401  registers by being imported

    return quality.load(FILE)


def test_the_host_knows_the_file_as_ours(model: Any) -> None:
    from warmgraph_tools.denoiser.arch import CONFIG, Denoiser

    assert FILE.stat().st_size <= 12e6
    config = model.model.model_config
    assert type(config) is Denoiser
    assert {name: config.unet_config[name] for name in CONFIG} == CONFIG


@pytest.mark.slow
def test_an_interval_of_one_gives_the_plain_images(model: Any) -> None:
    bench = quality.Bench(model, TASK)
    assert bench.plain.pictures.isfinite().all() and bench.plain.pictures.std() > 0.05
    every = bench.by_interval("uniform", 1, 0).row
    assert every.psnr == math.inf and every.ssim == pytest.approx(1.0) and every.work == 1
    third, tenth = (bench.by_interval("uniform", interval, 0).row for interval in (3, 10))
    assert (third.full, third.shallow, third.plain) == (4, 7, 11)
    assert third.psnr > tenth.psnr and third.work > tenth.work


@pytest.mark.slow
def test_a_threshold_is_found_at_which_work_is_equal(model: Any) -> None:
    bench = quality.Bench(model, TASK._replace(steps=4))
    uniform = bench.by_interval("uniform", 2, 0).row
    row = bench.at_work("LazyCache", uniform).row
    assert row.threshold is not None
    assert abs(row.work - uniform.work) < 0.5 and row.full < row.plain
